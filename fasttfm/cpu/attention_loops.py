"""Attention over float32 rows and its gradients in blocks of queries, for numba; nothing is checked here.

A block holds the scores of some queries, whole rows of them, so that one softmax does, and nothing that grows with
both lengths exists. Products are those of tiles.py, for which keys and values are copied once a plane.

Forward takes 4 * L * S * D operations for each plane (batch row and head), backward 10; keys that no query of a block
sees are left out. The gradients of a head of keys and values are summed by one thread, in the order of the queries.
"""

import math

import numpy as np

from fasttfm.cpu.loop_parts import FAST, exp, inlined, loop
from fasttfm.cpu.panels import PANEL, UNROLLED
from fasttfm.cpu.search_loops import of_sort_key, sort_key
from fasttfm.cpu.thread_team import over_threads
from fasttfm.cpu.tiles import add_product, copy_rows, panels_across, panels_along, product, round_up
from fasttfm.cpu.training_loops import draw_lanes

BLOCK = 30
"""Queries of a block, at most."""
CHUNK = 240
"""Queries, at most, that a thread computes for one copy of keys and values."""
_HIDDEN = np.float32(-3e38)
"""A score that a mask hides; finite, so that rows without NaN and infinities are told by a sum."""
_LOG2_E = np.float32(math.log2(math.e))
_LOG_2 = np.float32(math.log(2.0))


# ----------------------------------------------------------------------------------------------------------- scores


@inlined()
def _place(strides, b, h, i):
    return b * strides[0] + h * strides[1] + i * strides[2]


@inlined()
def _first_key(i, offset, window):
    """Return the first key that query i sees."""
    return 0 if window < 0 else max(0, i + offset - window)


@inlined()
def _end_key(i, offset, length, causal):
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


