"""Masking, softmax and softmax gradient of a block's rows of scores in attention, compiled by numba.

A row occupies columns [start, start + columns) of its buffer; its query sees some of them, the others are set to
HIDDEN, so that loops over a row have whole vectors. Arrays are passed one by one: numba counts references to those of a
tuple, by operations that threads wait for, once a row.

`rows` describes a block: first query, number of queries, key of column 0, first column, end of the visible columns,
number of columns, row stride. params, dropout, lse and probs: see attention_loops.py.
"""

import math

import numpy as np

from fasttfm.cpu.loop_parts import dot, draw_lanes, exp, inlined, log
from fasttfm.cpu.training_loops import HIDDEN, weigh

_LOG2_E = np.float32(math.log2(math.e))
_LOG_2 = np.float32(math.log(2.0))


@inlined()
def first_key(i, offset, window):
    """The first key that query i sees."""
    return 0 if window < 0 else max(0, i + offset - window)


@inlined()
def end_key(i, offset, length, causal):
    """The end of the keys that query i sees."""
    return max(0, min(length, i + offset + 1) if causal else length)


@inlined()
def _tanh(x):
    """tanh of a finite float32 (Cephes' polynomial near 0)."""
    size = abs(x)
    e = exp(np.float32(-2.0) * size)
    far = (np.float32(1.0) - e) / (np.float32(1.0) + e)
    far = -far if x < np.float32(0.0) else far
    z = x * x
    p = np.float32(-5.70498872745e-3)
    p = p * z + np.float32(2.06390887954e-2)
    p = p * z - np.float32(5.37397155531e-2)
    p = p * z + np.float32(1.33314422036e-1)
    p = p * z - np.float32(3.33332819422e-1)
    return p * z * x + x if size < np.float32(0.625) else far


@inlined(error_model="numpy")
def _score(s, at, count, cap, slope, distance, mask, mask_at, mask_step):
    """Turn products s[at : at + count] into scores, HIDDEN where masked; distance: of the first key from the
    diagonal."""
    if cap != np.float32(0.0):
        inverse = np.float32(1.0) / cap
        for t in range(count):
            s[at + t] = cap * _tanh(s[at + t] * inverse) + s[at + t] * np.float32(0.0)  # NaN for infinities
    if slope != np.float32(0.0):
        for t in range(count):
            s[at + t] -= slope * np.float32(abs(np.int32(distance) + np.int32(t)))
    if mask_step == 1:
        for t in range(count):
            added = s[at + t] + mask[mask_at + t]
            s[at + t] = HIDDEN if mask[mask_at + t] <= HIDDEN else added
    elif mask_step == 0:
        for t in range(count):
            s[at + t] = HIDDEN if mask[mask_at] <= HIDDEN else s[at + t] + mask[mask_at]


@inlined()
def _fill(s, begin, end, value):
    for t in range(np.uintp(begin), np.uintp(end)):
        s[t] = value


@inlined()
def _copy(x, at, count, factor, out, to):
    for t in range(count):
        out[to + t] = x[at + t] * factor


@inlined()
def _drop(s, at, count, lanes, first, least, factor):
    for t in range(count):
        s[at + t] *= factor if np.int32(lanes[first + t]) >= least else np.float32(0.0)


@inlined(error_model="numpy")
def _cap_slope(s, at, count, cap, slope):
    """Write the derivative of the soft cap at products s[at : at + count] to slope."""
    inverse = np.float32(1.0) / cap
    for t in range(count):
        y = _tanh(s[at + t] * inverse)
        slope[at + t] = np.float32(1.0) - y * y


@inlined()
def score_rows(s, slope, mask, mask_at, mask_strides, rows, plane_args, params):
    """Turn products s into scores, and write the derivative of the soft cap to slope, unless it is empty.

    plane_args: key length, causal offset and ALiBi slope of the plane.
    """
    first, queries, low, start, stop, columns, height = rows
    length, offset, alibi = plane_args
    causal, window, past, _, cap = params
    for m in range(queries):
        i, at = first + m, m * height
        left = max(min(first_key(i, offset, window) - low, stop), start)
        right = max(left, min(end_key(i, offset, length, causal) - low, stop))
        begin, count = np.uintp(at + left), np.uintp(right - left)
        if slope.size:
            _cap_slope(s, begin, count, cap, slope)
            _fill(slope, at + start, at + left, HIDDEN)
            _fill(slope, at + right, at + start + columns, HIDDEN)
        _fill(s, at + start, at + left, HIDDEN)
        _fill(s, at + right, at + start + columns, HIDDEN)
        row_at = np.uintp(mask_at + i * mask_strides[2] + (low + left) * max(0, mask_strides[3]))
        _score(s, begin, count, cap, alibi, low + left - i - offset + past, mask, row_at, mask_strides[3])


