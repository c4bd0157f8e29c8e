"""The loops of a residual connection, its dropout and the LayerNorm behind it, and their gradients, for numba.

As in training_loops.py numbers are of the kinds that loop_parts.py reads and writes, and everything between is float32.
Tensors come as the addresses of C-contiguous memory: a call takes a dozen, and an array of each costs more than the
call itself. Nothing is checked here.
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
    rows_at,
    squares_of,
    total_of,
)
from fasttfm.cpu.thread_team import over_threads
from fasttfm.cpu.training_loops import rows_of_part

_SUMMED = np.uintp(32)
"""Rows whose gradients of a norm's parameters are added up before they join the sum of their part."""
_SUMS = np.uintp(128)
"""Parts, at most, whose gradients of a norm's parameters are added up, in their order, when all are done."""


@inlined()
def _add(flat_x, flat_residual, first, width, drops, lanes, least, scale, keep, flat_s, row):
    """s = residual + dropout(x), of which row takes what was written; keep tells what was kept, where drops is true."""
    for n in range(width):
        factor = scale
        if drops:
            kept = np.int32(lanes[n]) >= least
            keep[first + n] = np.uint8(kept)
            factor = scale if kept else np.float32(0.0)
        added = round_to(read(flat_residual[first + n]) + read(flat_x[first + n]) * factor, flat_s[first + n])
        flat_s[first + n] = added
        row[n] = read(added)


@loop()
def residual_layer_norm(
    team, rows, width, like, like_s, x, residual, weight, bias, eps, key, site, threshold, scale, keep, y, s, mean, rstd
):
    """y, s, mean, rstd and keep of x, residual, weight and bias; threshold 0 drops nothing, keep is then 0 and
    scale 1.

    x, keep and y (rows, width), residual and s alike, weight and bias (width,), mean and rstd (rows,). like and like_s:
    any number of x's kind and of residual's.
    """
    given = (
        rows_at(x, rows, width, like), rows_at(residual, rows, width, like_s), numbers_at(weight, width, eps),
        numbers_at(bias, width, eps), eps, key, site, threshold, scale, rows_at(keep, rows, width, np.uint8(0)),
        rows_at(y, rows, width, like), rows_at(s, rows, width, like_s), numbers_at(mean, rows, eps),
        numbers_at(rstd, rows, eps),
    )  # fmt: skip
    over_threads(_norm_rows, team, np.uintp(rows), rows_of_part(width), given)


