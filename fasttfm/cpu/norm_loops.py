"""Residual connection + dropout + LayerNorm, forward and backward, compiled by numba; arguments are not checked.

Element types are those of loop_parts.py, arithmetic is float32. Tensors are passed as addresses of C-contiguous memory:
a call has a dozen, and making an array of each costs more than the call itself.
"""

import numpy as np

from fasttfm.cpu.loop_parts import (
    FAST,
    draw_lanes,
    inlined,
    loop,
    multiply_add,
    numbers_at,
    read,
    round_to,
    rows_of_part,
    squares_of,
    total_of,
)
from fasttfm.cpu.thread_team import over_threads
from fasttfm.cpu.training_loops import PART

_SUMMED = np.uintp(32)
"""Rows whose parameter gradients are summed before they are added to their part's partial sum."""
_SUMS = np.uintp(128)
"""Most partial sums of the parameter gradients; they are reduced in order at the end."""


@inlined()
def _add(x, residual, first, width, drops, lanes, least, scale, keep, s, row):
    """Write s = residual + dropout(x), rounded, to s and to row in float32, and with drops the mask to keep."""
    for n in range(width):
        factor = scale
        if drops:
            kept = np.int32(lanes[n]) >= least
            keep[first + n] = np.uint8(kept)
            factor = scale if kept else np.float32(0.0)
        added = round_to(read(residual[first + n]) + read(x[first + n]) * factor, s[first + n])
        s[first + n] = added
        row[n] = read(added)


@loop()
def residual_layer_norm(
    team, rows, width, like, like_s, x, residual, weight, bias, eps, key, site, threshold, scale, keep, y, s, mean, rstd
):
    """Write y, s, mean, rstd and keep. threshold 0: no dropout, with keep 0 and scale 1.

    x, residual, keep, y and s (rows, width), weight and bias (width,), mean and rstd (rows,). like and like_s: an
    element of x's type and of residual's.
    """
    count = rows * width
    args = (
        numbers_at(x, count, like), numbers_at(residual, count, like_s), numbers_at(weight, width, eps),
        numbers_at(bias, width, eps), eps, key, site, threshold, scale, numbers_at(keep, count, np.uint8(0)),
        numbers_at(y, count, like), numbers_at(s, count, like_s), numbers_at(mean, rows, eps),
        numbers_at(rstd, rows, eps),
    )  # fmt: skip
    over_threads(_norm_rows, team, np.uintp(rows), rows_of_part(width, PART), args)