@inlined(fastmath=FAST, error_model="numpy")
def _score(s, at, count, cap, slope, distance, mask, mask_at, mask_step):
    """s[at : at + count], products, become scores, what a mask hides _HIDDEN; distance: of the first key from the
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
            s[at + t] = _HIDDEN if mask[mask_at + t] <= _HIDDEN else added
    elif mask_step == 0:
        for t in range(count):
            s[at + t] = _HIDDEN if mask[mask_at] <= _HIDDEN else s[at + t] + mask[mask_at]


@inlined(fastmath=FAST)
def _weigh(s, at, count, sink):
    """s[at : at + count], scores, become exp(score - largest). Returns largest, that of the sink among them, and the
    sum; 0 and 1 where there is neither key nor sink."""
    key, check = sort_key(max(sink, _HIDDEN)), np.float32(0.0)
    for t in range(count):
        key = max(key, sort_key(s[at + t]))
        check += s[at + t] * np.float32(0.0)
    if check != np.float32(0.0):
        return _weigh_any(s, at, count, sink)
    largest = of_sort_key(key)
    if largest <= _HIDDEN:
        for t in range(count):
            s[at + t] = np.float32(0.0)
        return np.float32(0.0), np.float32(1.0)
    total = np.float32(0.0)
    for t in range(count):
        weight = exp(s[at + t] - largest)
        weight = weight if s[at + t] > _HIDDEN else np.float32(0.0)
        s[at + t] = weight
        total += weight
    return largest, total + (exp(sink - largest) if sink > _HIDDEN else np.float32(0.0))


@inlined()
def _weigh_any(s, at, count, sink):
    """_weigh() of a row of which some numbers are infinite or NaN: NaN throughout where one is NaN or inf."""
    largest = sink
    for t in range(count):
        if s[at + t] != s[at + t]:
            largest = np.float32(np.nan)
            break
        largest = max(largest, s[at + t])
    if not (largest < np.inf and largest > -np.inf):
        for t in range(count):
            s[at + t] = np.nan
        return np.float32(np.nan), np.float32(1.0)
    total = exp(sink - largest) if sink > _HIDDEN else np.float32(0.0)
    for t in range(count):
        s[at + t] = exp(s[at + t] - largest) if s[at + t] > _HIDDEN else np.float32(0.0)
        total += s[at + t]
    return largest, total


@inlined()
def _clear(s, begin, end):
    for t in range(np.uintp(begin), np.uintp(end)):
        s[t] = np.float32(0.0)


@inlined()
def _drop(s, at, count, lanes, first, least, factor):
    for t in range(count):
        s[at + t] *= factor if np.int32(lanes[first + t]) >= least else np.float32(0.0)


# ---------------------------------------------------------------------------------------------------------- forward


@loop(fastmath=FAST)
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
        _attention_part, team, np.uintp(batch * heads * chunks), np.uintp(1),
        (shape, tensors, strides, spans, looks, numbers, dropout, out, out_strides, lse, lse_strides),
    )  # fmt: skip


@inlined(fastmath=FAST)
def _attention_part(
    begin, end, shape, tensors, strides, spans, looks, numbers, dropout, out, out_strides, lse, lse_strides
):
    _, heads, key_heads, queries, keys, size, value_size = shape
    query, key, value = tensors
    lengths, offsets, slopes, sinks, mask, mask_strides = looks
    causal, window, past, scale, cap = numbers
    seed, site, threshold, kept = dropout
    chunks = (queries + CHUNK - 1) // CHUNK
    words = np.empty((keys + 15) // 16 * 4, np.uint32)
    lanes, least = words.view(np.uint8), np.int32(threshold)
    for part in range(np.int64(begin), np.int64(end)):
        plane = part // chunks
        b, h = plane // heads, plane % heads
        some = (spans[1][b] + chunks - 1) // chunks
        chunk = part % chunks * some
        chunk_end = min(spans[1][b], chunk + some)
        if chunk >= chunk_end:
            continue
        offset, length = offsets[b], min(spans[3][b], lengths[b])
        low = _first_key(chunk, offset, window) // PANEL * PANEL
        high = max(low, _end_key(chunk_end - 1, offset, length, causal))
        of_key = h // (heads // key_heads)
        height = round_up(max(1, high - low), PANEL)
        across, along = np.empty(height * size, np.float32), np.empty(height * value_size, np.float32)
        place = _place(strides[1], b, of_key, spans[2][b] + low)
        panels_across(key, place, strides[1][2], high - low, size, across)
        place = _place(strides[2], b, of_key, spans[2][b] + low)
        panels_along(value, place, strides[2][2], high - low, value_size, along)
        blocks = (chunk_end - chunk + BLOCK - 1) // BLOCK
        rows = (chunk_end - chunk + blocks - 1) // blocks
        x = np.empty(round_up(rows, UNROLLED) * size, np.float32)
        s, y = np.empty(rows * height, np.float32), np.empty(rows * value_size, np.float32)
        for first in range(chunk, chunk_end, rows):
            count = min(rows, chunk_end - first)
            start = max(0, min(_first_key(first, offset, window), high) // PANEL * PANEL - low)
            stop = max(start, _end_key(first + count - 1, offset, length, causal) - low)
            place = _place(strides[0], b, h, spans[0][b] + first)
            copy_rows(query, place, strides[0][2], count, size, scale, x)
            columns = round_up(stop - start, PANEL)
            if columns:
                product(x, 0, size, 1, across, start * size, PANEL * size, PANEL, size, s, start, height, count,
                         columns)  # fmt: skip
            for m in range(count):
                i, at = first + m, m * height
                left = max(min(_first_key(i, offset, window) - low, stop), start)
                right = max(left, min(_end_key(i, offset, length, causal) - low, stop))
                mask_at = _place(mask_strides, b, h, i) + (low + left) * max(0, mask_strides[3])
                number, begin_at = np.uintp(right - left), np.uintp(at + left)
                _score(s, begin_at, number, cap, slopes[plane], low + left - i - offset + past, mask, np.uintp(mask_at),
                       mask_strides[3])  # fmt: skip
                largest, total = _weigh(s, begin_at, number, sinks[h])
                lse[_place(lse_strides, b, h, spans[0][b] + i)] = (largest + np.log(total)) * _LOG2_E
                x[m] = np.float32(1.0) / total  # queries are read no more
                _clear(s, at + start, at + left)
                _clear(s, at + right, at + start + columns)
                if threshold:
                    draw_lanes(words, seed, np.uint64(i), np.uint64(plane), site)
                    _drop(s, begin_at, number, lanes, np.uintp(low + left), least, kept)
            if columns:
                product(s, start, height, 1, along, start * PANEL, height * PANEL, PANEL, columns, y, 0, value_size,
                         count, value_size)  # fmt: skip
            else:
                y[:] = np.float32(0.0)
            for m in range(count):
                place = np.uintp(_place(out_strides, b, h, spans[0][b] + first + m))
                at, inverse = np.uintp(m * value_size), x[m]
                for d in range(np.uintp(value_size)):
                    out[place + d] = y[at + d] * inverse


# --------------------------------------------------------------------------------------------------------- backward


@loop(fastmath=FAST)
def attention_gradient(
    team, shape, tensors, strides, spans, looks, numbers, dropout, lse, lse_strides, gradients, gradient_strides
):
    """Gradients of query, key and value; as attention() takes all, tensors and strides with output and its gradient
    behind the others."""
    batch, _, key_heads, _, _, _, _ = shape
    over_threads(
        _gradient_part, team, np.uintp(batch * key_heads), np.uintp(1),
        (shape, tensors, strides, spans, looks, numbers, dropout, lse, lse_strides, gradients, gradient_strides),
    )  # fmt: skip


@inlined(fastmath=FAST)
def _weights_gradient(s, ds, at, count, lse, delta, lanes, first, least, kept):
    """s[at : at + count], scores, become weights after dropout, and ds, gradients of these, those of the scores;
    least 0 drops nothing."""
    mark = lse * np.float32(0.0)  # 0, or NaN
    for t in range(count):
        score = s[at + t]
        weight = exp(min(score - lse, np.float32(0.0)))
        weight = (weight if score > _HIDDEN else np.float32(0.0)) + mark
        s[at + t] = weight
    if least:
        for t in range(count):
            factor = kept if np.int32(lanes[first + t]) >= least else np.float32(0.0)
            ds[at + t] = (ds[at + t] * factor - delta) * s[at + t]
            s[at + t] *= factor
    else:
        for t in range(count):
            ds[at + t] = (ds[at + t] - delta) * s[at + t]


@inlined(fastmath=FAST)
def _dot(x, at, y, place, size):
    total = np.float32(0.0)
    for d in range(size):
        total += x[at + d] * y[place + d]
    return total


@inlined(fastmath=FAST, error_model="numpy")
def _cap_slope(s, count, cap):
    """s[:count], products, become the derivatives of a cap's scores by them."""
    inverse = np.float32(1.0) / cap
    for t in range(count):
        y = _tanh(s[t] * inverse)
        s[t] = np.float32(1.0) - y * y