@inlined()
def _norm_rows(begin, end, x, residual, weight, bias, eps, key, site, threshold, scale, keep, y, s, mean, rstd):
    width = np.uintp(x.shape[1])
    flat_x, flat_residual, flat_keep = x.reshape(-1), residual.reshape(-1), keep.reshape(-1)
    flat_y, flat_s = y.reshape(-1), s.reshape(-1)
    row = np.empty(width, np.float32)
    words = np.empty((width + np.uintp(15)) // np.uintp(16) * np.uintp(4), np.uint32)
    lanes = words.view(np.uint8)
    least, inverse = np.int32(threshold), np.float32(1.0) / np.float32(width)
    for r in range(begin, end):
        first = r * width
        if threshold:
            draw_lanes(words, key, np.uint64(r), np.uint64(0), site)
        _add(flat_x, flat_residual, first, width, threshold > 0, lanes, least, scale, flat_keep, flat_s, row)
        mean[r] = middle = total_of(row, np.uintp(0), width) * inverse
        rstd[r] = factor = np.float32(1.0) / np.sqrt(squares_of(row, width, middle) * inverse + eps)
        for n in range(width):
            normed = multiply_add((row[n] - middle) * factor, weight[n], bias[n])
            flat_y[first + n] = round_to(normed, flat_y[first + n])


@loop()
def residual_layer_norm_gradient(
    team, rows, width, like, like_s, dy, ds, s, mean, rstd, weight, keep, scale, dx, dresidual, dweight, dbias
):
    """Gradients of x, residual, weight and bias, the latter two float32; ds, keep and dx may be 0, for none.

    dy, dx and keep (rows, width), ds, s and dresidual alike, weight, dweight and dbias (width,), mean and rstd (rows,);
    like and like_s as residual_layer_norm() takes them.
    """
    step = max(np.uintp(1), (np.uintp(rows) + _SUMMED * _SUMS - np.uintp(1)) // (_SUMMED * _SUMS)) * _SUMMED
    parts = (np.uintp(rows) + step - np.uintp(1)) // step
    sums = np.zeros((np.uintp(2), parts, np.uintp(width)), np.float32)
    given = (
        rows_at(dy, rows, width, like), rows_at(ds, rows, width, like_s), rows_at(s, rows, width, like_s),
        numbers_at(mean, rows, scale), numbers_at(rstd, rows, scale), numbers_at(weight, width, scale),
        rows_at(keep, rows, width, np.uint8(0)), scale, ds != 0, keep != 0,
        rows_at(dx, rows if dx else 0, width, like), rows_at(dresidual, rows, width, like_s), sums, step,
    )  # fmt: skip
    over_threads(_norm_gradient_rows, team, np.uintp(rows), step, given)
    of_weight, of_bias = numbers_at(dweight, width, scale), numbers_at(dbias, width, scale)
    of_weight[:] = np.float32(0.0)
    of_bias[:] = np.float32(0.0)
    for part in range(parts):
        of_weight += sums[0, part]
        of_bias += sums[1, part]


@inlined(fastmath=FAST)
def _row_sums(flat_dy, flat_s, first, width, weight, middle, factor):
    """The sums of dy * weight, and of that times the normed row."""
    total, product = np.float32(0.0), np.float32(0.0)
    for n in range(width):
        weighted = read(flat_dy[first + n]) * weight[n]
        total += weighted
        product += weighted * ((read(flat_s[first + n]) - middle) * factor)
    return total, product


@inlined()
def _row_gradient(flat_dy, adds, flat_ds, flat_s, first, width, weight, middle, factor, total, product, out):
    """out[first : first + width] becomes the gradient of a row of the sum, ds added where that is there. What the means
    over the row were made of is computed again: a store waits for those before it, and here each is one of the
    result."""
    for n in range(width):
        normal = (read(flat_s[first + n]) - middle) * factor
        value = factor * multiply_add(-normal, product, multiply_add(read(flat_dy[first + n]), weight[n], -total))
        if adds:
            value += read(flat_ds[first + n])
        out[first + n] = round_to(value, out[first + n])


@inlined()
def _norm_gradient_rows(begin, end, dy, ds, s, mean, rstd, weight, keep, scale, adds, drops, dx, dresidual, sums, step):
    """sums (2, parts, N) float32, zero before: the part's gradients of weight and bias."""
    width = np.uintp(dy.shape[1])
    flat_dy, flat_ds, flat_s, flat_keep = dy.reshape(-1), ds.reshape(-1), s.reshape(-1), keep.reshape(-1)
    flat_dx, flat_dresidual = dx.reshape(-1), dresidual.reshape(-1)
    inverse = np.float32(1.0) / np.float32(width)
    of_weight, of_bias = sums[0, begin // step], sums[1, begin // step]
    for block in range(begin, end, _SUMMED):
        weight_sums, bias_sums = np.zeros(width, np.float32), np.zeros(width, np.float32)
        for r in range(block, min(block + _SUMMED, end)):
            first, middle, factor = r * width, mean[r], rstd[r]
            for n in range(width):
                of_y = read(flat_dy[first + n])
                normal = (read(flat_s[first + n]) - middle) * factor
                weight_sums[n] = multiply_add(of_y, normal, weight_sums[n])
                bias_sums[n] += of_y
            total, product = _row_sums(flat_dy, flat_s, first, width, weight, middle, factor)
            total, product = total * inverse, product * inverse
            _row_gradient(
                flat_dy, adds, flat_ds, flat_s, first, width, weight, middle, factor, total, product, flat_dresidual
            )
            if flat_dx.shape[0] == 0:
                continue
            if drops:
                for n in range(width):
                    kept = scale if flat_keep[first + n] else np.float32(0.0)
                    flat_dx[first + n] = round_to(read(flat_dresidual[first + n]) * kept, flat_dx[first + n])
            else:  # a loop of its own: with the condition inside it is no vector
                for n in range(width):
                    flat_dx[first + n] = round_to(read(flat_dresidual[first + n]), flat_dx[first + n])
        of_weight += weight_sums
        of_bias += bias_sums