@inlined(error_model="numpy")  # with eps 0 a constant row gives NaN, as in PyTorch, and no exception
def _norm_rows(begin, end, x, residual, weight, bias, eps, key, site, threshold, scale, keep, y, s, mean, rstd):
    width = np.uintp(weight.shape[0])
    row = np.empty(width, np.float32)
    words = np.empty((width + np.uintp(15)) // np.uintp(16) * np.uintp(4), np.uint32)
    lanes = words.view(np.uint8)
    least, inverse = np.int32(threshold), np.float32(1.0) / np.float32(width)
    for r in range(begin, end):
        first = r * width
        if threshold:
            draw_lanes(words, key, np.uint64(r), np.uint64(0), site)
        _add(x, residual, first, width, threshold > 0, lanes, least, scale, keep, s, row)
        mean[r] = middle = total_of(row, np.uintp(0), width) * inverse
        rstd[r] = factor = np.float32(1.0) / np.sqrt(squares_of(row, width, middle) * inverse + eps)
        for n in range(width):
            normed = multiply_add((row[n] - middle) * factor, weight[n], bias[n])
            y[first + n] = round_to(normed, y[first + n])


@loop()
def residual_layer_norm_gradient(
    team, rows, width, like, like_s, dy, ds, s, mean, rstd, weight, keep, scale, dx, dresidual, dweight, dbias
):
    """Write dx, dresidual, and in float32 dweight and dbias; ds, keep and dx may be 0, for none.

    dy, ds, s, dx, dresidual and keep (rows, width), weight, dweight and dbias (width,), mean and rstd (rows,); like and
    like_s as for residual_layer_norm().
    """
    step = max(np.uintp(1), (np.uintp(rows) + _SUMMED * _SUMS - np.uintp(1)) // (_SUMMED * _SUMS)) * _SUMMED
    parts = (np.uintp(rows) + step - np.uintp(1)) // step
    sums = np.zeros((np.uintp(2), parts, np.uintp(width)), np.float32)
    count = rows * width
    args = (
        numbers_at(dy, count, like), numbers_at(ds, count, like_s), numbers_at(s, count, like_s),
        numbers_at(mean, rows, scale), numbers_at(rstd, rows, scale), numbers_at(weight, width, scale),
        numbers_at(keep, count, np.uint8(0)), scale, ds != 0, keep != 0, numbers_at(dx, count if dx else 0, like),
        numbers_at(dresidual, count, like_s), sums, step,
    )  # fmt: skip
    over_threads(_norm_gradient_rows, team, np.uintp(rows), step, args)
    of_weight, of_bias = numbers_at(dweight, width, scale), numbers_at(dbias, width, scale)
    of_weight[:] = np.float32(0.0)
    of_bias[:] = np.float32(0.0)
    for part in range(parts):
        of_weight += sums[0, part]
        of_bias += sums[1, part]


@inlined(fastmath=FAST)
def _row_sums(dy, s, first, width, weight, middle, factor):
    """The sums of dy * weight and of dy * weight * normalised row."""
    total, product = np.float32(0.0), np.float32(0.0)
    for n in range(width):
        weighted = read(dy[first + n]) * weight[n]
        total += weighted
        product += weighted * ((read(s[first + n]) - middle) * factor)
    return total, product


@inlined()
def _row_gradient(dy, adds, ds, s, first, width, weight, middle, factor, total, product, out):
    """Write the gradient of a row of s to out[first : first + width], plus ds with adds. The normalised row is
    recomputed: stores are the bottleneck, and so all of them are results."""
    for n in range(width):
        normal = (read(s[first + n]) - middle) * factor
        value = factor * multiply_add(-normal, product, multiply_add(read(dy[first + n]), weight[n], -total))
        if adds:
            value += read(ds[first + n])
        out[first + n] = round_to(value, out[first + n])


@inlined()
def _norm_gradient_rows(begin, end, dy, ds, s, mean, rstd, weight, keep, scale, adds, drops, dx, dresidual, sums, step):
    """Rows begin to end; adds the gradients of weight and bias to sums (2, parts, N) float32."""
    width = np.uintp(weight.shape[0])
    inverse = np.float32(1.0) / np.float32(width)
    of_weight, of_bias = sums[0, begin // step], sums[1, begin // step]
    for block in range(begin, end, _SUMMED):
        weight_sums, bias_sums = np.zeros(width, np.float32), np.zeros(width, np.float32)
        for r in range(block, min(block + _SUMMED, end)):
            first, middle, factor = r * width, mean[r], rstd[r]
            for n in range(width):
                of_y = read(dy[first + n])
                normal = (read(s[first + n]) - middle) * factor
                weight_sums[n] = multiply_add(of_y, normal, weight_sums[n])
                bias_sums[n] += of_y
            total, product = _row_sums(dy, s, first, width, weight, middle, factor)
            total, product = total * inverse, product * inverse
            _row_gradient(dy, adds, ds, s, first, width, weight, middle, factor, total, product, dresidual)
            if dx.shape[0] == 0:
                continue
            if drops:
                for n in range(width):
                    kept = scale if keep[first + n] else np.float32(0.0)
                    dx[first + n] = round_to(read(dresidual[first + n]) * kept, dx[first + n])
            else:  # a separate loop: with the condition inside it does not vectorise
                for n in range(width):
                    dx[first + n] = round_to(read(dresidual[first + n]), dx[first + n])
        of_weight += weight_sums
        of_bias += bias_sums
