"""The loops of training_passes.py, compiled by numba, over C-contiguous arrays; arguments are not checked.

Element types are those of loop_parts.py, arithmetic is float32. Indices are flat and unsigned, and loops over a row
have no branches, so that they vectorise. Each loop runs on a team of threads (thread_team.py), in parts that depend on
its shape alone.
"""

import numpy as np

from fasttfm.cpu.loop_parts import (
    FAST,
    draw_lanes,
    exp,
    inlined,
    loop,
    multiply_add,
    of_sort_key,
    read,
    round_to,
    rows_of_part,
    sort_key,
    total_of,
)
from fasttfm.cpu.thread_team import over_threads

HIDDEN = np.float32(-3e38)
"""The score of a masked key; finite, so that a sum shows whether a row has NaN or infinities."""
_FAR = np.float32(13.0)
"""|x| at which GELU's factor rounds to 0 or 1 in float32."""
PART = np.uintp(1 << 15)
"""Elements of a part: some microseconds of work, many times the cost of scheduling it."""


# ---------------------------------------------------------------------------------------------------------- dropout


@loop()
def keep_mask(team, key, site, threshold, keep):
    """Write dropout's mask to keep (planes, rows, columns) uint8: 1 for kept elements."""
    rows = np.uintp(keep.shape[0]) * np.uintp(keep.shape[1])
    over_threads(_keep_rows, team, rows, rows_of_part(keep.shape[2], PART), (key, site, threshold, keep))