@inlined(error_model="numpy")
def weigh_rows(s, inverse, lse, lse_at, lse_step, probs, keys, words, lanes, rows, plane, sink, dropout):
    """Softmax: replace scores s by exp(score - largest) after dropout, and write the factors that normalise them to
    inverse, log-sum-exps to lse, and weights before dropout to probs, unless it is empty."""
    first, queries, low, start, _, columns, height = rows
    seed, site, threshold, scale = dropout
    count, least = np.uintp(columns), np.int32(threshold)
    for m in range(queries):
        at = np.uintp(m * height + start)
        largest, total = weigh(s, at, count, sink)
        lse[lse_at + m * lse_step], inverse[m] = largest, total
        if probs.size:
            row_at = (lse_at + m * lse_step) * keys
            begin, end = min(low + start, keys), min(low + start + columns, keys)
            _fill(probs, row_at, row_at + begin, np.float32(0.0))
            _copy(s, at, np.uintp(end - begin), np.float32(1.0) / total, probs, np.uintp(row_at + begin))
            _fill(probs, row_at + end, row_at + keys, np.float32(0.0))
        if threshold:
            draw_lanes(words, seed, np.uint64(first + m), np.uint64(plane), site)
            _drop(s, at, count, lanes, np.uintp(low + start), least, scale)
    for m in range(queries):  # a separate loop: within a row each step of a logarithm waits for the one before
        row_at = lse_at + m * lse_step
        lse[row_at] = (lse[row_at] + log(inverse[m])) * _LOG2_E
        inverse[m] = np.float32(1.0) / inverse[m]


@inlined()
def _to_weights(s, at, count, lse):
    """Replace scores s[at : at + count] by weights."""
    mark = lse * np.float32(0.0)  # 0, or NaN
    for t in range(at, at + count):
        weight = exp(min(s[t] - lse, np.float32(0.0))) + mark
        s[t] = np.float32(0.0) if s[t] <= HIDDEN else weight


@inlined()
def differentiate_rows(
    s, ds, slope, g, output, output_at, output_step, size, lse, lse_at, lse_step, probs, keys, words, lanes, rows,
    plane, dropout,
):  # fmt: skip
    """Replace scores s by weights after dropout, and ds, the gradients of these, by those of the products.

    With probs, s need not hold scores. g (., size): rows of the output's gradient.
    """
    first, queries, low, start, _, columns, height = rows
    seed, site, threshold, scale = dropout
    count, least = np.uintp(columns), np.int32(threshold)
    saved = np.uintp(min(columns, keys - low - start))
    for m in range(queries):
        at = np.uintp(m * height + start)
        delta = dot(g, np.uintp(m * size), output, np.uintp(output_at + m * output_step), np.uintp(size))
        row_at = lse_at + m * lse_step
        if threshold:
            draw_lanes(words, seed, np.uint64(first + m), np.uint64(plane), site)
            _drop(ds, at, count, lanes, np.uintp(low + start), least, scale)
        if probs.size:
            _copy(probs, np.uintp(row_at * keys + low + start), saved, np.float32(1.0), s, at)
            _fill(s, at + saved, at + count, np.float32(0.0))
        else:
            _to_weights(s, at, count, lse[row_at] * _LOG_2)
        for t in range(at, at + count):
            gradient = (ds[t] - delta) * s[t]
            ds[t] = np.float32(0.0) if s[t] == np.float32(0.0) else gradient  # a hidden value may be NaN
        if threshold:
            _drop(s, at, count, lanes, np.uintp(low + start), least, scale)
        if slope.size:
            for t in range(at, at + count):
                ds[t] *= slope[t]
