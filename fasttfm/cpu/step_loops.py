"""The loops of step_passes.py, compiled by numba, over C-contiguous arrays; arguments are not checked.

Each loop runs on a team of threads (thread_team.py). Rows are independent, so the bits depend on neither the parts nor
the number of threads. Element types are those of loop_parts.py, arithmetic is float32.

In int8 the inputs x, joint and query are the integer sums of a product, with its scales and bias, and the result is
quantized to `quantized` with out_scales; all of these are None in other precisions.
"""

import numpy as np
from numba import types
from numba.extending import overload

from fasttfm.cpu.loop_parts import (
    INFINITE,
    MAGNITUDE,
    bits_of,
    dot,
    exp,
    fetch_run,
    from_bits,
    inlined,
    keep,
    loop,
    multiply_add,
    of_sort_key,
    pointer_to,
    read,
    round_to,
    rows_of_part,
    sort_key,
    squares_of,
    total_of,
)
from fasttfm.cpu.thread_team import over_threads

_PART = np.uintp(1 << 12)
"""Elements of a part: about a microsecond of work, the cost of scheduling it."""


@inlined()
def _softmax(scores, first, count):
    """Replace scores[first : first + count] by exp(score - largest); returns 1 / their sum. NaN propagates."""
    key, size = sort_key(scores[first]), np.int32(0)
    for t in range(first, first + count):
        key, size = max(key, sort_key(scores[t])), max(size, np.int32(bits_of(scores[t])) & MAGNITUDE)
    largest = of_sort_key(key)
    if size > INFINITE or key >= INFINITE:  # the search reports such a model
        for t in range(first, first + count):
            scores[t] = np.nan
        return np.float32(1.0)
    for t in range(first, first + count):
        scores[t] = exp(scores[t] - largest)
    return np.float32(1.0) / total_of(scores, first, count)


@inlined()
def _add(sums, column, flat, first, weight, size):
    for d in range(size):
        sums[column + d] = multiply_add(weight, read(flat[first + d]), sums[column + d])


@inlined()
def _add_two(sums, flat, first, weight, second, other, size):
    for d in range(size):
        both = multiply_add(weight, read(flat[first + d]), sums[d])
        sums[d] = multiply_add(other, read(flat[second + d]), both)


def _entry(flat, index, scales, bias, r, n):
    """Element (r, n) of a product, at flat[index], as float32; in int8 scaled and with its bias."""


@overload(_entry, inline="always")
def _entry_of_kind(flat, index, scales, bias, r, n):
    if scales is types.none:
        return lambda flat, index, scales, bias, r, n: read(flat[index])
    return lambda flat, index, scales, bias, r, n: flat[index] * scales[r] + bias[n]


def _quantize(x, r, quantized, scales):
    """Quantize row r of x, unless quantized is None."""


@overload(_quantize, jit_options={"forceinline": True})
def _quantize_if_asked(x, r, quantized, scales):
    if quantized is types.none:
        return lambda x, r, quantized, scales: None
    return lambda x, r, quantized, scales: _quantize_row(x[r], quantized[r], scales, r)


@inlined()
def _quantize_row(row, quantized, scales, r):
    largest = np.uint32(0)  # bits without the sign: their order is that of |x|, with NaN on top
    for n in range(row.shape[0]):
        largest = max(largest, bits_of(row[n]) & np.uint32(0x7FFFFFFF))
    most = from_bits(np.int32(largest))
    inverse = np.float32(127.0) / most if largest else np.float32(0.0)
    scales[r] = most / np.float32(127.0)
    for n in range(row.shape[0]):
        quantized[n] = np.uint8(np.int32(np.rint(row[n] * inverse)) + np.int32(128))


@inlined()
def _dots(q, flat, first, heads, size, scores, count, t):
    """Write column t of scores (heads, count): each head of q times the row of flat."""
    for h in range(heads):
        scores[h * count + t] = dot(q, h * size, flat, first + h * size, size)


@inlined()
def _add_heads(sums, flat, first, heads, size, scores, count, t):
    """Add each head of the row of flat, times its score in column t of scores (heads, count), to sums."""
    for h in range(heads):
        _add(sums, h * size, flat, first + h * size, scores[h * count + t], size)


@loop()
def attend_to_ancestors(
    team, joint, scales, bias, keys, values, ancestors, slots, positions, out, quantized, out_scales
):
    args = (joint, scales, bias, keys, values, ancestors, slots, positions, out, quantized, out_scales)
    over_threads(_attend_to_ancestors, team, np.uintp(slots.shape[0]), np.uintp(2), args)


