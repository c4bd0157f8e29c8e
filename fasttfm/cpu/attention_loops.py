"""Attention over float32 rows and its gradients in blocks of queries, for numba; nothing is checked here.

A block holds the scores of some queries, whole rows of them, so that one softmax does, and nothing that grows with
both lengths exists. Products are those of tiles.py, for which keys and values are copied once a plane.

Forward takes 4 * L * S * D operations for each plane (batch row and head), backward 10; keys that no query of a block
sees are left out. The gradients of a head of keys and values are summed by one thread, in the order of the queries.
"""

import numpy as np
from numba import types
from numba.extending import overload

from fasttfm.cpu.attention_scores import differentiate_rows, end_key, first_key, score_rows, weigh_rows
from fasttfm.cpu.loop_parts import dot, inlined, loop, read, round_to
from fasttfm.cpu.panels import UNROLLED
from fasttfm.cpu.thread_team import over_threads
from fasttfm.cpu.tiles import (
    PANEL,
    add_product,
    copy_rows,
    copy_words,
    fetch_rows,
    panels_across,
    panels_along,
    product,
    product_of_pairs,
    round_up,
)
from fasttfm.cpu.training_loops import weigh

BLOCK = 30
"""Queries of a block, at most."""
CHUNK = 240
"""Queries, at most, that a thread computes for one copy of keys and values."""
_SCORES = 1 << 14
"""Scores, at most, of short parts that a thread takes at a time."""
_FEWEST = 64
"""Times that threads come for parts, at least, where there are so many."""


@inlined()
def _place(strides, b, h, i):
    return b * strides[0] + h * strides[1] + i * strides[2]


