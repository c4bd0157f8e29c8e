"""Rows of a block's scores in attention, for numba: what hides and changes them, softmax and its gradient.

A row lies in columns [start, start + columns) of its memory, of which the query sees some; the others become HIDDEN, so
that loops over a row have whole vectors. Arrays come by themselves: numba counts who holds those of a tuple, by
operations that threads wait for, once a row.
"""

import math

import numpy as np

from fasttfm.cpu.loop_parts import dot, draw_lanes, exp, inlined, log
from fasttfm.cpu.training_loops import HIDDEN, weigh

_LOG2_E = np.float32(math.log2(math.e))
_LOG_2 = np.float32(math.log(2.0))


@inlined()
def first_key(i, offset, window):
    """Return the first key that query i sees."""
    return 0 if window < 0 else max(0, i + offset - window)


@inlined()
def end_key(i, offset, length, causal):
    """Return the key behind the last that query i sees."""
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
    """s[at : at + count], products, become scores, what a mask hides HIDDEN; distance: of the first key from the
    diagonal."""
    if cap != np.float32(0.0):
        inverse = np.float32(1.0) / cap
        for t in range(count):
            s[at + t] = cap * _tanh(s[at + t] * inverse) + s[at + t] * np.float32(0.0)  # infinities are NaN
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
def _hide(s, begin, end):
    for t in range(np.uintp(begin), np.uintp(end)):
        s[t] = HIDDEN


@inlined()
def _drop(s, at, count, lanes, first, least, factor):
    for t in range(count):
        s[at + t] *= factor if np.int32(lanes[first + t]) >= least else np.float32(0.0)


@inlined(error_model="numpy")
def _cap_slope(s, at, count, cap, slope):
    """slope[at : at + count] becomes the derivatives of a cap's scores by products s[at : at + count]."""
    inverse = np.float32(1.0) / cap
    for t in range(count):
        y = _tanh(s[at + t] * inverse)
        slope[at + t] = np.float32(1.0) - y * y


@inlined()
def score_rows(s, slope, mask, mask_at, mask_strides, rows, looks, numbers):
    """Products s become scores; slope, unless it is empty, the derivatives of a cap's.

    rows: the first query and how many, the key of column 0, the first column and the one behind the last that a query
    sees, columns, numbers from a row to the next. looks: length, offset and slope of the plane. numbers: as attention()
    takes them.
    """
    first, queries, low, start, stop, columns, height = rows
    length, offset, alibi = looks
    causal, window, past, _, cap = numbers
    for m in range(queries):
        i, at = first + m, m * height
        left = max(min(first_key(i, offset, window) - low, stop), start)
        right = max(left, min(end_key(i, offset, length, causal) - low, stop))
        begin, count = np.uintp(at + left), np.uintp(right - left)
        if slope.size:
            _cap_slope(s, begin, count, cap, slope)
            _hide(slope, at + start, at + left)
            _hide(slope, at + right, at + start + columns)
        _hide(s, at + start, at + left)
        _hide(s, at + right, at + start + columns)
        place = np.uintp(mask_at + i * mask_strides[2] + (low + left) * max(0, mask_strides[3]))
        _score(s, begin, count, cap, alibi, low + left - i - offset + past, mask, place, mask_strides[3])


@inlined(error_model="numpy")
def weigh_rows(s, inverse, lse, lse_at, lse_step, words, lanes, rows, plane, sink, dropout):
    """Scores s become exp(score - largest) after dropout, inverse what to multiply a row's by to have weights."""
    first, queries, low, start, _, columns, height = rows
    seed, site, threshold, kept = dropout
    count, least = np.uintp(columns), np.int32(threshold)
    for m in range(queries):
        at = np.uintp(m * height + start)
        largest, total = weigh(s, at, count, sink)
        lse[lse_at + m * lse_step], inverse[m] = largest, total
        if threshold:
            draw_lanes(words, seed, np.uint64(first + m), np.uint64(plane), site)
            _drop(s, at, count, lanes, np.uintp(low + start), least, kept)
    for m in range(queries):  # by themselves: within a row a logarithm waits for each of its steps
        place = lse_at + m * lse_step
        lse[place] = (lse[place] + log(inverse[m])) * _LOG2_E
        inverse[m] = np.float32(1.0) / inverse[m]


@inlined()
def _differentiate(s, ds, at, count, lse, delta):
    """s[at : at + count], scores, become weights, and ds, gradients of these, those of the scores."""
    mark = lse * np.float32(0.0)  # 0, or NaN
    for t in range(at, at + count):
        score = s[t]
        weight = exp(min(score - lse, np.float32(0.0))) + mark
        gradient = (ds[t] - delta) * weight
        s[t] = np.float32(0.0) if score <= HIDDEN else weight
        ds[t] = np.float32(0.0) if score <= HIDDEN else gradient


@inlined()
def differentiate_rows(
    s, ds, slope, g, output, output_at, output_step, size, lse, lse_at, lse_step, words, lanes, rows, plane, dropout
):
    """Scores s become weights after dropout, and ds, gradients of these, those of the products; g (., size) and output
    are rows of attention's output, and of its gradient."""
    first, queries, low, start, _, columns, height = rows
    seed, site, threshold, kept = dropout
    count, least = np.uintp(columns), np.int32(threshold)
    for m in range(queries):
        at = np.uintp(m * height + start)
        delta = dot(g, np.uintp(m * size), output, np.uintp(output_at + m * output_step), np.uintp(size))
        total = lse[lse_at + m * lse_step] * _LOG_2
        if threshold:
            draw_lanes(words, seed, np.uint64(first + m), np.uint64(plane), site)
            _drop(ds, at, count, lanes, np.uintp(low + start), least, kept)
        _differentiate(s, ds, at, count, total, delta)
        if threshold:
            _drop(s, at, count, lanes, np.uintp(low + start), least, kept)
        if slope.size:
            for t in range(at, at + count):
                ds[t] *= slope[t]
