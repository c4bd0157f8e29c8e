"""Building blocks of the attention kernels: locate the head, load and store rows, multiply, mask keys.

Scores are in base 2: s = q k^T * scale * log2(e), where unscaled() may defer the scale to the exponent; weights are
exp2(s - log-sum-exp). A hidden key has score -inf and weight 0. A row without a visible key has log-sum-exp 0, so that
its weights are exp2(-inf) = 0 when a backward pass recomputes them.

Parameters shared by the kernels of this folder:

    q, dq           (B, H, L, D), any strides except unit stride in the last dimension, as all tensors below
    k, dk           (B, H // GROUP, S, D); GROUP query heads share one key head
    v, dv           (B, H // GROUP, S, DV)
    out, dout       (B, H, L, DV)
    lse             (B, H, L), log2 of the sum of the exponentiated scores of a row; 0 without a visible key
    delta           (B, H, L), rowsum(dout * out)
    strides         launch.strides() of every parameter annotated Pointer, in order: batch, head, row
    lse_strides     (batch, head) of lse and delta, contiguous in L
    PRECISION       tf32, ieee or upcast, as in product()
"""

from __future__ import annotations

import triton
import triton.language as tl

from fasttfm.kernels.attention.problem import Head, Masking, Rows, Sizes
from fasttfm.kernels.philox import spread

LOG2E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def block(width):
    """The power of two from 16 on that a head of this size is computed in."""
    return max(16, 1 << (width - 1).bit_length())


@triton.jit
def head_of(batch, head, sizes, spans):
    """The Head of a batch row and a head's number."""
    H, L, S = sizes
    key_lengths, query_starts, key_starts = spans
    b = tl.cast(batch, tl.int64)
    h = tl.cast(head, tl.int64)
    first_query = tl.cast(0, tl.int64)
    first_key = tl.cast(0, tl.int64)
    queries = L
    keys = S
    if query_starts is not None:
        first_query = tl.load(query_starts + b).to(tl.int64)
        queries = (tl.load(query_starts + b + 1) - first_query).to(tl.int32)
        first_key = tl.load(key_starts + b).to(tl.int64)
        keys = (tl.load(key_starts + b + 1) - first_key).to(tl.int32)
    visible = keys
    if key_lengths is not None:
        visible = tl.maximum(tl.minimum(tl.load(key_lengths + b), keys), 0).to(tl.int32)
    return Head(batch * H + head, b, h, first_query, first_key, queries, keys, visible)


