"""The loops of training_passes.py, for numba: arrays in, arrays out, C-contiguous; nothing is checked here.

Numbers are of the kinds that step_loops.py reads and writes, and everything between is float32. Indices are flat and
without sign, and loops over a row have no branch in them, so that they become vectors.
"""

from __future__ import annotations

import numpy as np

from fasttfm.functional.search_loops import of_sort_key, sort_key
from fasttfm.functional.step_loops import FAST, exp, inlined, loop, read, round_to

_WORD = np.uint64(0xFFFFFFFF)
_HALF_WORD = np.uint64(32)
_FAR = np.float32(13.0)
"""Where GELU's factor, rounded to float32, has become 0 or 1."""
_SUMMED = np.uintp(32)
"""Rows whose gradients of a norm's parameters are added up before they join the sum of all."""


# ---------------------------------------------------------------------------------------------------------- dropout


@inlined()
def _lanes(words, key, row, plane, site):
    """Philox4x32-7 of a row (kernels/philox.py): four words a block, whose halves are the lanes in their order."""
    blocks = np.uintp(words.shape[0] // 4)
    for block in range(blocks):
        c0, c1, c2, c3 = np.uint64(block), row, plane, site
        k0, k1 = key & _WORD, key >> _HALF_WORD
        for _ in range(7):
            a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
            c0, c2 = (b >> _HALF_WORD) ^ c1 ^ k0, (a >> _HALF_WORD) ^ c3 ^ k1
            c1, c3 = b & _WORD, a & _WORD
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _WORD, (k1 + np.uint64(0xBB67AE85)) & _WORD
        first = np.uintp(4) * block
        words[first] = np.uint32(c0)
        words[first + np.uintp(1)] = np.uint32(c1)
        words[first + np.uintp(2)] = np.uint32(c2)
        words[first + np.uintp(3)] = np.uint32(c3)


@loop()
def keep_mask(key, site, threshold, keep):
    """keep (planes, rows, columns) uint8 becomes 1 where dropout keeps the element."""
    planes, rows, columns = np.uintp(keep.shape[0]), np.uintp(keep.shape[1]), np.uintp(keep.shape[2])
    flat = keep.reshape(-1)
    words = np.empty((columns + np.uintp(7)) // np.uintp(8) * np.uintp(4), np.uint32)
    lanes = words.view(np.int16)
    least = np.int32(threshold - 32768)
    for plane in range(planes):
        for row in range(rows):
            _lanes(words, key, np.uint64(row), np.uint64(plane), site)
            first = (plane * rows + row) * columns
            for n in range(columns):
                flat[first + n] = np.uint8(np.int32(lanes[n]) >= least)


# -------------------------------------------------------------------------------------------------------- attention


@inlined()
def _attended(i, keys, limit, causal, offset):
    """How many keys, the first ones, query i sees."""
    count = min(keys, limit)
    if causal:
        count = min(count, i + offset + 1)
    return np.uintp(max(0, count))


@inlined(fastmath=FAST)
def _scaled(flat, first, count, scale, row):
    """row[:count] becomes flat from first on times scale; whether all are finite."""
    check = np.float32(0.0)
    for t in range(count):
        value = read(flat[first + t]) * scale
        row[t] = value
        check += value * np.float32(0.0)
    return check == np.float32(0.0)


@inlined(fastmath=FAST)
def _weigh(row, count):
    """row[:count], finite numbers, becomes exp(number - largest); returns the sum."""
    key, total = sort_key(row[0]), np.float32(0.0)
    for t in range(count):
        key = max(key, sort_key(row[t]))
    largest = of_sort_key(key)
    for t in range(count):
        weight = exp(row[t] - largest)
        row[t] = weight
        total += weight
    return total


@inlined()
def _weigh_any(row, count):
    """Likewise numbers of which some are infinite or NaN: NaN throughout where one is NaN or inf, or all are -inf."""
    largest = np.float32(-np.inf)
    for t in range(count):
        if row[t] != row[t]:
            largest = np.float32(np.nan)
            break
        largest = max(largest, row[t])
    if not (largest < np.inf and largest > -np.inf):
        row[:count] = np.nan
        return np.float32(1.0)
    total = np.float32(0.0)
    for t in range(count):
        row[t] = exp(row[t] - largest) if row[t] > -np.inf else np.float32(0.0)
        total += row[t]
    return total


@loop(fastmath=FAST)
def softmax(scores, lengths, heads, causal, offset, scale, out):
    """out (B * H, L, S) becomes the weights of scores; may be the same memory. lengths (B,) int64."""
    planes, queries, keys = scores.shape
    flat, flat_out = scores.reshape(-1), out.reshape(-1)
    row = np.empty(keys, np.float32)
    width = np.uintp(keys)
    first = np.uintp(0)
    for plane in range(planes):
        limit = lengths[plane // heads]
        for i in range(queries):
            count = _attended(i, keys, limit, causal, offset)
            if count:
                finite = _scaled(flat, first, count, scale, row)
                inverse = np.float32(1.0) / (_weigh(row, count) if finite else _weigh_any(row, count))
                for t in range(count):
                    flat_out[first + t] = round_to(row[t] * inverse, flat_out[first + t])
            for t in range(count, width):
                flat_out[first + t] = round_to(np.float32(0.0), flat_out[first + t])
            first += width


@inlined(fastmath=FAST)
def _product_sum(grad, weights, first, count):
    total = np.float32(0.0)
    for t in range(count):
        total += read(grad[first + t]) * read(weights[first + t])
    return total


@loop(fastmath=FAST)
def softmax_gradient(grad, weights, kept, lengths, heads, causal, offset, scale):
    """grad becomes scale * (W * G - P * rowsum(W * G)): G grad, P weights, W kept, all (B * H, L, S)."""
    planes, queries, keys = weights.shape
    flat_grad, flat_weights, flat_kept = grad.reshape(-1), weights.reshape(-1), kept.reshape(-1)
    width = np.uintp(keys)
    first = np.uintp(0)
    for plane in range(planes):
        limit = lengths[plane // heads]
        for i in range(queries):
            count = _attended(i, keys, limit, causal, offset)
            total = _product_sum(flat_grad, flat_kept, first, count)
            for t in range(first, first + count):
                value = read(flat_kept[t]) * read(flat_grad[t]) - read(flat_weights[t]) * total
                flat_grad[t] = round_to(value * scale, flat_grad[t])
            for t in range(first + count, first + width):
                flat_grad[t] = round_to(np.float32(0.0), flat_grad[t])
            first += width


# ------------------------------------------------------------------------------------------------------------- GELU


@inlined(fastmath=FAST, error_model="numpy")  # a division that may raise is no vector
def _of_tanh(x):
    """(1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), which is 1 / (1 + exp(-2 u)), and its derivative;
    |x| <= _FAR."""
    square = np.float32(0.044715) * x * x
    twice = np.float32(1.5957691) * x * (np.float32(1.0) + square)
    tail = exp(-abs(twice)) * np.float32(abs(x) < _FAR)
    inverse = np.float32(1.0) / (np.float32(1.0) + tail)
    less = tail * inverse
    derivative = inverse * less * np.float32(1.5957691) * (np.float32(1.0) + np.float32(3.0) * square)
    return less if x < np.float32(0.0) else inverse, derivative


@inlined()
def _bounded(x):
    return min(max(x, -_FAR), _FAR)


@inlined()
def _drop(flat, flat_keep):
    for n in range(np.uintp(flat.shape[0])):
        flat[n] = round_to(read(flat[n]) * np.float32(flat_keep[n]), flat[n])


@loop(fastmath=FAST, error_model="numpy")
def gelu_tanh(before, keep, drops, hidden):
    """hidden becomes x times _of_tanh's number, times keep where drops is true."""
    flat, flat_hidden = before.reshape(-1), hidden.reshape(-1)
    for n in range(np.uintp(flat.shape[0])):
        x = read(flat[n])
        flat_hidden[n] = round_to(x * _of_tanh(_bounded(x))[0], flat_hidden[n])
    if drops:
        _drop(flat_hidden, keep.reshape(-1))


@loop(fastmath=FAST, error_model="numpy")
def gelu_tanh_gradient(grad, before, keep, drops, hidden):
    """grad, of hidden, becomes that of before; hidden as gelu_tanh() makes it."""
    flat_grad, flat, flat_hidden = grad.reshape(-1), before.reshape(-1), hidden.reshape(-1)
    if drops:
        _drop(flat_grad, keep.reshape(-1))
    for n in range(np.uintp(flat.shape[0])):
        x = read(flat[n])
        near = _bounded(x)
        phi, derivative = _of_tanh(near)
        flat_hidden[n] = round_to(x * phi, flat_hidden[n])
        flat_grad[n] = round_to(read(flat_grad[n]) * (phi + near * derivative), flat_grad[n])
    if drops:
        _drop(flat_hidden, keep.reshape(-1))


# ------------------------------------------------------------------------------------------------------------- norm


@inlined()
def _add_kept(flat_x, flat_residual, first, width, lanes, least, scale, keep, flat_s, row):
    """s = residual + dropout(x), of which row takes what was written; keep tells what was kept. Returns row's sum."""
    total = np.float32(0.0)
    for n in range(width):
        kept = np.int32(lanes[n]) >= least
        keep[first + n] = np.uint8(kept)
        factor = scale if kept else np.float32(0.0)
        added = round_to(read(flat_residual[first + n]) + read(flat_x[first + n]) * factor, flat_s[first + n])
        flat_s[first + n] = added
        row[n] = read(added)
    for n in range(width):
        total += row[n]
    return total


@inlined(fastmath=FAST)
def _add(flat_x, flat_residual, first, width, flat_s, row):
    """Likewise without dropout."""
    total = np.float32(0.0)
    for n in range(width):
        added = round_to(read(flat_residual[first + n]) + read(flat_x[first + n]), flat_s[first + n])
        flat_s[first + n] = added
        row[n] = read(added)
    for n in range(width):
        total += row[n]
    return total


@loop(fastmath=FAST)
def residual_layer_norm(x, residual, weight, bias, eps, key, site, threshold, scale, keep, y, s, mean, rstd):
    """threshold 0 drops nothing, and keep is then not looked at."""
    width = np.uintp(x.shape[1])
    flat_x, flat_residual, flat_keep = x.reshape(-1), residual.reshape(-1), keep.reshape(-1)
    flat_y, flat_s = y.reshape(-1), s.reshape(-1)
    row = np.empty(width, np.float32)
    words = np.empty((width + np.uintp(7)) // np.uintp(8) * np.uintp(4), np.uint32)
    lanes = words.view(np.int16)
    least, inverse = np.int32(threshold - 32768), np.float32(1.0) / np.float32(width)
    for r in range(np.uintp(x.shape[0])):
        first = r * width
        if threshold:
            _lanes(words, key, np.uint64(r), np.uint64(0), site)
            total = _add_kept(flat_x, flat_residual, first, width, lanes, least, scale, flat_keep, flat_s, row)
        else:
            total = _add(flat_x, flat_residual, first, width, flat_s, row)
        mean[r] = middle = total * inverse
        squares = np.float32(0.0)
        for n in range(width):
            row[n] -= middle
            squares += row[n] * row[n]
        rstd[r] = factor = np.float32(1.0) / np.sqrt(squares * inverse + eps)
        for n in range(width):
            flat_y[first + n] = round_to(row[n] * factor * weight[n] + bias[n], flat_y[first + n])


@loop(fastmath=FAST)
def residual_layer_norm_gradient(
    dy, ds, s, mean, rstd, weight, keep, scale, adds, drops, dx, dresidual, dweight, dbias
):
    """Gradients of x, residual, weight and bias, the latter two float32 and zero before; ds is looked at where adds is
    true, keep where drops is."""
    rows, width = np.uintp(dy.shape[0]), np.uintp(dy.shape[1])
    flat_dy, flat_ds, flat_s, flat_keep = dy.reshape(-1), ds.reshape(-1), s.reshape(-1), keep.reshape(-1)
    flat_dx, flat_dresidual = dx.reshape(-1), dresidual.reshape(-1)
    normal, grad = np.empty(width, np.float32), np.empty(width, np.float32)
    inverse = np.float32(1.0) / np.float32(width)
    for begin in range(np.uintp(0), rows, _SUMMED):
        sums, bias_sums = np.zeros(width, np.float32), np.zeros(width, np.float32)
        for r in range(begin, min(begin + _SUMMED, rows)):
            first, middle, factor = r * width, mean[r], rstd[r]
            total, product = np.float32(0.0), np.float32(0.0)
            for n in range(width):
                normal[n] = (read(flat_s[first + n]) - middle) * factor
                of_y = read(flat_dy[first + n])
                sums[n] += of_y * normal[n]
                bias_sums[n] += of_y
                grad[n] = of_y * weight[n]
                total += grad[n]
                product += grad[n] * normal[n]
            total, product = total * inverse, product * inverse
            for n in range(width):
                grad[n] = factor * (grad[n] - total - normal[n] * product)
            if adds:
                for n in range(width):
                    grad[n] += read(flat_ds[first + n])
            for n in range(width):
                flat_dresidual[first + n] = round_to(grad[n], flat_dresidual[first + n])
            if drops:
                for n in range(width):
                    kept = scale if flat_keep[first + n] else np.float32(0.0)
                    flat_dx[first + n] = round_to(read(flat_dresidual[first + n]) * kept, flat_dx[first + n])
            else:
                for n in range(width):
                    flat_dx[first + n] = round_to(read(flat_dresidual[first + n]), flat_dx[first + n])
        dweight += sums
        dbias += bias_sums
