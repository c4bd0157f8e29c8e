"""Building blocks of the attention kernels: locate the head, load and store rows, multiply, mask keys.

Scores are in base 2, s = q k^T * scale * log2(e); unscaled() may defer the scale to the exponent. Weights are
exp2(s - lse). A hidden key has score -inf and weight 0. A row without a visible key has lse 0, so that backward
recomputes its weights as exp2(-inf) = 0.

Parameters shared by the kernels of this folder:

    q, dq           (B, H, L, D); this and the tensors below need unit stride in the last dimension only
    k, dk           (B, H // GROUP, S, D); GROUP query heads share a key head
    v, dv           (B, H // GROUP, S, DV)
    out, dout       (B, H, L, DV)
    lse             (B, H, L), log2 of the sum of a row's exponentiated scores; 0 without a visible key
    delta           (B, H, L), rowsum(dout * out)
    strides         launch.strides() of the parameters annotated Pointer, in order: batch, head, row
    lse_strides     (batch, head) of lse and delta, contiguous in L
    PRECISION       tf32, ieee or upcast, as in product()
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fasttfm.kernels.attention.problem import Head, Masking, Rows, Sizes
from fasttfm.kernels.philox import on_cuda, spread, spread_columns

LOG2E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(1 << 29)
"""Bound on the parts of a causal offset, so that their sum and a row fit 32 bits."""


@triton.constexpr_function
def block(width):
    """Return the padded head dim: the smallest power of two >= width, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