@inlined(fastmath=FAST)
def _gradient_part(
    begin, end, shape, tensors, strides, spans, looks, numbers, dropout, lse, lse_strides, gradients, gradient_strides
):
    _, heads, key_heads, queries, keys, size, value_size = shape
    _, key, value, _, _ = tensors
    height, group = round_up(max(1, keys), PANEL), heads // key_heads
    blocks = max(1, (queries + BLOCK - 1) // BLOCK)
    rows = max(1, (queries + blocks - 1) // blocks)
    padded = round_up(rows, UNROLLED)
    across, along = np.empty(height * size, np.float32), np.empty(height * size, np.float32)
    values = np.empty(height * value_size, np.float32)
    x, g = np.empty(padded * size, np.float32), np.empty(padded * value_size, np.float32)
    s, ds = np.empty(padded * height, np.float32), np.empty(padded * height, np.float32)
    dx = np.empty(rows * size, np.float32)
    slope = np.empty(height if numbers[4] != np.float32(0.0) else 0, np.float32)
    d_key, d_value = np.empty(height * size, np.float32), np.empty(height * value_size, np.float32)
    for part in range(np.int64(begin), np.int64(end)):
        b, of_key = part // key_heads, part % key_heads
        length = max(0, min(spans[3][b], looks[0][b]))
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
                _gradient_block(
                    b, h, first, count, length, height, shape, tensors, strides, spans, looks, numbers, dropout, lse,
                    lse_strides, (across, along, values), (x, g, s, ds, slope), (dx, d_key, d_value),
                )  # fmt: skip
                place = _place(gradient_strides[0], b, h, spans[0][b] + first)
                _write(dx, gradients[0], place, gradient_strides[0][2], count, size, numbers[3])
        place = _place(gradient_strides[1], b, of_key, spans[2][b])
        _write(d_key, gradients[1], place, gradient_strides[1][2], spans[3][b], size, np.float32(1.0))
        place = _place(gradient_strides[2], b, of_key, spans[2][b])
        _write(d_value, gradients[2], place, gradient_strides[2][2], spans[3][b], value_size, np.float32(1.0))


@inlined(fastmath=FAST)
def _gradient_block(
    b,
    h,
    first,
    count,
    length,
    height,
    shape,
    tensors,
    strides,
    spans,
    looks,
    numbers,
    dropout,
    lse,
    lse_strides,
    panels,
    memory,
    gradients,
):
    """Gradients of `count` queries from `first` on, but for the scale, and what they add to those of keys and values;
    the scores' rows are `height` numbers apart."""
    size, value_size = shape[5], shape[6]
    causal, window, _, scale, _ = numbers
    (across, along, values), (x, g, s, ds, _), (dx, d_key, d_value) = panels, memory, gradients
    offset = looks[1][b]
    start = min(_first_key(first, offset, window), length) // PANEL * PANEL
    stop = max(start, _end_key(first + count - 1, offset, length, causal))
    columns = round_up(stop - start, PANEL)
    if columns == 0:
        dx[:] = np.float32(0.0)
        return
    row = spans[0][b] + first
    copy_rows(tensors[0], _place(strides[0], b, h, row), strides[0][2], count, size, scale, x)
    copy_rows(tensors[4], _place(strides[4], b, h, row), strides[4][2], count, value_size, np.float32(1.0), g)
    product(x, 0, size, 1, across, start * size, PANEL * size, PANEL, size, s, start, height, count, columns)
    product(g, 0, value_size, 1, values, start * value_size, PANEL * value_size, PANEL, value_size, ds, start, height,
            count, columns)  # fmt: skip
    _gradient_rows(
        b, h, first, count, (start, stop, columns, height), length, shape, tensors[3], strides[3], spans[0][b], looks,
        numbers, dropout, lse, lse_strides, memory,
    )  # fmt: skip
    many, tall = round_up(count, UNROLLED), round_up(length, PANEL)
    product(ds, start, height, 1, along, start * PANEL, tall * PANEL, PANEL, columns, dx, 0, size, count, size)
    add_product(ds, start, 1, height, x, 0, PANEL, size, many, d_key, start * size, size, stop - start, size)
    add_product(s, start, 1, height, g, 0, PANEL, value_size, many, d_value, start * value_size, value_size,
                stop - start, value_size)  # fmt: skip


@inlined(fastmath=FAST)
def _gradient_rows(
    b,
    h,
    first,
    count,
    places,
    length,
    shape,
    output,
    output_strides,
    origin,
    looks,
    numbers,
    dropout,
    lse,
    lse_strides,
    memory,
):
    """In a block's memory its products, s and ds, become weights and gradients of scores, zero where nothing is
    seen."""
    _, heads, _, _, keys, _, value_size = shape
    _, offsets, slopes, _, mask, mask_strides = looks
    causal, window, past, _, cap = numbers
    seed, site, threshold, kept = dropout
    _, g, s, ds, slope = memory
    start, stop, columns, height = places
    offset, plane = offsets[b], b * heads + h
    words = np.empty((keys + 15) // 16 * 4, np.uint32)
    lanes, least = words.view(np.uint8), np.int32(threshold)
    for m in range(count):
        i, at = first + m, m * height
        left = max(min(_first_key(i, offset, window), stop), start)
        right = max(left, min(_end_key(i, offset, length, causal), stop))
        number, begin = np.uintp(right - left), np.uintp(at + left)
        mask_at = _place(mask_strides, b, h, i) + left * max(0, mask_strides[3])
        if cap != np.float32(0.0):
            slope[: right - left] = s[at + left : at + right]
            _cap_slope(slope, number, cap)
        _score(s, begin, number, cap, slopes[plane], left - i - offset + past, mask, np.uintp(mask_at), mask_strides[3])
        place = np.uintp(_place(output_strides, b, h, origin + i))
        delta = _dot(g, np.uintp(m * value_size), output, place, np.uintp(value_size))
        if threshold:
            draw_lanes(words, seed, np.uint64(i), np.uint64(plane), site)
        total = lse[_place(lse_strides, b, h, origin + i)] * _LOG_2
        _weights_gradient(s, ds, begin, number, total, delta, lanes, np.uintp(left), least, kept)
        if cap != np.float32(0.0):
            for t in range(number):
                ds[begin + t] *= slope[t]
        for each in (s, ds):
            _clear(each, at + start, at + left)
            _clear(each, at + right, at + start + columns)
    for m in range(count, round_up(count, UNROLLED)):
        for each in (s, ds):
            _clear(each, m * height + start, m * height + start + columns)


@inlined()
def _write(x, out, first, stride, rows, size, factor):
    for m in range(np.uintp(rows)):
        place, at = np.uintp(first) + m * np.uintp(stride), m * np.uintp(size)
        for d in range(np.uintp(size)):
            out[place + d] = x[at + d] * factor