@inlined()
def _together(parts, shape):
    """Return how many parts of a problem a thread takes at a time: several short ones, which share their memory."""
    return np.uintp(max(1, min(parts // _FEWEST, _SCORES // max(1, shape[3] * shape[4]))))


# ---------------------------------------------------------------------------------------------------------- forward


@loop()
def attention(team, shape, tensors, strides, spans, looks, numbers, dropout, out, out_strides, lse, lse_strides):
    """out (B, H, L, Dv) and lse (B * H * L,), the base-2 logarithm of the sums, of queries, keys and values.

    shape: (B, H, Hk, L, S, D, Dv); tensors: query, key and value, flat, strides: of batch row, head and row of each.
    spans: where each batch row's queries begin, how many there are, and so for keys, four (B,).
    looks: lengths (B,), offsets (B,), slopes (B * H,), sinks (H,), -inf for none, mask flat, its four strides, the last
    0 or 1, or -1 for none. numbers: causal, window, past, scale, cap. dropout: key, site, threshold, scale.
    """
    batch, heads, _, queries, _, _, _ = shape
    chunks = (queries + CHUNK - 1) // CHUNK
    over_threads(
        _attention_part, team, np.uintp(batch * heads * chunks), _together(batch * heads * chunks, shape),
        (shape, tensors, strides, spans, looks, numbers, dropout, out, out_strides, lse, lse_strides),
    )  # fmt: skip


@inlined()
def _attention_part(
    begin, end, shape, tensors, strides, spans, looks, numbers, dropout, out, out_strides, lse, lse_strides
):
    _, heads, key_heads, queries, keys, size, value_size = shape
    query, key, value = tensors
    lengths, offsets, slopes, sinks, mask, mask_strides = looks
    causal, window, _, scale, _ = numbers
    chunks = (queries + CHUNK - 1) // CHUNK
    words = np.empty((keys + 15) // 16 * 4, np.uint32)
    lanes, no_slope = words.view(np.uint8), np.empty(0, np.float32)
    most, widest = min(BLOCK, max(1, queries)), round_up(max(1, keys), PANEL)
    across, along = np.empty(widest * size, np.float32), np.empty(widest * value_size, np.float32)
    x, y = np.empty(round_up(most, UNROLLED) * size, np.float32), np.empty(most * value_size, np.float32)
    s = np.empty(most * widest, np.float32)
    for part in range(np.int64(begin), np.int64(end)):
        plane = part // chunks
        b, h = plane // heads, plane % heads
        some = (spans[1][b] + chunks - 1) // chunks
        chunk = part % chunks * some
        chunk_end = min(spans[1][b], chunk + some)
        if chunk >= chunk_end:
            continue
        offset, length = offsets[b], min(spans[3][b], lengths[b])
        low = first_key(chunk, offset, window) // PANEL * PANEL
        high = max(low, end_key(chunk_end - 1, offset, length, causal))
        of_key = h // (heads // key_heads)
        height = round_up(max(1, high - low), PANEL)
        fetch_rows(key, _place(strides[1], b, of_key, spans[2][b] + low), strides[1][2], high - low, size)
        fetch_rows(query, _place(strides[0], b, h, spans[0][b] + chunk), strides[0][2], chunk_end - chunk, size)
        fetch_rows(value, _place(strides[2], b, of_key, spans[2][b] + low), strides[2][2], high - low, value_size)
        place = _place(strides[1], b, of_key, spans[2][b] + low)
        panels_across(key, place, strides[1][2], high - low, size, across)
        place = _place(strides[2], b, of_key, spans[2][b] + low)
        panels_along(value, place, strides[2][2], high - low, value_size, along)
        blocks = (chunk_end - chunk + BLOCK - 1) // BLOCK
        rows = (chunk_end - chunk + blocks - 1) // blocks
        for first in range(chunk, chunk_end, rows):
            count = min(rows, chunk_end - first)
            start = max(0, min(first_key(first, offset, window), high) // PANEL * PANEL - low)
            stop = max(start, end_key(first + count - 1, offset, length, causal) - low)
            place = _place(strides[0], b, h, spans[0][b] + first)
            copy_rows(query, place, strides[0][2], count, size, scale, x)
            columns = round_up(stop - start, PANEL)
            if columns:
                product(x, 0, size, 1, across, start * size, PANEL * size, PANEL, size, s, start, height, count,
                         columns)  # fmt: skip
            block = first, count, low, start, stop, columns, height
            mask_at = _place(mask_strides, b, h, 0)
            score_rows(s, no_slope, mask, mask_at, mask_strides, block, (length, offset, slopes[plane]), numbers)
            lse_at = _place(lse_strides, b, h, spans[0][b] + first)
            weigh_rows(s, x, lse, lse_at, lse_strides[2], words, lanes, block, plane, sinks[h], dropout)
            if columns:
                product(s, start, height, 1, along, start * PANEL, height * PANEL, PANEL,
                        round_up(stop - start, UNROLLED), y, 0, value_size, count, value_size)  # fmt: skip
            else:
                y[:] = np.float32(0.0)
            for m in range(count):
                place = np.uintp(_place(out_strides, b, h, spans[0][b] + first + m))
                at, inverse = np.uintp(m * value_size), x[m]  # where queries were, which are read no more
                for d in range(np.uintp(value_size)):
                    out[place + d] = y[at + d] * inverse


# ---------------------------------------------------------------------------------------------------------- weights


@loop()
def weights(team, shape, tensors, strides, looks, numbers, before, kept, out):
    """out (B, H, L, S), flat as before and kept, becomes the weights of queries and keys without dropout, or from
    weights before dropout and after it, P and W, the gradient of products: scale * (W * G - P * rowsum(W * G)), G the
    products of tensors, the output's gradient and values.

    before: P, or empty; tensors and results are of any kind, tensors also in pairs of bfloat16; looks, without sinks,
    and numbers as attention() takes them.
    """
    chunks = (shape[3] + CHUNK - 1) // CHUNK
    parts = shape[0] * shape[1] * chunks
    given = shape, tensors, strides, looks, numbers, before, kept, out
    over_threads(_weights_part, team, np.uintp(parts), _together(parts, shape), given)


def _multiply(x, first, stride, count, size, scale, rows, across, s, height, columns):
    """s (count, columns), `height` numbers a row, becomes scale times rows of x times the panels across."""


@overload(_multiply, jit_options={"forceinline": True})
def _multiply_kind(x, first, stride, count, size, scale, rows, across, s, height, columns):
    def multiply(x, first, stride, count, size, scale, rows, across, s, height, columns):
        copy_rows(x, first, stride, count, size, scale, rows)
        product(rows, 0, size, 1, across, 0, PANEL * size, PANEL, size, s, 0, height, count, columns)

    def multiply_pairs(x, first, stride, count, size, scale, rows, across, s, height, columns):
        copy_words(x, first, stride, count, size, rows)
        product_of_pairs(rows, 0, size, 1, across, 0, PANEL * size, PANEL, size, s, 0, height, count, columns)
        for n in range(np.uintp(count * height)):
            s[n] *= scale

    return multiply_pairs if x.dtype == types.uint32 else multiply


@inlined()
def _weights_part(begin, end, shape, tensors, strides, looks, numbers, before, kept, out):
    _, heads, key_heads, queries, keys, size, _ = shape
    x, y = tensors
    lengths, offsets, slopes, _, mask, mask_strides = looks
    chunks, widest = (queries + CHUNK - 1) // CHUNK, round_up(max(1, keys), PANEL)
    across, no_slope = np.empty(widest * size, np.float32), np.empty(0, np.float32)
    rows, s = np.empty(round_up(BLOCK, UNROLLED) * size, np.float32), np.empty(BLOCK * widest, np.float32)
    for part in range(np.int64(begin), np.int64(end)):
        plane, chunk = part // chunks, part % chunks * CHUNK
        b, h = plane // heads, plane % heads
        chunk_end = min(queries, chunk + CHUNK)
        offset, length = offsets[b], max(0, min(keys, lengths[b]))
        high = end_key(chunk_end - 1, offset, length, numbers[0])
        height = round_up(max(1, high), PANEL)
        place = _place(strides[1], b, h // (heads // key_heads), 0)
        fetch_rows(y, place, strides[1][2], high, size)
        panels_across(y, place, strides[1][2], high, size, across)
        for first in range(chunk, chunk_end, BLOCK):
            count = min(BLOCK, chunk_end - first)
            stop = end_key(first + count - 1, offset, length, numbers[0])
            columns = round_up(stop, PANEL)
            place = _place(strides[0], b, h, first)
            _multiply(x, place, strides[0][2], count, size, numbers[3], rows, across, s, height, columns)
            line = np.uintp((plane * queries + first) * keys)
            if before.size:
                for m in range(count):
                    seen = end_key(first + m, offset, length, numbers[0])
                    _differentiate_products(s, m * height, before, kept, out, line + np.uintp(m * keys), seen, keys)
                continue
            block, place = (first, count, 0, 0, stop, columns, height), _place(mask_strides, b, h, 0)
            score_rows(s, no_slope, mask, place, mask_strides, block, (length, offset, slopes[plane]), numbers)
            for m in range(count):
                at = np.uintp(m * height)
                factor = np.float32(1.0) / weigh(s, at, np.uintp(columns), np.float32(-np.inf))[1]
                _write_weights(s, at, factor, out, line + np.uintp(m * keys), stop, keys)


@inlined()
def _write_weights(s, at, factor, out, place, count, width):
    for t in range(np.uintp(count)):
        out[place + t] = round_to(s[at + t] * factor, out[place + t])
    for t in range(np.uintp(count), np.uintp(width)):
        out[place + t] = round_to(np.float32(0.0), out[place + t])


@inlined()
def _differentiate_products(s, start, before, kept, out, place, count, width):
    at = np.uintp(start)
    total = dot(s, at, kept, place, np.uintp(count))
    for t in range(np.uintp(count)):
        value = read(kept[place + t]) * s[at + t] - read(before[place + t]) * total
        out[place + t] = round_to(value, out[place + t])
    for t in range(np.uintp(count), np.uintp(width)):
        out[place + t] = round_to(np.float32(0.0), out[place + t])


# --------------------------------------------------------------------------------------------------------- backward


@loop()
def attention_gradient(
    team, shape, tensors, strides, spans, looks, numbers, dropout, lse, lse_strides, gradients, gradient_strides
):
    """Gradients of query, key and value; as attention() takes all, tensors and strides with output and its gradient
    behind the others."""
    batch, _, key_heads, _, _, _, _ = shape
    over_threads(
        _gradient_part, team, np.uintp(batch * key_heads), _together(batch * key_heads, shape),
        (shape, tensors, strides, spans, looks, numbers, dropout, lse, lse_strides, gradients, gradient_strides),
    )  # fmt: skip


@inlined()
def _gradient_part(
    begin, end, shape, tensors, strides, spans, looks, numbers, dropout, lse, lse_strides, gradients, gradient_strides
):
    _, heads, key_heads, queries, keys, size, value_size = shape
    _, key, value, _, _ = tensors
    height, group = round_up(max(1, keys), PANEL), heads // key_heads
    blocks = max(1, (queries + BLOCK - 1) // BLOCK)
    rows = round_up(max(1, (queries + blocks - 1) // blocks), UNROLLED)  # which sums over queries are filled up to
    across, along = np.empty(height * size, np.float32), np.empty(height * size, np.float32)
    values = np.empty(height * value_size, np.float32)
    x, g = np.empty(rows * size, np.float32), np.empty(rows * value_size, np.float32)
    s, ds = np.empty(rows * height, np.float32), np.empty(rows * height, np.float32)
    dx = np.empty(rows * size, np.float32)
    slope = np.empty(rows * height if numbers[4] != np.float32(0.0) else 0, np.float32)
    words = np.empty((keys + 15) // 16 * 4, np.uint32)
    lanes = words.view(np.uint8)
    d_key, d_value = np.empty(height * size, np.float32), np.empty(height * value_size, np.float32)
    for part in range(np.int64(begin), np.int64(end)):
        b, of_key = part // key_heads, part % key_heads
        length = max(0, min(spans[3][b], looks[0][b]))
        fetch_rows(key, _place(strides[1], b, of_key, spans[2][b]), strides[1][2], length, size)
        fetch_rows(value, _place(strides[2], b, of_key, spans[2][b]), strides[2][2], length, value_size)
        place = _place(strides[1], b, of_key, spans[2][b])
        panels_across(key, place, strides[1][2], length, size, across)
        panels_along(key, place, strides[1][2], length, size, along)
        place = _place(strides[2], b, of_key, spans[2][b])
        panels_across(value, place, strides[2][2], length, value_size, values)
        d_key[:] = np.float32(0.0)
        d_value[:] = np.float32(0.0)
        for h in range(of_key * group, (of_key + 1) * group):
            for first in range(0, spans[1][b], rows):
                count = min(rows, spans[1][b] - first)
                start = min(first_key(first, looks[1][b], numbers[1]), length) // PANEL * PANEL
                stop = max(start, end_key(first + count - 1, looks[1][b], length, numbers[0]))
                if start == stop:
                    dx[:] = np.float32(0.0)
                else:
                    _gradient_block(
                        b, h, first, count, start, stop, length, height, shape, tensors, strides, spans, looks, numbers,
                        dropout, lse, lse_strides, (across, along, values), (x, g, s, ds, slope, words, lanes),
                        (dx, d_key, d_value),
                    )  # fmt: skip
                place = _place(gradient_strides[0], b, h, spans[0][b] + first)
                _write(dx, gradients[0], place, gradient_strides[0][2], count, size, numbers[3])
        place = _place(gradient_strides[1], b, of_key, spans[2][b])
        _write(d_key, gradients[1], place, gradient_strides[1][2], spans[3][b], size, np.float32(1.0))
        place = _place(gradient_strides[2], b, of_key, spans[2][b])
        _write(d_value, gradients[2], place, gradient_strides[2][2], spans[3][b], value_size, np.float32(1.0))


@inlined()
def _gradient_block(
    b, h, first, count, start, stop, length, height, shape, tensors, strides, spans, looks, numbers, dropout, lse,
    lse_strides, panels, memory, gradients,
):  # fmt: skip
    """Gradients of `count` queries from `first` on, but for the scale, and what they add to those of keys and values;
    they see the keys from start to stop, one at least, and the scores' rows are `height` numbers apart. It has one way
    out: with two, numba counts who holds each array, by operations that threads wait for."""
    size, value_size = shape[5], shape[6]
    scale = numbers[3]
    (across, along, values), (x, g, s, ds, slope, words, lanes), (dx, d_key, d_value) = panels, memory, gradients
    _, offsets, slopes, _, mask, mask_strides = looks
    offset, columns = offsets[b], round_up(stop - start, PANEL)
    row = spans[0][b] + first
    fetch_rows(tensors[0], _place(strides[0], b, h, row), strides[0][2], count, size)
    fetch_rows(tensors[4], _place(strides[4], b, h, row), strides[4][2], count, value_size)
    fetch_rows(tensors[3], _place(strides[3], b, h, row), strides[3][2], count, value_size)
    copy_rows(tensors[0], _place(strides[0], b, h, row), strides[0][2], count, size, scale, x)
    copy_rows(tensors[4], _place(strides[4], b, h, row), strides[4][2], count, value_size, np.float32(1.0), g)
    product(x, 0, size, 1, across, start * size, PANEL * size, PANEL, size, s, start, height, count, columns)
    product(g, 0, value_size, 1, values, start * value_size, PANEL * value_size, PANEL, value_size, ds, start, height,
            count, columns)  # fmt: skip
    block, plane = (first, count, 0, start, stop, columns, height), b * shape[1] + h
    mask_at = _place(mask_strides, b, h, 0)
    score_rows(s, slope, mask, mask_at, mask_strides, block, (length, offset, slopes[plane]), numbers)
    output_at, lse_at = _place(strides[3], b, h, row), _place(lse_strides, b, h, row)
    differentiate_rows(
        s, ds, slope, g, tensors[3], output_at, strides[3][2], value_size, lse, lse_at, lse_strides[2], words, lanes,
        block, plane, dropout,
    )  # fmt: skip
    for m in range(count, round_up(count, UNROLLED)):
        s[m * height + start : m * height + start + columns] = np.float32(0.0)
        ds[m * height + start : m * height + start + columns] = np.float32(0.0)
    many, tall = round_up(count, UNROLLED), round_up(length, PANEL)
    product(ds, start, height, 1, along, start * PANEL, tall * PANEL, PANEL, round_up(stop - start, UNROLLED), dx, 0,
            size, count, size)  # fmt: skip
    add_product(ds, start, 1, height, x, 0, PANEL, size, many, d_key, start * size, size, stop - start, size)
    add_product(s, start, 1, height, g, 0, PANEL, value_size, many, d_value, start * value_size, value_size,
                stop - start, value_size)  # fmt: skip


@inlined()
def _write(x, out, first, stride, rows, size, factor):
    for m in range(np.uintp(rows)):
        place, at = np.uintp(first) + m * np.uintp(stride), m * np.uintp(size)
        for d in range(np.uintp(size)):
            out[place + d] = x[at + d] * factor
