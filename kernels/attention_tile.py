"""What every attention kernel does with one tile of scores: find its sequence, hide keys, multiply.

Scores are kept in base 2: s = q k^T * scale * log2(e), so that weights are exp2(s - log-sum-exp). A hidden key has the
score -inf and therefore the weight 0; a row that sees no key at all has the log-sum-exp 0, so that its weights are
exp2(-inf) = 0 again when a backward pass computes them anew.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

VARYING = ["stream", "threshold", "causal_offset", "H", "L", "S", "lse_b", "lse_h", "tiles", "planes", "shares"]
"""Parameters that change from batch to batch or layer to layer. Triton would compile a kernel anew whenever one of them
becomes 1 or a multiple of 16, and knowing that makes none of them faster."""


@triton.jit
def sequence(
    b,
    L,
    S,
    key_lengths,  # (B,) int, or None
    query_starts,  # (B + 1,) int, or None: not packed
    key_starts,  # (B + 1,) int, or None
):
    """Of sequence b: its first row among the queries and among the keys (int64), and how many queries, keys and visible
    keys it has."""
    first_query = tl.full((), 0, tl.int64)
    first_key = tl.full((), 0, tl.int64)
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
    return first_query, first_key, queries, keys, visible


@triton.jit
def load_rows(
    x,  # the tile's first row: (ROWS, WIDTH) with unit stride inside a row
    stride,
    count,  # rows from it on that exist
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least WIDTH
    WHOLE: tl.constexpr = False,  # all of them exist
):
    """(ROWS, BLOCK), zero where there is nothing."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at = x + row * stride + column
    if WHOLE and WIDTH == BLOCK:
        tile = tl.load(at)
    elif WHOLE:
        tile = tl.load(at, mask=column < WIDTH, other=0.0)
    elif WIDTH == BLOCK:
        tile = tl.load(at, mask=row < count, other=0.0)
    else:
        tile = tl.load(at, mask=(row < count) & (column < WIDTH), other=0.0)
    return tile


@triton.jit
def store_rows(x, values, stride, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of load_rows; casts to x's dtype."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < count) & (column[None, :] < WIDTH)
    tl.store(x + row[:, None] * stride + column[None, :], values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def product(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """a @ b in float32. UPCAST: the interpreter multiplies bfloat16 wrongly, so there the operands become float32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def hide(
    s,  # scores in base 2
    row,  # the tile's first query
    column,  # the tile's first key
    rows,  # 0, 1, ... and
    columns,  # 0, 1, ..., broadcastable to s in either orientation
    mask,  # of this sequence and head, (L, S) through its strides
    mask_l,
    mask_s,
    queries,
    visible,
    causal_offset,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,  # none, bool (uint8, not zero: may attend) or add
    CHECKED: tl.constexpr,  # whether the tile reaches past the visible keys or the diagonal
    OVERFLOWS: tl.constexpr = False,  # whether a score may be inf, a product out of its dtype's range
):
    """The scores with the mask added and -inf where the query may not attend."""
    if MASK != "none":
        inside = (rows < queries - row) & (columns < visible - column)
        mask += tl.cast(row, tl.int64) * mask_l + tl.cast(column, tl.int64) * mask_s
        at = mask + (rows * mask_l + columns * mask_s)
        if MASK == "bool":
            s = tl.where(tl.load(at, mask=inside, other=1) != 0, s, float("-inf"))
        else:
            added = tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2E
            if OVERFLOWS:
                s = tl.where(added == float("-inf"), added, s + added)  # not inf + -inf
            else:
                s += added
    if CHECKED:
        seen = columns < visible - column
        if CAUSAL:
            seen = seen & (columns + column <= rows + (row + causal_offset))  # 2-D only in the comparison
        s = tl.where(seen, s, float("-inf"))
    return s