@triton.jit
def locate(plane, sizes, spans):
    """The Head of a plane."""
    return head_of(plane // sizes.H, plane % sizes.H, sizes, spans)


@triton.jit
def keys_of(head, GROUP: tl.constexpr):
    """The Head of the keys that a query's head reads."""
    return Head(
        head.plane // GROUP, head.b, head.h // GROUP, head.first_query, head.first_key, head.queries, head.keys,
        head.visible,
    )  # fmt: skip


@triton.jit
def sizes_of_keys(sizes, GROUP: tl.constexpr):
    """The Sizes with heads of keys for those of queries."""
    return Sizes(sizes.H // GROUP, sizes.L, sizes.S)


@triton.jit
def member_of(head, member, GROUP: tl.constexpr):
    """The Head of one of the GROUP query heads that read a head of keys."""
    return Head(
        head.plane * GROUP + member, head.b, head.h * GROUP + member, head.first_query, head.first_key, head.queries,
        head.keys, head.visible,
    )  # fmt: skip


@triton.jit
def locate_queries(problem, CAUSAL: tl.constexpr, ROWS: tl.constexpr):
    """The Head of this program and the first of its ROWS queries, which may not exist."""
    tiles = (problem.sizes.L + ROWS - 1) // ROWS
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest rows first, so that the last programs to run are short
    return locate(tl.program_id(0) // tiles, problem.sizes, problem.spans), tile * ROWS


@triton.jit
def row_stride(strides):
    """The stride of rows in one of launch.strides(), in 64 bits where an offset within a tile needs them."""
    stride = strides[2]
    if len(strides) == 4:
        stride = tl.cast(stride, tl.int64)
    return stride


@triton.jit
def row_at(strides, batch, head, row):
    """The offset at which a row of a head begins, in one of launch.strides()."""
    return batch * strides[0] + head * strides[1] + row * row_stride(strides)


@triton.jit
def rows_of(x, strides, head, first):
    """The head's Rows of x from its row `first` on, in the tensor's own count."""
    # One offset at a time: of x + a + b the compiler keeps a pointer and an offset in registers.
    return Rows(x + row_at(strides, head.b, head.h, first), row_stride(strides))


@triton.jit
def line_of(strides, head, first):
    """Return the place of the head's row `first` in a tensor (B, H, rows), whose rows are neighbours."""
    return head.b * strides[0] + head.h * strides[1] + first


@triton.jit
def offset_of(masking, head, sizes):
    """The causal offset of the head's batch row."""
    offset = masking.causal_offset
    if masking.offsets is not None:
        rows = sizes.L + sizes.S
        offset += tl.minimum(tl.maximum(tl.load(masking.offsets + head.b), -rows), rows).to(tl.int32)
    return offset


@triton.jit
def sink_scores(x):
    """Sinks in base 2; inf, which must not be subtracted from itself, as a number that takes all weight as well."""
    return tl.where(x > 1e30, 1e30, x) * LOG2E


@triton.jit
def masking_of(masking, head, sizes):
    """The head's Masking."""
    mask = masking.mask
    if mask is not None:
        mask += head.b * masking.mask_strides[0] + head.h * masking.mask_strides[1]
    slopes = masking.slopes
    if slopes is not None:
        slopes = tl.load(slopes + head.b * masking.slope_stride + head.h) * LOG2E
    sinks = masking.sinks
    if sinks is not None:
        sinks = sink_scores(tl.load(sinks + head.h))
    return Masking(
        mask, offset_of(masking, head, sizes), masking.mask_strides, None, masking.window, masking.softcap, slopes,
        masking.slope_stride, masking.past, sinks,
    )  # fmt: skip


@triton.jit
def load(x, first, end, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(ROWS, block(WIDTH)) of the Rows x from row `first` on, zero where there is nothing, as from row `end` on."""
    offset = tl.cast(first, tl.int64)
    count = end - first
    return _load(x.first + offset * x.stride, x.stride, count, tl.arange(0, ROWS), WIDTH, False)


@triton.jit
def load_keys(x, first, end, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr = False):
    """load() in the order of spread(); WHOLE: no row of the tile is past `end`."""
    return _load(x.first + tl.cast(first, tl.int64) * x.stride, x.stride, end - first, spread(COLUMNS), WIDTH, WHOLE)


@triton.jit
def load_tile(x, strides, head, row, count, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """load() of the head's rows from `row` on, in the tensor's own count."""
    return load(rows_of(x, strides, head, row), 0, count, ROWS, WIDTH)


@triton.jit
def _load(start, stride, count, row, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    row = row[:, None]
    column = tl.arange(0, block(WIDTH))[None, :]
    pointers = start + row * stride + column
    if WHOLE and block(WIDTH) == WIDTH:
        tile = tl.load(pointers)
    elif WHOLE:
        tile = tl.load(pointers, mask=column < WIDTH, other=0.0)
    elif block(WIDTH) == WIDTH:
        tile = tl.load(pointers, mask=row < count, other=0.0)
    else:
        tile = tl.load(pointers, mask=(row < count) & (column < WIDTH), other=0.0)
    return tile


@triton.jit
def store(x, first, values, end, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse of load(); casts to the dtype of x."""
    start = x.first + tl.cast(first, tl.int64) * x.stride
    count = end - first
    row = tl.arange(0, ROWS)
    column = tl.arange(0, block(WIDTH))
    inside = (row[:, None] < count) & (column[None, :] < WIDTH)
    tl.store(start + row[:, None] * x.stride + column[None, :], values.to(x.first.dtype.element_ty), mask=inside)


@triton.jit
def store_tile(x, values, strides, head, row, count, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse of load_tile()."""
    store(rows_of(x, strides, head, row), 0, values, count, ROWS, WIDTH)


@triton.jit
def key_range(
    visible, first_row, causal_offset, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """For a tile of queries: where the keys that some row sees end, and where whole tiles that every row sees do."""
    end = visible
    free = visible
    if CAUSAL:
        end = tl.maximum(tl.minimum(visible, first_row + ROWS + causal_offset), 0)
        free = tl.maximum(tl.minimum(visible, first_row + causal_offset + 1), 0)
    return end, free // COLUMNS * COLUMNS


@triton.jit
def window_range(first_row, masking, free, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """For a tile of queries with a left border: where the tiles of keys begin that some row sees, and where those that
    every row sees do, of which `free`, key_range()'s, is the end."""
    border = first_row + masking.causal_offset - masking.window
    start = tl.maximum(border, 0) // COLUMNS * COLUMNS
    whole = (tl.maximum(border + ROWS - 1, 0) + COLUMNS - 1) // COLUMNS * COLUMNS
    return start, tl.minimum(whole, tl.maximum(free, start))


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b in float32. upcast: the interpreter multiplies bfloat16 wrongly, so there the operands become float32."""
    if PRECISION == "upcast":
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        c = tl.dot(a, b, input_precision=PRECISION)
    return c


@triton.jit
def hide(
    s, row, column, masking, queries, visible, CAUSAL: tl.constexpr, CHECKED: tl.constexpr,
    ORDER: tl.constexpr = "spread",
):  # fmt: skip
    """Scores s in base 2 with what is added to them, and -inf where the query may not attend: what a mask adds hides a
    key where it is -inf in base 2, from reference.LOWEST downwards.

    s (ROWS, COLUMNS) from query `row` and key `column` on, of a head with this Masking; ORDER of the keys: spread, as
    spread() has them, plain, or transposed, s being (COLUMNS, ROWS) and the keys plain. CHECKED: the tile reaches past
    the visible keys or the diagonal.
    """
    if ORDER == "transposed":
        rows = tl.arange(0, s.shape[1])[None, :]
        columns = tl.arange(0, s.shape[0])[:, None]
    else:
        rows = tl.arange(0, s.shape[0])[:, None]
        columns = (spread(s.shape[1]) if ORDER == "spread" else tl.arange(0, s.shape[1]))[None, :]
    if masking.slopes is not None:
        past = rows - columns + (row - column + masking.causal_offset - masking.past)
        s -= tl.abs(past).to(tl.float32) * masking.slopes
    if masking.mask is not None:
        row_step, column_step = masking.mask_strides[2], masking.mask_strides[3]
        if len(masking.mask_strides) == 5:
            row_step, column_step = tl.cast(row_step, tl.int64), tl.cast(column_step, tl.int64)
        inside = (rows < queries - row) & (columns < visible - column)
        mask = masking.mask + (tl.cast(row, tl.int64) * row_step + tl.cast(column, tl.int64) * column_step)
        pointers = mask + (rows * row_step + columns * column_step)
        if mask.dtype.element_ty == tl.uint8:
            allowed = tl.load(pointers, mask=inside, other=1)
            if s.shape[0] == 16 or s.shape[1] == 16:
                # Where a load of bytes and a tl.join (dropout's) lead to a product only 16 deep, Triton up to 3.7 gives
                # it a layout for 32 and multiplies wrongly (triton#11691). It does not look behind a reduction.
                allowed = tl.max(tl.expand_dims(allowed, 2), 2)
            s = tl.where(allowed != 0, s, float("-inf"))
        else:
            s += tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * LOG2E
    if CHECKED:
        # One comparison an element: both borders meet in a number of each row, or each column of transposed scores.
        offset = row - column + masking.causal_offset  # of the diagonal: query i sees the tile's keys up to i + offset
        if not CAUSAL:
            seen = columns < visible - column
        elif rows.shape[1] == 1:
            seen = columns < tl.minimum(visible - column, rows + (offset + 1))
        else:
            seen = rows >= tl.where(columns < visible - column, columns - offset, queries - row)
        if masking.window is not None:
            seen = seen & (columns >= rows + (offset - masking.window))
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def unscaled(s, masking, scale):
    """Scores s of a product as hide() takes them, and the factor that they are then still to be multiplied by: that and
    a subtraction are one instruction. What a mask is added to must be scaled before."""
    factor = scale
    if masking.softcap is not None or masking.slopes is not None:
        s = capped(s * scale, masking)
        factor = 1.0
    elif masking.mask is not None:  # noqa: SIM102 Triton reads both sides of `and`
        if masking.mask.dtype.element_ty != tl.uint8:
            s *= scale
            factor = 1.0
    return s, factor


@triton.jit
def capped(s, masking):
    """Scores in base 2 between the soft cap and its negative: c tanh(s / c)."""
    if masking.softcap is not None:
        cap = masking.softcap * LOG2E
        s = cap * _tanh(s / cap)
    return s


@triton.jit
def cap_slope(s, masking):
    """The derivative of capped() where it gave s."""
    slope = 1.0
    if masking.softcap is not None:
        ratio = s / (masking.softcap * LOG2E)
        slope = 1.0 - ratio * ratio
    return slope


@triton.jit
def _tanh(x):
    """tanh(x), as exact near 0, where what the exponential leaves of 1 is rounded."""
    size = tl.abs(x)
    fade = tl.exp2(size * -2.8853900817779268)
    far = (1.0 - fade) / (1.0 + fade)
    square = x * x
    near = size * (
        1.0 + square * (-0.33333334 + square * (0.13333334 + square * (-0.053968254 + square * 0.021869488)))
    )
    result = tl.where(size < 0.3, near, far)
    return tl.where(x < 0.0, -result, result)
