"""Attention over float32 rows and its gradients in blocks of queries, compiled by numba; arguments are not checked.

A block holds complete rows of scores of some queries, so that one softmax suffices, and no buffer grows with both
lengths. Products are those of tiles.py; keys and values are packed once per plane (batch row and head).

Forward takes 4 * L * S * D operations per plane, backward 10, or 8 with saved weights; keys that no query of a block
sees are skipped. The gradients of a key head are summed by one thread, in the order of the queries.

Arguments of attention() and attention_gradient():
shape: (B, H, Hk, L, S, D, Dv). tensors: query, key and value, flat; strides: of batch row, head and row of each.
spans: first query, number of queries, first key and number of keys of each batch row, four (B,).
mask_args: key lengths (B,), causal offsets (B,), ALiBi slopes (B * H,), sinks (H,) or -inf, additive mask flat, and its
four strides, the last of them 0 or 1, or -1 without mask. params: causal, window, past, scale, softcap.
dropout: seed, site, threshold, scale. lse (B * H * L,): base-2 log-sum-exp of the rows. probs (B * H * L * S,): the
weights before dropout, in the order of lse, or empty.
"""

import numpy as np
from numba import types
from numba.extending import overload

from fasttfm.cpu.attention_scores import differentiate_rows, end_key, first_key, score_rows, weigh_rows
from fasttfm.cpu.loop_parts import dot, inlined, loop, read, round_to
from fasttfm.cpu.panel_tiles import UNROLLED
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
"""Most queries of a block."""
CHUNK = 240
"""Most queries that share one packed copy of keys and values."""
_SCORES = 1 << 14
"""Most scores of short parts that a thread takes at once."""
_FEWEST = 64
"""Least number of times that threads fetch parts, if there are enough."""


@inlined()
def _index(strides, b, h, i):
    return b * strides[0] + h * strides[1] + i * strides[2]