@inlined()
def _keep_rows(begin, end, key, site, threshold, keep):
    rows, columns = np.uintp(keep.shape[1]), np.uintp(keep.shape[2])
    flat = keep.reshape(-1)
    words = np.empty((columns + np.uintp(15)) // np.uintp(16) * np.uintp(4), np.uint32)
    lanes = words.view(np.uint8)
    least = np.int32(threshold)
    for r in range(begin, end):
        draw_lanes(words, key, np.uint64(r % rows), np.uint64(r // rows), site)
        first = r * columns
        for n in range(columns):
            flat[first + n] = np.uint8(np.int32(lanes[n]) >= least)


# -------------------------------------------------------------------------------------------------------- attention


@inlined(fastmath=FAST)
def _largest_of(s, at, count, least):
    """The maximum of least and s[at : at + count]; and 0, or NaN if an element is infinite or NaN."""
    key, check = sort_key(least), np.float32(0.0)
    for t in range(count):
        key = max(key, sort_key(s[at + t]))
        check += s[at + t] * np.float32(0.0)
    return of_sort_key(key), check


@inlined()
def weigh(s, at, count, sink):
    """Replace scores s[at : at + count] by exp(score - largest); returns largest and the sum, both with the sink's
    score, or 0 and 1 if there is neither key nor sink."""
    largest, check = _largest_of(s, at, count, max(sink, HIDDEN))
    if check != np.float32(0.0):
        return _weigh_any(s, at, count, sink)
    if largest <= HIDDEN:
        for t in range(count):
            s[at + t] = np.float32(0.0)
        return np.float32(0.0), np.float32(1.0)
    for t in range(count):
        weight = exp(s[at + t] - largest)
        s[at + t] = weight if s[at + t] > HIDDEN else np.float32(0.0)
    return largest, total_of(s, at, count) + (exp(sink - largest) if sink > HIDDEN else np.float32(0.0))


@inlined()
def _weigh_any(s, at, count, sink):
    """weigh() of a row with infinities or NaN: all NaN if an element is NaN or +inf, or all that are not masked are
    -inf, without a sink."""
    largest = sink
    for t in range(count):
        if s[at + t] != s[at + t]:
            largest = np.float32(np.nan)
            break
        if s[at + t] != HIDDEN:
            largest = max(largest, s[at + t])
    if not (largest < np.inf and largest > -np.inf):
        for t in range(count):
            s[at + t] = np.nan
        return np.float32(np.nan), np.float32(1.0)
    total = exp(sink - largest) if sink > HIDDEN else np.float32(0.0)
    for t in range(count):
        s[at + t] = exp(s[at + t] - largest) if s[at + t] > HIDDEN else np.float32(0.0)
        total += s[at + t]
    return largest, total


# ------------------------------------------------------------------------------------------------------------- GELU


@inlined(error_model="numpy")  # a division that may raise does not vectorise
def _of_tanh(x):
    """(1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), which is 1 / (1 + exp(-2 u)), and its derivative;
    |x| <= _FAR."""
    square = np.float32(0.044715) * x * x
    twice = np.float32(1.5957691) * multiply_add(x, square, x)
    tail = exp(-abs(twice)) * np.float32(abs(x) < _FAR)
    inverse = np.float32(1.0) / (np.float32(1.0) + tail)
    less = tail * inverse
    derivative = inverse * less * multiply_add(square, np.float32(3 * 1.5957691), np.float32(1.5957691))
    return less if x < np.float32(0.0) else inverse, derivative


@inlined()
def _bounded(x):
    return min(max(x, -_FAR), _FAR)


@inlined()
def _drop(flat, flat_keep):
    for n in range(np.uintp(flat.shape[0])):
        flat[n] = round_to(read(flat[n]) * np.float32(flat_keep[n]), flat[n])


@loop()
def gelu_tanh(team, before, keep, drops, hidden):
    """Write hidden = x * _of_tanh(x), times keep with drops."""
    over_threads(_gelu_tanh_part, team, np.uintp(before.size), PART, (before, keep, drops, hidden))


@inlined(error_model="numpy")
def _gelu_tanh_part(begin, end, before, keep, drops, hidden):
    flat, flat_hidden = before.reshape(-1)[begin:end], hidden.reshape(-1)[begin:end]
    for n in range(np.uintp(flat.shape[0])):
        x = read(flat[n])
        flat_hidden[n] = round_to(x * _of_tanh(_bounded(x))[0], flat_hidden[n])
    if drops:
        _drop(flat_hidden, keep.reshape(-1)[begin:end])


@loop()
def gelu_tanh_gradient(team, grad, before, keep, drops, hidden):
    """Replace grad, of hidden, by the gradient of before, and recompute hidden."""
    over_threads(_gelu_tanh_gradient_part, team, np.uintp(before.size), PART, (grad, before, keep, drops, hidden))


@inlined(error_model="numpy")
def _gelu_tanh_gradient_part(begin, end, grad, before, keep, drops, hidden):
    flat_grad, flat = grad.reshape(-1)[begin:end], before.reshape(-1)[begin:end]
    flat_hidden, flat_keep = hidden.reshape(-1)[begin:end], keep.reshape(-1)[begin:end]
    if drops:
        _drop(flat_grad, flat_keep)
    for n in range(np.uintp(flat.shape[0])):
        x = read(flat[n])
        near = _bounded(x)
        phi, derivative = _of_tanh(near)
        flat_hidden[n] = round_to(x * phi, flat_hidden[n])
        flat_grad[n] = round_to(read(flat_grad[n]) * multiply_add(near, derivative, phi), flat_grad[n])
    if drops:
        _drop(flat_hidden, flat_keep)


# ---------------------------------------------------------------------------------------------------- cross entropy


@inlined(fastmath=FAST)
def _largest_and_total(flat, first, width):
    key, total = sort_key(read(flat[first])), np.float32(0.0)
    for n in range(width):
        x = read(flat[first + n])
        key = max(key, sort_key(x))
        total += x
    return of_sort_key(key), total


@loop()
def cross_entropy(team, logits, target, counts, smoothing, scale, writes, losses, statistics, gradient):
    """Write losses (2, M) and statistics (2, M) of logits (M, V), as in functional/loss.py; with writes also gradient,
    times scale, which may be logits. counts (M,) uint8: 0 for rows without loss."""
    args = logits, target, counts, smoothing, scale, writes, losses, statistics, gradient
    over_threads(_cross_entropy_rows, team, np.uintp(logits.shape[0]), rows_of_part(logits.shape[1], PART), args)


@inlined()
def _cross_entropy_rows(begin, end, logits, target, counts, smoothing, scale, writes, losses, statistics, gradient):
    width = np.uintp(logits.shape[1])
    flat, out, row = logits.reshape(-1), gradient.reshape(-1), np.empty(width, np.float32)
    mean = np.float32(1.0) / np.float32(width)
    for r in range(begin, end):
        first, picked = r * width, np.uintp(target[r])
        top, total = _largest_and_total(flat, first, width)
        if total != total or not top < np.inf:
            top = np.float32(np.nan)
        for n in range(width):
            row[n] = exp(read(flat[first + n]) - top)
        weights = total_of(row, np.uintp(0), width)
        logarithm = np.log(weights) + np.float32(0.0) * top  # NaN where top is
        row_nll = logarithm + (top - read(flat[first + picked]))
        row_loss = row_nll
        if smoothing != np.float32(0.0) and row_nll < np.inf:  # or inf - inf would be formed
            row_loss += smoothing * (logarithm + (top - total * mean) - row_nll)
        losses[0, r], losses[1, r] = (row_loss, row_nll) if counts[r] else (np.float32(0.0), np.float32(0.0))
        statistics[0, r], statistics[1, r] = top, np.float32(1.0) / weights
        if writes:
            _class_gradient(row, picked, top, statistics[1, r], smoothing, scale, counts[r], out, first)


@loop()
def cross_entropy_gradient(team, logits, target, counts, smoothing, scale, statistics, gradient):
    args = logits, target, counts, smoothing, scale, statistics, gradient
    over_threads(
        _cross_entropy_gradient_rows, team, np.uintp(logits.shape[0]), rows_of_part(logits.shape[1], PART), args
    )


@inlined()
def _cross_entropy_gradient_rows(begin, end, logits, target, counts, smoothing, scale, statistics, gradient):
    width = np.uintp(logits.shape[1])
    flat, out, row = logits.reshape(-1), gradient.reshape(-1), np.empty(width, np.float32)
    for r in range(begin, end):
        first, top = r * width, statistics[0, r]
        for n in range(width):
            row[n] = exp(read(flat[first + n]) - top)
        _class_gradient(row, np.uintp(target[r]), top, statistics[1, r], smoothing, scale, counts[r], out, first)


@inlined()
def _class_gradient(row, picked, top, share, smoothing, scale, counts, out, first):
    """Write scale * (softmax - smoothing / V - (1 - smoothing) [picked]), or zeros, to out; row holds exp(logit - top),
    in a separate buffer: a loop that may overwrite its input does not vectorise."""
    width = np.uintp(row.shape[0])
    if not counts:
        for n in range(width):
            out[first + n] = round_to(np.float32(0.0), out[first + n])
        return
    less, mark = smoothing / np.float32(width), top * np.float32(0.0)  # NaN where top is
    for n in range(width):
        value = multiply_add(row[n], share, mark - less) * scale
        out[first + n] = round_to(value, out[first + n])
    p = row[picked] * share + mark - less
    out[first + picked] = round_to((p - (np.float32(1.0) - smoothing)) * scale, out[first + picked])