@inlined()
def _attend_to_ancestors(
    begin, end, joint, scales, bias, keys, values, ancestors, slots, positions, out, quantized, out_scales
):
    # Flat unsigned indices throughout: views are reference-counted, signed indices need a test for negative ones.
    # All heads of a position are read together: they are contiguous, and positions follow one another.
    capacity, heads, size = np.uintp(keys.shape[1]), np.uintp(keys.shape[2]), np.uintp(keys.shape[3])
    one, two = np.uintp(1), np.uintp(2)
    columns, width = np.uintp(ancestors.shape[1]), heads * size
    line = np.uintp(64 // keys.itemsize)
    most = np.uintp(0)
    for r in range(begin, end):
        most = max(most, np.uintp(positions[r]) + one)
    flat_joint, flat_keys, flat_values = pointer_to(joint), pointer_to(keys), pointer_to(values)
    flat_out, flat_ancestors = pointer_to(out), pointer_to(ancestors)
    scale = np.float32(1.0 / np.sqrt(np.float64(keys.shape[3])))
    scratch, firsts = np.empty(heads * most + two * width, np.float32), np.empty(most, np.uintp)
    scores = pointer_to(scratch)
    q, sums = pointer_to(scratch[heads * most :]), pointer_to(scratch[heads * most + width :])
    for r in range(begin, end):
        position = np.uintp(positions[r])
        count = position + one
        for t in range(position):
            firsts[t] = (np.uintp(flat_ancestors[r * columns + t]) * capacity + t) * width
        if r + one < end:  # the next row reads scattered memory, which no hardware prefetcher predicts
            for t in range(min(position, np.uintp(positions[r + one]))):
                soon = (np.uintp(flat_ancestors[(r + one) * columns + t]) * capacity + t) * width
                if soon != firsts[t]:
                    fetch_run(flat_keys, soon, width, line)
                    fetch_run(flat_values, soon, width, line)
        new, row = (np.uintp(slots[r]) * capacity + position) * width, r * np.uintp(3) * width
        firsts[position] = new
        for n in range(width):
            q[n] = _entry(flat_joint, row + n, scales, bias, r, n) * scale
            sums[n] = np.float32(0.0)
        for n in range(width):
            key = _entry(flat_joint, row + width + n, scales, bias, r, width + n)
            flat_keys[new + n] = round_to(key, flat_keys[new + n])
        for n in range(width):
            value = _entry(flat_joint, row + two * width + n, scales, bias, r, two * width + n)
            flat_values[new + n] = round_to(value, flat_values[new + n])
        for t in range(count):
            _dots(q, flat_keys, firsts[t], heads, size, scores, count, t)
        for h in range(heads):
            scale_sum = _softmax(scores, h * count, count)
            for t in range(h * count, (h + one) * count):
                scores[t] *= scale_sum
        for t in range(count):
            _add_heads(sums, flat_values, firsts[t], heads, size, scores, count, t)
        for n in range(width):
            flat_out[r * width + n] = round_to(sums[n], flat_out[r * width + n])
        _quantize(out, r, quantized, out_scales)
    keep(scratch)


@inlined()
def _attend(q, sums, scores, keys, key, values, value, step, count, size):
    """Attention of q over `count` keys and values, which begin at key and value and are `step` elements apart.

    Writes the unnormalised weighted sum to sums (size,); returns the factor that normalises it.
    """
    zero, one, two = np.uintp(0), np.uintp(1), np.uintp(2)
    for d in range(size):
        sums[d] = np.float32(0.0)
    for t in range(count):
        scores[t] = dot(q, zero, keys, key + t * step, size)
    scale_sum = _softmax(scores, zero, count)
    pairs = count // two * two
    for t in range(zero, pairs, two):
        first = value + t * step
        _add_two(sums, values, first, scores[t], first + step, scores[t + one], size)
    for t in range(pairs, count):
        _add(sums, zero, values, value + t * step, scores[t], size)
    return scale_sum


@loop()
def attend_within(team, joint, firsts, lengths, heads, out):
    """Self-attention within packed sentences: sentence b has lengths[b] rows from firsts[b] on, of joint
    (T, 3 * H * D), its queries, keys and values, and of out (T, H * D)."""
    pairs = np.uintp(len(firsts)) * np.uintp(heads)
    over_threads(_attend_within, team, pairs, np.uintp(1), (joint, firsts, lengths, np.uintp(heads), out))


@inlined()
def _attend_within(begin, end, joint, firsts, lengths, heads, out):
    width, three = np.uintp(out.shape[1]), np.uintp(3)
    size, line = width // heads, three * width
    flat, flat_out = pointer_to(joint), pointer_to(out)
    scale = np.float32(1.0 / np.sqrt(np.float64(size)))
    most = np.uintp(0)
    for pair in range(begin, end):
        most = max(most, np.uintp(lengths[pair // heads]))
    scratch = np.empty(most + np.uintp(2) * size, np.float32)
    q, sums, scores = pointer_to(scratch), pointer_to(scratch[size:]), pointer_to(scratch[np.uintp(2) * size :])
    for pair in range(begin, end):
        sentence, column = pair // heads, pair % heads * size
        first, count = np.uintp(firsts[sentence]), np.uintp(lengths[sentence])
        key = first * line + width + column
        for r in range(first, first + count):
            for d in range(size):
                q[d] = read(flat[r * line + column + d]) * scale
            scale_sum = _attend(q, sums, scores, flat, key, flat, key + width, line, count, size)
            place = r * width + column
            for d in range(size):
                flat_out[place + d] = round_to(sums[d] * scale_sum, flat_out[place + d])
    keep(scratch)


@loop()
def attend_to_memory(team, query, scales, bias, keys, values, sentences, lengths, out, quantized, out_scales):
    args = (query, scales, bias, keys, values, sentences, lengths, out, quantized, out_scales)
    over_threads(_attend_to_memory, team, np.uintp(sentences.shape[0]), np.uintp(2), args)


@inlined()
def _attend_to_memory(start, stop, query, scales, bias, keys, values, sentences, lengths, out, quantized, out_scales):
    # Consecutive rows of a sentence belong to the part with the first of them, and read each head's keys and values
    # in turn, while these are in the L1 cache.
    heads, longest, size = np.uintp(keys.shape[1]), np.uintp(keys.shape[2]), np.uintp(keys.shape[3])
    one = np.uintp(1)
    flat_query, flat_out, flat_keys, flat_values = (
        pointer_to(query),
        pointer_to(out),
        pointer_to(keys),
        pointer_to(values),
    )
    scale = np.float32(1.0 / np.sqrt(np.float64(keys.shape[3])))
    scratch = np.empty(longest + np.uintp(2) * size, np.float32)
    q, sums, scores = pointer_to(scratch), pointer_to(scratch[size:]), pointer_to(scratch[np.uintp(2) * size :])
    rows, begin = np.uintp(sentences.shape[0]), start
    while begin and begin < stop and sentences[begin] == sentences[begin - one]:
        begin += one
    total, line = np.uintp(keys.size), np.uintp(64 // keys.itemsize)
    while begin < stop:
        sentence, end = np.uintp(sentences[begin]), begin + one
        while end < rows and np.uintp(sentences[end]) == sentence:
            end += one
        count = np.uintp(lengths[sentence])
        for h in range(heads):
            memory = (sentence * heads + h) * longest
            following = (memory + longest) * size
            if following < total:
                ahead = min(count * size, total - following)
                fetch_run(flat_keys, following, ahead, line)
                fetch_run(flat_values, following, ahead, line)
            for r in range(begin, end):
                place = (r * heads + h) * size
                for d in range(size):
                    q[d] = _entry(flat_query, place + d, scales, bias, r, h * size + d) * scale
                first = memory * size
                scale_sum = _attend(q, sums, scores, flat_keys, first, flat_values, first, size, count, size)
                for d in range(size):
                    flat_out[place + d] = round_to(sums[d] * scale_sum, flat_out[place + d])
        for r in range(begin, end):
            _quantize(out, r, quantized, out_scales)
        begin = end
    keep(scratch)


@loop()
def add_layer_norm(team, x, scales, x_bias, residual, weight, bias, eps, rows, y, s, quantized, out_scales):
    args = (x, scales, x_bias, residual, weight, bias, eps, y, s, quantized, out_scales)
    over_threads(_add_layer_norm, team, np.uintp(rows), rows_of_part(x.shape[1], _PART), args)


@inlined(error_model="numpy")  # as norm_loops._norm_rows()
def _add_layer_norm(begin, end, x, scales, x_bias, residual, weight, bias, eps, y, s, quantized, out_scales):
    width = np.uintp(x.shape[1])
    flat, added, flat_y, flat_s = x.reshape(-1), residual.reshape(-1), y.reshape(-1), s.reshape(-1)
    row = np.empty(width, np.float32)
    for r in range(begin, end):
        first = r * width
        for n in range(width):
            value = _entry(flat, first + n, scales, x_bias, r, n) + read(added[first + n])
            flat_s[first + n] = round_to(value, flat_s[first + n])
        for n in range(width):
            row[n] = read(flat_s[first + n])
        mean = total_of(row, np.uintp(0), width) / np.float32(width)
        rstd = np.float32(1.0) / np.sqrt(squares_of(row, width, mean) / np.float32(width) + np.float32(eps))
        for n in range(width):
            normed = multiply_add((row[n] - mean) * rstd, read(weight[n]), read(bias[n]))
            flat_y[first + n] = round_to(normed, flat_y[first + n])
        _quantize(y, r, quantized, out_scales)


@loop()
def quantize_rows(team, x, quantized, scales):
    over_threads(_quantize_rows, team, np.uintp(x.shape[0]), rows_of_part(x.shape[1], _PART), (x, quantized, scales))


@inlined()
def _quantize_rows(begin, end, x, quantized, scales):
    row = np.empty(x.shape[1], np.float32)
    for r in range(begin, end):
        for n in range(x.shape[1]):
            row[n] = read(x[r, n])
        _quantize_row(row, quantized[r], scales, r)


ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
"""Numbers of activate()'s activations; ReLU is part of the products."""


@loop()
def activate(team, x, kind):
    """Apply an activation to x (M, N) in place."""
    over_threads(_activate, team, np.uintp(x.size), _PART, (x, kind))


@inlined(error_model="numpy")
def _activate(begin, end, x, kind):
    flat, one = pointer_to(x), np.float32(1.0)
    if kind == 0:
        for n in range(begin, end):
            flat[n] = round_to(_times_logistic(read(flat[n]), read(flat[n])), flat[n])
    elif kind == 1:
        for n in range(begin, end):
            value = read(flat[n])
            slope = np.float32(1.5957691216) * multiply_add(np.float32(0.044715) * value * value, value, value)
            flat[n] = round_to(_times_logistic(value, slope), flat[n])
    else:  # Abramowitz and Stegun 7.1.26: Phi(value) within 8e-8
        for n in range(begin, end):
            value = read(flat[n])
            size = np.float32(0.7071067812) * abs(value)
            t = one / multiply_add(np.float32(0.3275911), size, one)
            p = multiply_add(np.float32(1.061405429), t, np.float32(-1.453152027))
            p = multiply_add(p, t, np.float32(1.421413741))
            p = multiply_add(p, t, np.float32(-0.284496736))
            p = multiply_add(p, t, np.float32(0.254829592)) * t
            tail = np.float32(0.5) * p * exp(-size * size)
            flat[n] = round_to(value * (one - tail if value > 0 else tail), flat[n])


@inlined(error_model="numpy")
def _times_logistic(value, slope):
    """value / (1 + exp(-slope))."""
    small = exp(-abs(slope))
    return value * (np.float32(1.0) if slope > 0 else small) / (np.float32(1.0) + small)


@loop()
def embed(team, tokens, table, sinusoids, positions, scale, pad, out):
    args = (tokens, table, sinusoids, positions, np.float32(scale), pad, out)
    over_threads(_embed, team, np.uintp(tokens.shape[0]), rows_of_part(table.shape[1], _PART), args)


@inlined()
def _embed(begin, end, tokens, table, sinusoids, positions, scale, pad, out):
    width = table.shape[1]
    for r in range(begin, end):
        token, added = tokens[r], sinusoids[positions[r]]
        for n in range(width):
            value = multiply_add(read(table[token, n]), scale, added[n])  # rounds like torch.add with alpha
            value = np.float32(0.0) if token == pad else value
            out[r, n] = round_to(value, out[r, n])


@loop()
def advance(ancestors, slots, positions):
    """Record in ancestors (R, capacity) that row r has stored position positions[r] in slots[r], and count it."""
    for r in range(len(slots)):
        ancestors[r, positions[r]] = slots[r]
        positions[r] += 1


@loop()
def go_on(rows, ranks, first_slots, ancestors, slots, sentences, positions):
    """Continue the old row rows[r] as row r, in slot ranks[r] of its sentence; returns the most positions of a row."""
    most = 0
    before = ancestors.copy(), sentences.copy(), positions.copy()
    for r in range(len(rows)):
        old = rows[r]
        sentences[r], positions[r] = before[1][old], before[2][old]
        ancestors[r, : positions[r]] = before[0][old, : positions[r]]
        slots[r] = first_slots[sentences[r]] + ranks[r]
        most = max(most, positions[r])
    return most