@inlined()
def _grain(parts, shape):
    """The number of parts that a thread takes at once: several if they are short, which then share buffers."""
    return np.uintp(max(1, min(parts // _FEWEST, _SCORES // max(1, shape[3] * shape[4]))))


# ---------------------------------------------------------------------------------------------------------- forward


@loop()
def attention(
    team, shape, tensors, strides, spans, mask_args, params, dropout, out, out_strides, lse, lse_strides, probs
):
    """Write out (B, H, L, Dv), lse and, unless it is empty, probs; see the module's docstring."""
    batch, heads, _, queries, _, _, _ = shape
    chunks = (queries + CHUNK - 1) // CHUNK
    over_threads(
        _attention_part, team, np.uintp(batch * heads * chunks), _grain(batch * heads * chunks, shape),
        (shape, tensors, strides, spans, mask_args, params, dropout, out, out_strides, lse, lse_strides, probs),
    )  # fmt: skip


@inlined()
def _attention_part(
    begin, end, shape, tensors, strides, spans, mask_args, params, dropout, out, out_strides, lse, lse_strides, probs
):
    _, heads, key_heads, queries, keys, size, value_size = shape
    query, key, value = tensors
    lengths, offsets, slopes, sinks, mask, mask_strides = mask_args
    causal, window, _, scale, _ = params
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
        chunk_rows = (spans[1][b] + chunks - 1) // chunks
        chunk = part % chunks * chunk_rows
        chunk_end = min(spans[1][b], chunk + chunk_rows)
        if chunk >= chunk_end:
            continue
        offset, length = offsets[b], min(spans[3][b], lengths[b])
        low = first_key(chunk, offset, window) // PANEL * PANEL
        high = max(low, end_key(chunk_end - 1, offset, length, causal))
        key_head, height = h // (heads // key_heads), round_up(max(1, high - low), PANEL)
        key_at = _index(strides[1], b, key_head, spans[2][b] + low)
        value_at = _index(strides[2], b, key_head, spans[2][b] + low)
        fetch_rows(key, key_at, strides[1][2], high - low, size)
        fetch_rows(query, _index(strides[0], b, h, spans[0][b] + chunk), strides[0][2], chunk_end - chunk, size)
        fetch_rows(value, value_at, strides[2][2], high - low, value_size)
        panels_across(key, key_at, strides[1][2], high - low, size, across)
        panels_along(value, value_at, strides[2][2], high - low, value_size, along)
        blocks = (chunk_end - chunk + BLOCK - 1) // BLOCK
        rows = (chunk_end - chunk + blocks - 1) // blocks
        for first in range(chunk, chunk_end, rows):
            count = min(rows, chunk_end - first)
            start = max(0, min(first_key(first, offset, window), high) // PANEL * PANEL - low)
            stop = max(start, end_key(first + count - 1, offset, length, causal) - low)
            copy_rows(query, _index(strides[0], b, h, spans[0][b] + first), strides[0][2], count, size, scale, x)
            columns = round_up(stop - start, PANEL)
            if columns:
                product(x, 0, size, 1, across, start * size, PANEL * size, PANEL, size, s, start, height, count,
                         columns)  # fmt: skip
            block = first, count, low, start, stop, columns, height
            mask_at = _index(mask_strides, b, h, 0)
            score_rows(s, no_slope, mask, mask_at, mask_strides, block, (length, offset, slopes[plane]), params)
            lse_at = _index(lse_strides, b, h, spans[0][b] + first)
            weigh_rows(s, x, lse, lse_at, lse_strides[2], probs, keys, words, lanes, block, plane, sinks[h], dropout)
            if columns:
                product(s, start, height, 1, along, start * PANEL, height * PANEL, PANEL,
                        round_up(stop - start, UNROLLED), y, 0, value_size, count, value_size)  # fmt: skip
            else:
                y[:] = np.float32(0.0)
            for m in range(count):
                to = np.uintp(_index(out_strides, b, h, spans[0][b] + first + m))
                at, inverse = np.uintp(m * value_size), x[m]  # weigh_rows() has overwritten the queries
                for d in range(np.uintp(value_size)):
                    out[to + d] = y[at + d] * inverse


# ---------------------------------------------------------------------------------------------------------- weights


@loop()
def weights(team, shape, tensors, strides, mask_args, params, before, after, out):
    """Write to out (B, H, L, S), flat, the attention weights without dropout; or, with before, a gradient.

    tensors: query and key; params and mask_args as for attention(), without sinks. With before and after, the weights P
    before dropout and W after it, tensors are the output's gradient and value, G their products, and out becomes the
    gradient of the products Q K^T: scale * (W * G - P * rowsum(W * G)). Element types are those of loop_parts.py;
    tensors may also be pairs of bfloat16.
    """
    chunks = (shape[3] + CHUNK - 1) // CHUNK
    parts = shape[0] * shape[1] * chunks
    args = shape, tensors, strides, mask_args, params, before, after, out
    over_threads(_weights_part, team, np.uintp(parts), _grain(parts, shape), args)


def _multiply(x, first, stride, count, size, scale, rows, across, s, height, columns):
    """Write scale times rows of x times the panels `across` to s (count, columns), with row stride `height`."""


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
def _weights_part(begin, end, shape, tensors, strides, mask_args, params, before, after, out):
    _, heads, key_heads, queries, keys, size, _ = shape
    x, y = tensors
    lengths, offsets, slopes, _, mask, mask_strides = mask_args
    causal, scale = params[0], params[3]
    chunks, widest = (queries + CHUNK - 1) // CHUNK, round_up(max(1, keys), PANEL)
    across, no_slope = np.empty(widest * size, np.float32), np.empty(0, np.float32)
    rows, s = np.empty(round_up(BLOCK, UNROLLED) * size, np.float32), np.empty(BLOCK * widest, np.float32)
    for part in range(np.int64(begin), np.int64(end)):
        plane, chunk = part // chunks, part % chunks * CHUNK
        b, h = plane // heads, plane % heads
        chunk_end = min(queries, chunk + CHUNK)
        offset, length = offsets[b], max(0, min(keys, lengths[b]))
        high = end_key(chunk_end - 1, offset, length, causal)
        height = round_up(max(1, high), PANEL)
        key_at = _index(strides[1], b, h // (heads // key_heads), 0)
        fetch_rows(y, key_at, strides[1][2], high, size)
        panels_across(y, key_at, strides[1][2], high, size, across)
        for first in range(chunk, chunk_end, BLOCK):
            count = min(BLOCK, chunk_end - first)
            stop = end_key(first + count - 1, offset, length, causal)
            columns = round_up(stop, PANEL)
            x_at = _index(strides[0], b, h, first)
            _multiply(x, x_at, strides[0][2], count, size, scale, rows, across, s, height, columns)
            line = np.uintp((plane * queries + first) * keys)
            if before.size:
                for m in range(count):
                    seen = end_key(first + m, offset, length, causal)
                    _differentiate_products(s, m * height, before, after, out, line + np.uintp(m * keys), seen, keys)
                continue
            block, mask_at = (first, count, 0, 0, stop, columns, height), _index(mask_strides, b, h, 0)
            score_rows(s, no_slope, mask, mask_at, mask_strides, block, (length, offset, slopes[plane]), params)
            for m in range(count):
                at = np.uintp(m * height)
                factor = np.float32(1.0) / weigh(s, at, np.uintp(columns), np.float32(-np.inf))[1]
                _write_weights(s, at, factor, out, line + np.uintp(m * keys), stop, keys)


@inlined()
def _write_weights(s, at, factor, out, to, count, width):
    for t in range(np.uintp(count)):
        out[to + t] = round_to(s[at + t] * factor, out[to + t])
    for t in range(np.uintp(count), np.uintp(width)):
        out[to + t] = round_to(np.float32(0.0), out[to + t])


@inlined()
def _differentiate_products(s, start, before, after, out, to, count, width):
    at = np.uintp(start)
    total = dot(s, at, after, to, np.uintp(count))
    for t in range(np.uintp(count)):
        value = read(after[to + t]) * s[at + t] - read(before[to + t]) * total
        out[to + t] = round_to(value, out[to + t])
    for t in range(np.uintp(count), np.uintp(width)):
        out[to + t] = round_to(np.float32(0.0), out[to + t])


# --------------------------------------------------------------------------------------------------------- backward


@loop()
def attention_gradient(
    team, shape, tensors, strides, spans, mask_args, params, dropout, lse, lse_strides, probs, gradients,
    gradient_strides,
):  # fmt: skip
    """Write the gradients of query, key and value; tensors and strides also have the output and its gradient."""
    batch, _, key_heads, _, _, _, _ = shape
    over_threads(
        _gradient_part, team, np.uintp(batch * key_heads), _grain(batch * key_heads, shape),
        (shape, tensors, strides, spans, mask_args, params, dropout, lse, lse_strides, probs, gradients,
         gradient_strides),
    )  # fmt: skip


@inlined()
def _gradient_part(
    begin, end, shape, tensors, strides, spans, mask_args, params, dropout, lse, lse_strides, probs, gradients,
    gradient_strides,
):  # fmt: skip
    _, heads, key_heads, queries, keys, size, value_size = shape
    _, key, value, _, _ = tensors
    height, group = round_up(max(1, keys), PANEL), heads // key_heads
    blocks = max(1, (queries + BLOCK - 1) // BLOCK)
    rows = round_up(max(1, (queries + blocks - 1) // blocks), UNROLLED)  # sums over queries are padded to it
    across, along = np.empty(height * size, np.float32), np.empty(height * size, np.float32)
    values = np.empty(height * value_size, np.float32)
    x, g = np.empty(rows * size, np.float32), np.empty(rows * value_size, np.float32)
    s, ds = np.empty(rows * height, np.float32), np.empty(rows * height, np.float32)
    dx = np.empty(rows * size, np.float32)
    slope = np.empty(rows * height if params[4] != np.float32(0.0) else 0, np.float32)
    words = np.empty((keys + 15) // 16 * 4, np.uint32)
    lanes = words.view(np.uint8)
    d_key, d_value = np.empty(height * size, np.float32), np.empty(height * value_size, np.float32)
    for part in range(np.int64(begin), np.int64(end)):
        b, key_head = part // key_heads, part % key_heads
        length = max(0, min(spans[3][b], mask_args[0][b]))
        key_at = _index(strides[1], b, key_head, spans[2][b])
        value_at = _index(strides[2], b, key_head, spans[2][b])
        fetch_rows(key, key_at, strides[1][2], length, size)
        fetch_rows(value, value_at, strides[2][2], length, value_size)
        if not probs.size:
            panels_across(key, key_at, strides[1][2], length, size, across)
        panels_along(key, key_at, strides[1][2], length, size, along)
        panels_across(value, value_at, strides[2][2], length, value_size, values)
        d_key[:] = np.float32(0.0)
        d_value[:] = np.float32(0.0)
        for h in range(key_head * group, (key_head + 1) * group):
            for first in range(0, spans[1][b], rows):
                count = min(rows, spans[1][b] - first)
                start = min(first_key(first, mask_args[1][b], params[1]), length) // PANEL * PANEL
                stop = max(start, end_key(first + count - 1, mask_args[1][b], length, params[0]))
                if start == stop:
                    dx[:] = np.float32(0.0)
                else:
                    _gradient_block(
                        b, h, first, count, start, stop, length, height, shape, tensors, strides, spans, mask_args,
                        params, dropout, lse, lse_strides, probs, (across, along, values),
                        (x, g, s, ds, slope, words, lanes), (dx, d_key, d_value),
                    )  # fmt: skip
                to = _index(gradient_strides[0], b, h, spans[0][b] + first)
                _write(dx, gradients[0], to, gradient_strides[0][2], count, size, params[3])
        to = _index(gradient_strides[1], b, key_head, spans[2][b])
        _write(d_key, gradients[1], to, gradient_strides[1][2], spans[3][b], size, np.float32(1.0))
        to = _index(gradient_strides[2], b, key_head, spans[2][b])
        _write(d_value, gradients[2], to, gradient_strides[2][2], spans[3][b], value_size, np.float32(1.0))


@inlined()
def _gradient_block(
    b, h, first, count, start, stop, length, height, shape, tensors, strides, spans, mask_args, params, dropout, lse,
    lse_strides, probs, panels, workspace, gradients,
):  # fmt: skip
    """Write dx, without the scale, and add to d_key and d_value for `count` queries from `first` on.

    They see the keys from start to stop, at least one; rows of scores are `height` elements apart. A single exit: with
    two, numba counts references to each array, by operations that threads wait for.
    """
    size, value_size = shape[5], shape[6]
    scale = params[3]
    (across, along, values), (x, g, s, ds, slope, words, lanes), (dx, d_key, d_value) = panels, workspace, gradients
    _, offsets, slopes, _, mask, mask_strides = mask_args
    columns, row = round_up(stop - start, PANEL), spans[0][b] + first
    query_at, grad_at = _index(strides[0], b, h, row), _index(strides[4], b, h, row)
    output_at, lse_at = _index(strides[3], b, h, row), _index(lse_strides, b, h, row)
    fetch_rows(tensors[0], query_at, strides[0][2], count, size)
    fetch_rows(tensors[4], grad_at, strides[4][2], count, value_size)
    fetch_rows(tensors[3], output_at, strides[3][2], count, value_size)
    copy_rows(tensors[0], query_at, strides[0][2], count, size, scale, x)
    copy_rows(tensors[4], grad_at, strides[4][2], count, value_size, np.float32(1.0), g)
    product(g, 0, value_size, 1, values, start * value_size, PANEL * value_size, PANEL, value_size, ds, start, height,
            count, columns)  # fmt: skip
    block, plane = (first, count, 0, start, stop, columns, height), b * shape[1] + h
    if not probs.size:
        product(x, 0, size, 1, across, start * size, PANEL * size, PANEL, size, s, start, height, count, columns)
        mask_at = _index(mask_strides, b, h, 0)
        score_rows(s, slope, mask, mask_at, mask_strides, block, (length, offsets[b], slopes[plane]), params)
    differentiate_rows(
        s, ds, slope, g, tensors[3], output_at, strides[3][2], value_size, lse, lse_at, lse_strides[2], probs, shape[4],
        words, lanes, block, plane, dropout,
    )  # fmt: skip
    many, tall = round_up(count, UNROLLED), round_up(length, PANEL)
    for m in range(count, many):
        s[m * height + start : m * height + start + columns] = np.float32(0.0)
        ds[m * height + start : m * height + start + columns] = np.float32(0.0)
    product(ds, start, height, 1, along, start * PANEL, tall * PANEL, PANEL, round_up(stop - start, UNROLLED), dx, 0,
            size, count, size)  # fmt: skip
    add_product(ds, start, 1, height, x, 0, PANEL, size, many, d_key, start * size, size, stop - start, size)
    add_product(s, start, 1, height, g, 0, PANEL, value_size, many, d_value, start * value_size, value_size,
                stop - start, value_size)  # fmt: skip


@inlined()
def _write(x, out, first, stride, rows, size, factor):
    for m in range(np.uintp(rows)):
        to, at = np.uintp(first) + m * np.uintp(stride), m * np.uintp(size)
        for d in range(np.uintp(size)):
            out[to + d] = x[at + d] * factor
