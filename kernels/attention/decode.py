"""Attention of a few queries over a paged KV cache, forward: a decoder step.

    S = cap(Q K^T * scale) - slope * |distance|        O = softmax(S) V,        over the keys of each query's window

A program owns ROWS of the rows that read one key head of one sequence: the GROUP query heads of each query, stacked, so
that keys are read once for all of them. It walks over the keys in tiles of COLUMNS, looks up each key's page in the
block table, and keeps an online softmax as forward.py does. Keys outside of the rows' windows are not read. The cost is
reading the cache, (D + DV) * S elements per key head. Where sequences and heads are too few to fill the chip, programs
split the keys of a sequence, write float32 partial results, and _merge adds these up. _append writes new keys and
values beforehand. Invalid pages, table entries or lengths are never followed: no access is out of bounds.
Sources: Kwon et al. 2023, section 4 (pages); Dao et al. 2023, "Flash-Decoding" (shares); Press et al. 2022 (slopes).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.attention import steps
from fasttfm.kernels.attention.launch import like_heads, stages_for, strides, unit, width_class
from fasttfm.kernels.attention.problem import Sizes
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import ceil_div, chip, precision, product_kind
from fasttfm.kernels.parameter import (
    Float32Pointer,
    Int64Pointer,
    Int64Pointers,
    Pointer,
    Real,
    RealOrNone,
    Strides,
    Varying,
)
from fasttfm.kernels.tiles.attention import DECODE, Tile

LEAST = 256
"""Fewest keys for which a program of its own pays."""


class Pages(NamedTuple):
    """Pages of the keys of each sequence."""

    table: Int64Pointer
    """(B, pages of a sequence), int32 or int64; None: of sequence b in page b."""
    table_stride: Varying
    P: Varying
    """Pages of the cache."""
    PAGE: Varying
    """Keys of a page."""


class Scoring(NamedTuple):
    """Keys that a query sees, and what becomes of its scores, as Masking has it."""

    left: Varying
    """Keys before a query's own."""
    right: Varying
    """Keys after it."""
    softcap: RealOrNone
    slopes: Float32Pointer
    """(B, H), or None."""
    slope_stride: Varying
    """From one b to the next."""
    sinks: Float32Pointer
    """(H,), or None."""


class Parts(NamedTuple):
    """The results of programs that share a sequence."""

    output: Float32Pointer
    """(shares, B, H, L, DV); None: there is one share, which writes the output itself."""
    lse: Float32Pointer
    """(shares, B, H, L): log2 of the sum of the exponentiated scores; None: there is one share, and nobody asks."""
    shares: Varying
    B: Varying


@triton.jit
def _load_scattered(x, offsets, inside, WIDTH: tl.constexpr):
    """(len(offsets), block(WIDTH)): the rows of x that begin at the offsets, zero where not inside."""
    column = tl.arange(0, steps.block(WIDTH))[None, :]
    known = inside[:, None]
    if steps.block(WIDTH) != WIDTH:
        known = known & (column < WIDTH)
    return tl.load(x + (offsets[:, None] + column), mask=known, other=0.0)


@triton.jit
def _store_scattered(x, values, offsets, inside, WIDTH: tl.constexpr):
    """The inverse of _load_scattered(); casts to x's dtype."""
    column = tl.arange(0, steps.block(WIDTH))[None, :]
    known = inside[:, None] & (column < WIDTH)
    tl.store(x + (offsets[:, None] + column), values.to(x.dtype.element_ty), mask=known)