@triton.jit
def head_of(batch, head, sizes, spans):
    """Return the Head of a batch row and a head index."""
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
    """Return the Head of plane b * H + h."""
    return head_of(plane // sizes.H, plane % sizes.H, sizes, spans)


@triton.jit
def keys_of(head, GROUP: tl.constexpr):
    """Return the Head of the keys that a query head reads."""
    return Head(
        head.plane // GROUP, head.b, head.h // GROUP, head.first_query, head.first_key, head.queries, head.keys,
        head.visible,
    )  # fmt: skip


@triton.jit
def sizes_of_keys(sizes, GROUP: tl.constexpr):
    """Return Sizes that count key heads instead of query heads."""
    return Sizes(sizes.H // GROUP, sizes.L, sizes.S)


@triton.jit
def member_of(head, member, GROUP: tl.constexpr):
    """Return the Head of a member of the GROUP query heads that share a key head."""
    return Head(
        head.plane * GROUP + member, head.b, head.h * GROUP + member, head.first_query, head.first_key, head.queries,
        head.keys, head.visible,
    )  # fmt: skip


@triton.jit
def locate_queries(problem, CAUSAL: tl.constexpr, ROWS: tl.constexpr):
    """Return the Head of this program and its first row, which may be past the queries of the sequence."""
    tiles = (problem.sizes.L + ROWS - 1) // ROWS
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # longest rows first: the last programs to run are short
    return locate(tl.program_id(0) // tiles, problem.sizes, problem.spans), tile * ROWS


@triton.jit
def row_stride(strides):
    """Return the row stride from one of launch.strides(), int64 if offsets within a tile exceed 32 bits."""
    stride = strides[2]
    if len(strides) == 4:
        stride = tl.cast(stride, tl.int64)
    return stride


@triton.jit
def row_at(strides, batch, head, row):
    """Return the offset of a row of a head; strides: one of launch.strides()."""
    return batch * strides[0] + head * strides[1] + row * row_stride(strides)


@triton.jit
def rows_of(x, strides, head, first):
    """Return the head's Rows of x from row `first` on, counted from the start of the tensor, not of the sequence."""
    # A single offset: for x + a + b the compiler keeps a pointer and an offset in registers.
    return Rows(x + row_at(strides, head.b, head.h, first), row_stride(strides))


@triton.jit
def line_of(strides, head, first):
    """Return the offset of the head's row `first` in a tensor (B, H, rows), contiguous along the rows."""
    return head.b * strides[0] + head.h * strides[1] + first


@triton.jit
def offset_of(masking, head):
    """Return the causal offset of the head's batch row."""
    offset = masking.causal_offset
    if masking.offsets is not None:
        offset += tl.minimum(tl.maximum(tl.load(masking.offsets + head.b), -FAR), FAR).to(tl.int32)
    return offset


@triton.jit
def sink_scores(x):
    """Return sinks in base 2, clamped: 1e30 takes all weight as inf does, and inf - inf would be NaN."""
    return tl.where(x > 1e30, 1e30, x) * LOG2E


@triton.jit
def masking_of(masking, head):
    """Return the Masking of a head."""
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
        mask, offset_of(masking, head), masking.mask_strides, None, masking.window, masking.softcap, slopes,
        masking.slope_stride, masking.past, sinks,
    )  # fmt: skip


@triton.jit
def load(x, first, end, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Load a tile (ROWS, block(WIDTH)) of the Rows x from row `first` on; zero from row `end` and column WIDTH on."""
    offset = tl.cast(first, tl.int64)
    count = end - first
    return _load(x.first + offset * x.stride, x.stride, count, tl.arange(0, ROWS), WIDTH, False)


@triton.jit
def load_keys(x, first, end, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr = False):
    """Load a tile like load(), rows in the order of spread(); WHOLE: all rows of the tile are below `end`."""
    return _load(x.first + tl.cast(first, tl.int64) * x.stride, x.stride, end - first, spread(COLUMNS), WIDTH, WHOLE)


@triton.jit
def load_tile(x, strides, head, row, count, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Load a tile of `count` rows of the head, zero past them; row as for rows_of()."""
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
    """Store a tile where load() reads it, cast to the dtype of x."""
    start = x.first + tl.cast(first, tl.int64) * x.stride
    count = end - first
    row = tl.arange(0, ROWS)
    column = tl.arange(0, block(WIDTH))
    inside = (row[:, None] < count) & (column[None, :] < WIDTH)
    tl.store(start + row[:, None] * x.stride + column[None, :], values.to(x.first.dtype.element_ty), mask=inside)


@triton.jit
def store_tile(x, values, strides, head, row, count, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Store a tile where load_tile() reads it."""
    store(rows_of(x, strides, head, row), 0, values, count, ROWS, WIDTH)


@triton.jit
def key_range(
    visible, first_row, causal_offset, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Return the end of the keys that some row of a query tile sees, and of the full key tiles that every row sees."""
    end = visible
    free = visible
    if CAUSAL:
        end = tl.maximum(tl.minimum(visible, first_row + ROWS + causal_offset), 0)
        free = tl.maximum(tl.minimum(visible, first_row + causal_offset + 1), 0)
    return end, free // COLUMNS * COLUMNS


@triton.jit
def window_range(first_row, masking, free, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the start of the key tiles that some row of a query tile sees under a window, and of those that every row
    sees. free: the end of the latter, from key_range()."""
    border = first_row + masking.causal_offset - masking.window
    start = tl.maximum(border, 0) // COLUMNS * COLUMNS
    whole = (tl.maximum(border + ROWS - 1, 0) + COLUMNS - 1) // COLUMNS * COLUMNS
    return start, tl.minimum(whole, tl.maximum(free, start))


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Return a @ b in float32. upcast: float32 operands, because the interpreter multiplies bfloat16 wrongly."""
    if PRECISION == "upcast":
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        c = tl.dot(a, b, input_precision=PRECISION)
    return c


def matrix_units(dtype: Any, precision: Any, _semantic: Any = None) -> tl.constexpr:
    """Return whether matrix units compute products of these operands; True in the interpreter for half precision."""
    options = None if _semantic is None else _semantic.builder.options
    old = options is not None and options.backend_name == "cuda" and int(options.arch.removeprefix("sm")) < 80
    full = tl.constexpr(dtype).value == tl.float32 and tl.constexpr(precision).value != "tf32"
    return tl.constexpr(not (old or full))


matrix_units.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def load_mask(
    masking, row, column, queries, visible, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHECKED: tl.constexpr,
    ORDER: tl.constexpr = "spread", WIDE: tl.constexpr = True,
):  # fmt: skip
    """Return the mask of a tile for hide(), or None.

    To be called before a product by matrix_units(): else the compiler computes the softmax twice, in the layout of the
    product and in that of the mask. WIDE: keys in the order of spread() are read in their own order, several at once.
    """
    tile = None
    if masking.mask is not None:
        row_step, column_step = masking.mask_strides[2], masking.mask_strides[3]
        if len(masking.mask_strides) == 5:
            row_step, column_step = tl.cast(row_step, tl.int64), tl.cast(column_step, tl.int64)
        if ORDER == "transposed":
            rows = tl.arange(0, ROWS)[None, :]
            columns = tl.arange(0, COLUMNS)[:, None]
        else:
            rows = tl.arange(0, ROWS)[:, None]
            columns = (spread(COLUMNS) if ORDER == "spread" and not WIDE else tl.arange(0, COLUMNS))[None, :]
        inside = rows < queries - row
        if CHECKED:
            inside = inside & (columns < visible - column)
        start = masking.mask + (tl.cast(row, tl.int64) * row_step + tl.cast(column, tl.int64) * column_step)
        tile = tl.load(start + (rows * row_step + columns * column_step), mask=inside, other=1)
        if ORDER == "spread" and WIDE:
            tile = spread_columns(tile)
    return tile


@triton.jit
def hide(
    s, mask, row, column, masking, queries, visible, CAUSAL: tl.constexpr, CHECKED: tl.constexpr,
    ORDER: tl.constexpr = "spread",
):  # fmt: skip
    """Add ALiBi and mask to scores s in base 2, and set -inf where the query may not attend.

    s (ROWS, COLUMNS): scores of queries from `row` and keys from `column` on. mask: from load_mask(); an additive one
    hides a key where it is -inf in base 2, that is below reference.LOWEST. masking: of one head. ORDER of the keys:
    spread (that of spread()), plain (consecutive), or transposed (consecutive, s (COLUMNS, ROWS)). CHECKED: the tile
    may reach past the visible keys, the diagonal or the window.
    """
    if ORDER == "transposed":
        rows = tl.arange(0, s.shape[1])[None, :]
        columns = tl.arange(0, s.shape[0])[:, None]
    else:
        rows = tl.arange(0, s.shape[0])[:, None]
        columns = (spread(s.shape[1]) if ORDER == "spread" else tl.arange(0, s.shape[1]))[None, :]
    if masking.slopes is not None:
        # in float32, as converting an integer takes as long as an exponential; exact up to 2^24 keys
        start = (row - column + masking.causal_offset - masking.past).to(tl.float32)
        s -= tl.abs(rows.to(tl.float32) + start - columns.to(tl.float32)) * masking.slopes
    if mask is not None:
        if mask.dtype == tl.uint8:
            if s.shape[0] == 16 or s.shape[1] == 16:
                # Triton up to 3.7 gives a product of depth 16 that depends on a byte load and a tl.join (dropout's) a
                # layout for depth 32, and multiplies wrongly (triton#11691). A no-op reduction hides the byte load.
                mask = tl.max(tl.expand_dims(mask, 2), 2)
            s = tl.where(mask != 0, s, float("-inf"))
        else:
            s += mask.to(tl.float32) * LOG2E
    if CHECKED:
        # One comparison per element: both borders become one bound per query, or per key if transposed.
        offset = row - column + masking.causal_offset  # query i of the tile sees its keys up to i + offset
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
    """Return scores for hide(), and the factor to apply after it: scaling and subtracting the maximum are then one FMA.
    If anything is to be added to the scores, they are scaled here, and the factor is 1."""
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
    """Return scores in base 2 after the soft cap: c * tanh(s / c); near 0, where c - 2 c / (1 + exp2()) cancels, by a
    polynomial."""
    if masking.softcap is not None:
        cap = masking.softcap * LOG2E
        x = s * (1.0 / cap)
        far = cap - 2.0 * cap * _reciprocal(1.0 + tl.exp2(x * 2.8853900817779268))
        square = x * x
        near = 1.0 + square * (-0.33333334 + square * (0.13333334 + square * (-0.053968254 + square * 0.021869488)))
        s = tl.where(square < 0.09, s * near, far)
    return s


@triton.jit
def cap_slope(s, masking):
    """Return the derivative of capped() where its result is s."""
    slope = 1.0
    if masking.softcap is not None:
        ratio = s * (1.0 / (masking.softcap * LOG2E))
        slope = 1.0 - ratio * ratio
    return slope


@triton.jit
def _reciprocal(x):
    """Return 1 / x for x >= 1; on NVIDIA chips one instruction, within one unit in the last place."""
    if on_cuda():
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1.0 / x
    return inverse
