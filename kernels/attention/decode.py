"""Attention of a few queries over a paged KV cache, forward: a decoder step.

    S = cap(Q K^T * scale) - slope * |distance|        O = softmax(S) V,        over the keys of each query's window

The rows of a key head are its queries times their GROUP query heads, so that keys are read once for all of them. A
program owns ROWS of them, loops over key tiles of COLUMNS, looks up each key's page in the block table, and keeps an
online softmax as forward.py does. Keys outside the rows' windows are not read. The cost is reading the cache,
(D + DV) * S elements per key head. If there are too few sequences and heads to fill the chip, several programs split
the keys of a sequence and write float32 partial results, which _merge combines. _append writes new keys and values
beforehand. Invalid pages, table entries and lengths are never followed: no access is out of bounds.
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
"""Keys that are worth a program of their own when a sequence is split."""


class Pages(NamedTuple):
    """Layout of a paged cache."""

    table: Int64Pointer
    """(B, pages per sequence), int32 or int64; None: sequence b is page b."""
    table_stride: Varying
    P: Varying
    """Pages in the cache."""
    PAGE: Varying
    """Keys per page."""


class Scoring(NamedTuple):
    """Window and modifications of the scores; softcap, slopes and sinks as in Masking."""

    left: Varying
    """Visible keys before a query's own position."""
    right: Varying
    """Visible keys after it."""
    softcap: RealOrNone
    slopes: Float32Pointer
    """(B, H), or None."""
    slope_stride: Varying
    """Batch stride of slopes."""
    sinks: Float32Pointer
    """(H,), or None."""


class Parts(NamedTuple):
    """Results of the programs that split a sequence."""

    output: Float32Pointer
    """(shares, B, H, L, DV); None: a single share, which writes the output itself."""
    lse: Float32Pointer
    """(shares, B, H, L): log2 of the sum of the exponentiated scores; None: a single share, not requested."""
    shares: Varying
    B: Varying


@triton.jit
def _load_scattered(x, offsets, inside, WIDTH: tl.constexpr):
    """Load rows of x at the given offsets, (len(offsets), block(WIDTH)); zero where not inside."""
    column = tl.arange(0, steps.block(WIDTH))[None, :]
    known = inside[:, None]
    if steps.block(WIDTH) != WIDTH:
        known = known & (column < WIDTH)
    return tl.load(x + (offsets[:, None] + column), mask=known, other=0.0)


@triton.jit
def _store_scattered(x, values, offsets, inside, WIDTH: tl.constexpr):
    """Store rows where _load_scattered() reads them, cast to the dtype of x."""
    column = tl.arange(0, steps.block(WIDTH))[None, :]
    known = inside[:, None] & (column < WIDTH)
    tl.store(x + (offsets[:, None] + column), values.to(x.dtype.element_ty), mask=known)


@triton.jit
def _places(keys, pages, b, inside):
    """Return page and row of keys of sequence b, and `inside` without keys on invalid pages."""
    page = tl.zeros_like(keys).to(tl.int64) + b
    row = keys
    if pages.table is not None:
        page = tl.load(pages.table + (b * pages.table_stride + keys // pages.PAGE), mask=inside, other=0).to(tl.int64)
        row = keys % pages.PAGE
        inside = inside & (page >= 0) & (page < pages.P)
    return page, row, inside


@jit
def _decode(
    q: Pointer,  # (B, H, L, D), strided; unit stride in D
    k: Pointer,  # (P, H // GROUP, rows per page, D)
    v: Pointer,  # (P, H // GROUP, rows per page, DV)
    out: Pointer,  # (B, H, L, DV) out
    parts: Parts,
    scoring: Scoring,
    bounds: Int64Pointers,  # (B,) keys of each sequence, and (B,) its first visible key or None
    pages: Pages,
    scale: Real,
    sizes: Sizes,  # S: capacity of a sequence in keys
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
    own = query + (length - L)  # position of each query among the keys
    low = tl.maximum(own - scoring.left, start)
    high = tl.minimum(own + scoring.right + 1, length)
    # Queries ascend with the rows: the first one's window begins first, the last one's ends last.
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
    x: Pointer,  # (B, H, L, DV), strided; unit stride in DV
    cache: Pointer,  # (P, H, rows per page, DV) out
    lengths: Int64Pointer,  # (B,) rows of each sequence before the append
    pages: Pages,
    B: Varying,
    sizes: Sizes,  # H: key heads; L: rows to append; S: capacity of a sequence in rows
    strides: Strides,  # of x, cache
    DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write x after the rows of each sequence; rows past the capacity or on invalid pages are dropped."""
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
    out: Pointer,  # (B, H, L, DV) out, strided
    row_lse: Float32Pointer,  # (B, H, L) out: log2 of the sum of the exponentiated scores; None: not requested
    parts: Parts,
    sizes: Sizes,
    strides: Strides,  # of out
    DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Combine the shares: sum of 2^(LSE - max LSE) * O, divided by the sum of the weights."""
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
    """Return the tile of _append and _merge, one row per warp; width: width_class(), at least 64."""
    return Tile(4, width, 4, 1)


def shares_of(chip: Chip, programs: int, keys: int) -> int:
    """Return the programs per sequence: enough for two per processor, at most one per LEAST keys."""
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
        """Return output (B, H, L, DV), contiguous as (B, L, H, DV), allocated if None.

        lengths and starts (B,); lse: buffer (B, H, L) float32 for the natural log-sum-exp, -inf without a key.
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
        """Write x to the rows of each sequence from lengths (B,) on."""
        pages = None if block_table is None else unit(block_table), *self._pages
        self._launch(unit(x), cache, lengths.contiguous(), pages, *self._tail)


def _pages(cache: Tensor, block_table: Tensor | None) -> tuple[Pages, int]:
    """Return the Pages, and the capacity of a sequence in keys."""
    count, _, page = cache.shape[:3]
    if block_table is None:
        return Pages(None, 0, count, page), page
    block_table = unit(block_table)
    return Pages(block_table, block_table.stride(0), count, page), page * block_table.shape[1]


def _class(*widths: int) -> int:
    return width_class(max(64, *widths))