@triton.jit
def _places(keys, pages, b, inside):
    """Page and row of keys of sequence b, and which of those inside there are."""
    page = tl.zeros_like(keys).to(tl.int64) + b
    row = keys
    if pages.table is not None:
        page = tl.load(pages.table + (b * pages.table_stride + keys // pages.PAGE), mask=inside, other=0).to(tl.int64)
        row = keys % pages.PAGE
        inside = inside & (page >= 0) & (page < pages.P)
    return page, row, inside


@jit
def _decode(
    q: Pointer,  # (B, H, L, D) through its strides, unit stride in D
    k: Pointer,  # (P, H // GROUP, rows of a page, D)
    v: Pointer,  # (P, H // GROUP, rows of a page, DV)
    out: Pointer,  # (B, H, L, DV) out
    parts: Parts,
    scoring: Scoring,
    bounds: Int64Pointers,  # (B,) the keys of each sequence, and where they begin or None
    pages: Pages,
    scale: Real,
    sizes: Sizes,  # S: the most keys that there is room for
    strides: Strides,  # of q, k, v, out: batch or page, head, row
    D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    H, L, S = sizes
    q_strides, k_strides, v_strides, out_strides = strides
    tiles = (L * GROUP + ROWS - 1) // ROWS
    share = tl.program_id(0) % parts.shares
    first = tl.program_id(0) // parts.shares % tiles * ROWS
    plane = tl.program_id(0) // parts.shares // tiles
    b = tl.cast(plane // (H // GROUP), tl.int64)
    key_head = tl.cast(plane % (H // GROUP), tl.int64)
    length = tl.maximum(tl.minimum(tl.load(bounds[0] + b), S), 0).to(tl.int32)
    start = 0
    if bounds[1] is not None:
        start = tl.maximum(tl.minimum(tl.load(bounds[1] + b), S), 0).to(tl.int32)

    rows = first + tl.arange(0, ROWS)
    exists = rows < L * GROUP
    query = rows // GROUP
    head = key_head * GROUP + rows % GROUP
    own = query + (length - L)  # the key at which each query stands
    low = tl.maximum(own - scoring.left, start)
    high = tl.minimum(own + scoring.right + 1, length)
    # Of queries that rise from row to row, the first one's window begins first and the last one's ends last.
    begin = tl.maximum(first // GROUP + length - L - scoring.left, start) // COLUMNS * COLUMNS
    end = tl.minimum((first + ROWS - 1) // GROUP + length - L + scoring.right + 1, length)
    reach = tl.maximum((end - begin + COLUMNS - 1) // COLUMNS + parts.shares - 1, 0) // parts.shares * COLUMNS
    begin += share * reach
    end = tl.minimum(end, begin + reach)

    q_tile = _load_scattered(q, steps.row_at(q_strides, b, head, query), exists, D)
    scale *= steps.LOG2E
    if scoring.slopes is not None:
        slope = tl.load(scoring.slopes + b * scoring.slope_stride + head, mask=exists, other=0.0) * steps.LOG2E
    acc = tl.zeros((ROWS, steps.block(DV)), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if scoring.sinks is not None:
        peak = steps.sink_scores(tl.load(scoring.sinks + head, mask=exists & (share == 0), other=float("-inf")))
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
    for column in range(begin, end, COLUMNS):
        keys = column + tl.arange(0, COLUMNS)
        page, row, inside = _places(keys, pages, b, keys < end)
        k_tile = _load_scattered(k, steps.row_at(k_strides, page, key_head, row), inside, D)
        s = steps.capped(steps.product(q_tile, tl.trans(k_tile), PRECISION) * scale, scoring)  # (ROWS, COLUMNS)
        if scoring.slopes is not None:
            s -= slope[:, None] * tl.abs(keys[None, :] - own[:, None]).to(tl.float32)
        seen = inside[None, :] & (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        s = tl.where(seen, s, float("-inf"))
        highest = tl.maximum(peak, tl.max(s, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)  # no key seen yet: -inf - -inf would be NaN
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(p, 1)
        peak = highest
        v_tile = _load_scattered(v, steps.row_at(v_strides, page, key_head, row), inside, DV)
        acc = acc * fade[:, None] + steps.product(p.to(v_tile.dtype), v_tile, PRECISION)
    acc *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    line = ((tl.cast(share, tl.int64) * parts.B + b) * H + head) * L + query
    if parts.output is None:
        _store_scattered(out, acc, steps.row_at(out_strides, b, head, query), exists, DV)
    else:
        _store_scattered(parts.output, acc, line * DV, exists, DV)
    if parts.lse is not None:
        tl.store(parts.lse + line, peak + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=exists)


@jit
def _append(
    x: Pointer,  # (B, H, L, DV) through its strides, unit stride in DV
    cache: Pointer,  # (P, H, rows of a page, DV) out
    lengths: Int64Pointer,  # (B,) the rows of each sequence before
    pages: Pages,
    B: Varying,
    sizes: Sizes,  # H: heads of keys; L: rows to append; S: the most rows that there is room for
    strides: Strides,  # of x, cache
    DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes x behind the rows of its sequences; what there is no room or page for is left out."""
    H, L, S = sizes
    line = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    b = line // L // H
    head = line // L % H
    inside = b < B
    place = tl.load(lengths + b, mask=inside, other=0).to(tl.int64) + line % L
    page, row, inside = _places(place, pages, b, inside & (place >= 0) & (place < S))
    column = tl.arange(0, COLUMNS)[None, :]
    known = inside[:, None] & (column < DV)
    source = steps.row_at(strides[0], b, head, line % L)
    target = steps.row_at(strides[1], page, head, row)
    tl.store(cache + (target[:, None] + column), tl.load(x + (source[:, None] + column), mask=known), mask=known)


@jit
def _merge(
    out: Pointer,  # (B, H, L, DV) through its strides, out
    row_lse: Float32Pointer,  # (B, H, L) out: log2 of the sum of the exponentiated scores; None: not asked for
    parts: Parts,
    sizes: Sizes,
    strides: Strides,  # of out
    DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum over shares of 2^(LSE - max LSE) O, divided by the sum of the weights."""
    H, L, _ = sizes
    count = tl.cast(parts.B, tl.int64) * H * L
    line = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = line < count
    column = tl.arange(0, COLUMNS)[None, :]
    inside = exists[:, None] & (column < DV)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for share in range(parts.shares):
        place = share * count + line
        lse = tl.load(parts.lse + place, mask=exists, other=float("-inf"))
        highest = tl.maximum(peak, lse)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(lse - base)
        fade = tl.exp2(peak - base)
        part = tl.load(parts.output + (place[:, None] * DV + column), mask=inside, other=0.0)
        acc = acc * fade[:, None] + part * weight[:, None]
        total = total * fade + weight
        peak = highest
    acc *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    offsets = steps.row_at(strides, line // L // H, line // L % H, line % L)
    tl.store(out + (offsets[:, None] + column), acc.to(out.dtype.element_ty), mask=inside)
    if row_lse is not None:
        tl.store(row_lse + line, peak + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=exists)


def rows_tile(width: int) -> Tile:
    """The tile of _append and _merge, one row per warp; width: width_class(), at least 64."""
    return Tile(4, width, 4, 1)


def shares_of(chip: Chip, programs: int, keys: int) -> int:
    """Programs per sequence: enough to fill the chip twice, each with at least LEAST keys."""
    return max(1, min(2 * chip.processors // max(1, programs), ceil_div(keys, LEAST)))


class Decode:
    """Attention over cached keys for one signature."""

    def __init__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor | None, *, left: int | None,
        right: int | None, softcap: float = 0.0, slopes: Tensor | None = None, sinks: Tensor | None = None,
        scale: float, tile: Tile | None = None, shares: int | None = None,
    ) -> None:  # fmt: skip
        """query (B, H, L, D), key_cache (P, Hk, rows, D), value_cache (P, Hk, rows, DV), H a multiple of Hk;
        block_table (B, pages per sequence); left, right: window in keys, None for unlimited; slopes (B, H) or (1, H)
        float32, sinks (H,)."""
        tensors = query, key_cache, value_cache
        self._copied = any(x.stride(-1) != 1 for x in tensors)
        query, key_cache, value_cache = map(unit, tensors)
        batch, heads, queries, width = query.shape
        key_heads, value_width = value_cache.shape[1::2]
        output = like_heads(query, value_width)
        self._shape, self._layout, self._lines = output.shape, output.stride(), (batch, heads, queries)
        device = chip(query.device)
        kind = product_kind(query.dtype, device)
        group = heads // max(1, key_heads)
        tile = tile or DECODE(device, kind, _class(width, value_width), 16 if queries * group <= 16 else 32)
        pages, room = _pages(key_cache, block_table)
        programs = ceil_div(queries * group, tile.rows) * batch * key_heads
        self._shares = shares = shares or shares_of(device, programs, room)
        self._pages, self._sizes, self._batch, self._scale = tuple(pages)[1:], (heads, queries, room), batch, scale
        reach = room + queries
        borders = (reach if side is None else min(side, reach) for side in (left, right))
        slope_stride = 0 if slopes is None or len(slopes) == 1 else heads
        self._scoring, self._slope_stride = (*borders, softcap or None), slope_stride
        self._strides = strides(query, key_cache, value_cache, output, rows=max(queries, key_cache.shape[2]))
        constants = {"D": width, "DV": value_width, "PRECISION": precision(kind), "GROUP": group}
        constants |= tile.options(stages_for(device, tile, key_cache, value_cache))
        self._launch, self._merge = Launch(_decode, (programs * shares,), constants), None
        if shares > 1:
            tile = rows_tile(_class(value_width))
            grid = (ceil_div(batch * heads * queries, tile.rows),)
            self._merge = Launch(_merge, grid, {"DV": value_width, **tile.options()})

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, starts: Tensor | None,
        block_table: Tensor | None, slopes: Tensor | None = None, sinks: Tensor | None = None,
        lse: Tensor | None = None, *, output: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns output (B, H, L, DV), contiguous as (B, L, H, DV), allocated if None.

        lengths and starts (B,); lse: memory (B, H, L) float32 for the log-sum-exp of the scores, -inf without a key.
        """
        if output is None:
            output = query.new_empty_strided(self._shape, self._layout)
        if self._copied:
            query, key_cache, value_cache = map(unit, (query, key_cache, value_cache))
        parts: tuple = (None, lse, 1, self._batch)
        if self._merge is not None:
            memory = output.new_empty((self._shares, *self._shape), dtype=torch.float32)
            parts = memory, memory.new_empty((self._shares, *self._lines)), self._shares, self._batch
        scoring = (
            *self._scoring, None if slopes is None else slopes.contiguous(), self._slope_stride,
            None if sinks is None else sinks.float().contiguous(),
        )  # fmt: skip
        spans = lengths.contiguous(), None if starts is None else starts.contiguous()
        pages = None if block_table is None else unit(block_table), *self._pages
        self._launch(
            query, key_cache, value_cache, output, parts, scoring, spans, pages, self._scale, self._sizes, self._strides
        )
        if self._merge is not None:
            self._merge(output, lse, parts, self._sizes, self._layout[:3])
        if lse is not None:
            lse *= math.log(2.0)
        return output


class Append:
    """Appends new keys or values to a cache, for one signature."""

    def __init__(self, cache: Tensor, x: Tensor, block_table: Tensor | None) -> None:
        """x (B, Hk, N, D), cache (P, Hk, rows, D); block_table as for Decode."""
        x = unit(x)
        batch, heads, new, width = x.shape
        tile = rows_tile(_class(width))
        pages, room = _pages(cache, block_table)
        constants = {"DV": width, **tile.options()}
        self._launch = Launch(_append, (ceil_div(batch * heads * new, tile.rows),), constants)
        self._pages, self._tail = tuple(pages)[1:], (batch, (heads, new, room), strides(x, cache))

    def __call__(self, cache: Tensor, x: Tensor, lengths: Tensor, block_table: Tensor | None) -> None:
        """Writes x to the rows of each sequence from lengths (B,) on."""
        pages = None if block_table is None else unit(block_table), *self._pages
        self._launch(unit(x), cache, lengths.contiguous(), pages, *self._tail)


def _pages(cache: Tensor, block_table: Tensor | None) -> tuple[Pages, int]:
    """The Pages, and the capacity of a sequence in keys."""
    count, _, page = cache.shape[:3]
    if block_table is None:
        return Pages(None, 0, count, page), page
    block_table = unit(block_table)
    return Pages(block_table, block_table.stride(0), count, page), page * block_table.shape[1]


def _class(*widths: int) -> int:
    return width_class(max(64, *widths))
