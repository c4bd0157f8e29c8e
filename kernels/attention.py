"""Attention for long rows, forward: softmax(Q K^T * scale + mask) V without ever writing the scores.

    S = Q K^T * scale + mask           P = softmax(S)           O = dropout(P) V           LSE = log2 sum exp S

A program owns ROWS queries of one head and walks over the keys in tiles of COLUMNS with the softmax kept online
(Milakov and Gimelshein 2018; Dao et al. 2022): a running maximum m and sum l in float32, in base 2,

    m' = max(m, max S)       l' = l * 2^(m - m') + sum 2^(S - m')       acc' = acc * 2^(m - m') + dropout(2^(S - m')) V

Tiles right of the diagonal and tiles past the visible keys are never touched; only the tiles that cross one of these
borders pay for comparisons. 4 * B * H * L * S * D floating-point operations (half of it when causal); reads Q, K, V,
writes O and 4 bytes of log-sum-exp a row. Dropout draws L * S / 8 Philox blocks a head.
Source: Vaswani et al. 2017, equation 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from fasttfm.kernels.attention_launch import (
    Tile,
    compile_case,
    head_constants,
    like_heads,
    prepare,
    product_kinds,
    spills,
    strides,
    unit,
    variant_name,
)
from fasttfm.kernels.attention_tile import LOG2E, VARYING, hide, load_rows, product, sequence, store_rows
from fasttfm.kernels.choices import choice
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import Chip, ceil_div
from fasttfm.kernels.philox import keep_mask


@triton.jit
def _walk(
    acc,
    peak,
    total,
    q,  # (ROWS, BLOCK_D)
    k,  # first key of this sequence and head
    v,
    mask,
    random,  # the seed
    first,
    last,
    first_row,
    plane,
    stream,
    threshold,
    scale,
    causal_offset,
    queries,
    visible,
    k_s,
    v_s,
    mask_l,
    mask_s,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Takes the key tiles from first to last into the running softmax."""
    rows = first_row + tl.arange(0, ROWS)
    for column in range(first, last, COLUMNS):
        here = tl.cast(column, tl.int64)
        keys = load_rows(k + here * k_s, k_s, visible - column, COLUMNS, D, BLOCK_D, not CHECKED)
        s = product(q, tl.trans(keys), PRECISION, UPCAST) * scale  # (ROWS, COLUMNS)
        s = hide(
            s, first_row, column, tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], mask, mask_l, mask_s,
            queries, visible, causal_offset, CAUSAL, MASK, CHECKED,
        )  # fmt: skip
        highest = tl.maximum(peak, tl.max(s, 1))
        base = highest
        if CHECKED or MASK != "none":
            base = tl.where(highest == float("-inf"), 0.0, highest)  # no key seen yet: -inf - -inf would be NaN
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(p, 1)
        peak = highest
        if DROPOUT:
            p = tl.where(keep_mask(random, stream, plane, rows, column, threshold, COLUMNS), p, 0.0)
        values = load_rows(v + here * v_s, v_s, visible - column, COLUMNS, DV, BLOCK_DV, not CHECKED)
        acc = acc * fade[:, None] + product(p.to(values.dtype), values, PRECISION, UPCAST)
    return acc, peak, total


@jit(do_not_specialize=VARYING)
def _forward(
    q,  # (B, H, L, D) through its strides, unit stride in D
    k,  # (B, H, S, D)
    v,  # (B, H, S, DV)
    out,  # (B, H, L, DV) out
    lse,  # (B, H, L) float32 out: log2 of the sum of the exponentiated scores; 0 where no key is seen
    key_lengths,  # (B,) int or None
    query_starts,  # (B + 1,) int or None: q, out, lse hold packed sequences, b's begin at query_starts[b]
    key_starts,  # (B + 1,) int or None, likewise for k and v
    mask,  # (B, H, L, S) through its strides (0 where it is broadcast), or None
    seed,  # (1,) int64 in device memory, so that a captured graph draws anew at each replay; None: no dropout
    stream,
    threshold,
    keep_scale,
    scale,
    causal_offset,
    H,
    L,
    S,
    tiles,  # row tiles a head
    q_b,
    q_h,
    q_l,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    out_b,
    out_h,
    out_l,
    lse_b,
    lse_h,
    mask_b,
    mask_h,
    mask_l,
    mask_s,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    DROPOUT: tl.constexpr = seed is not None
    plane = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest rows first, so that the last programs to run are short
    b = (plane // H).to(tl.int64)
    h = (plane % H).to(tl.int64)
    first_query, first_key, queries, _, visible = sequence(b, L, S, key_lengths, query_starts, key_starts)
    first_row = tile * ROWS
    if first_row >= queries:
        return
    random = 0
    if DROPOUT:
        random = tl.load(seed)
    row = first_query + first_row
    k += b * k_b + h * k_h + first_key * k_s
    v += b * v_b + h * v_h + first_key * v_s
    if MASK != "none":
        mask += b * mask_b + h * mask_h
    x = load_rows(q + b * q_b + h * q_h + row * q_l, q_l, queries - first_row, ROWS, D, BLOCK_D)

    end = visible
    free = visible  # keys below it are seen by every row of the tile
    if CAUSAL:
        end = tl.maximum(tl.minimum(visible, first_row + ROWS + causal_offset), 0)
        free = tl.maximum(tl.minimum(visible, first_row + causal_offset + 1), 0)
    free = free // COLUMNS * COLUMNS
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc, peak, total = _walk(
        acc, peak, total, x, k, v, mask, random, 0, free, first_row, plane, stream, threshold, scale * LOG2E,
        causal_offset, queries, visible, k_s, v_s, mask_l, mask_s,
        D, DV, BLOCK_D, BLOCK_DV, CAUSAL, MASK, DROPOUT, PRECISION, UPCAST, ROWS, COLUMNS, False,
    )  # fmt: skip
    acc, peak, total = _walk(
        acc, peak, total, x, k, v, mask, random, free, end, first_row, plane, stream, threshold, scale * LOG2E,
        causal_offset, queries, visible, k_s, v_s, mask_l, mask_s,
        D, DV, BLOCK_D, BLOCK_DV, CAUSAL, MASK, DROPOUT, PRECISION, UPCAST, ROWS, COLUMNS, True,
    )  # fmt: skip
    empty = total == 0.0
    acc *= (keep_scale / tl.where(empty, 1.0, total))[:, None]
    store_rows(out + b * out_b + h * out_h + row * out_l, acc, out_l, queries - first_row, ROWS, DV, BLOCK_DV)
    rows = tl.arange(0, ROWS)
    logarithm = tl.where(empty, 0.0, peak + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + b * lse_b + h * lse_h + row + rows, logarithm, mask=rows < queries - first_row)


# ------------------------------------------------------------------------------------------------------------ tiles


def _alternatives(chip: Chip, kind: str, width: int, extras: int) -> list[Tile]:
    sizes = ((128, 64, 4), (128, 64, 8), (128, 32, 4), (64, 64, 4), (64, 32, 4), (32, 32, 4))
    return [Tile(rows, columns, warps, stages) for rows, columns, warps in sizes for stages in (2, 3)]


@choice("attention.forward", alternatives=_alternatives)
def forward_tile(chip: Chip, kind: str, width: int, extras: int) -> Tile:
    """kind as launch.product_kind() names it; width 64, 128 or 256: the larger head size, at most; extras: how
    many of mask and dropout there are.

    Chosen so that nothing spills (dropout's random numbers take as many registers as the scores) and, below sm_80, that
    queries, a tile of keys and one of values fit 48 KB.
    """
    if not chip.matrix_units or kind == "fp32":
        if width == 64 and chip.capability > 80:
            # Of 32x32 the compiler spills a little there, on purpose, so that more programs run at a time.
            return Tile(32, 16, 8, 1) if chip.capability == 120 else Tile(16, 32, 4, 1)
        return {64: Tile(32, 32, 8, 1), 128: Tile(16, 32, 8, 1), 256: Tile(16, 16, 8, 1)}[width]
    if not chip.capability:
        return {64: Tile(64, 32, 4, 1), 128: Tile(64, 32, 4, 1), 256: Tile(32, 32, 4, 1)}[width]
    if kind == "tf32":
        return {64: Tile(64, 32, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(32, 32, 8, 1)}[width]
    warpgroups = chip.capability in (90, 100)  # their matrix instructions read operands from shared memory
    stages = 3 if chip.shared_memory > 120_000 else 2
    if extras:
        columns = 64 if warpgroups and not (extras == 2 and chip.capability == 90) else 32  # 64 spill there
        narrow = 8 if extras == 2 and chip.capability in (86, 89, 120) else 4  # four warps spill there
        wide = 8 if chip.capability == 120 else narrow
        return {64: Tile(64, columns, narrow, stages), 128: Tile(64, 32, wide, stages), 256: Tile(32, 32, 8, 2)}[width]
    rows = 128 if warpgroups else 64
    narrow = Tile(64, 32, 4, 2) if chip.capability == 120 else Tile(128, 64, 4, stages)
    return {64: narrow, 128: Tile(rows, 64, 8, stages), 256: Tile(64, 32, 8, 2)}[width]


# --------------------------------------------------------------------------------------------------------- launches


def forward(query, key, value, *, out=None, tile=None, **options):
    """query (B, H, L, D), key (B, H, S, D), value (B, H, S, DV); options as attention_launch.prepare() takes them.

    Returns the output (B, H, L, DV) and the log-sum-exp (B, H, L) float32 in base 2; out: memory for them.
    """
    query, key, value = unit(query), unit(key), unit(value)
    call = prepare(query, key, value, **options)
    output, lse = out or outputs(query, value.shape[-1])
    if call.planes and call.queries:
        tile = tile or forward_tile(*call.size_class)
        tiles = ceil_div(call.queries, tile.rows)
        _forward[(tiles * call.planes,)](
            query, key, value, output, lse, *call.arguments, tiles,
            *strides(query, key, value, output), *lse.stride()[:2], *call.mask_strides,
            **call.constants, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return output, lse


def outputs(query, value_width):
    """Memory for the output and the log-sum-exp."""
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    return like_heads(query, value_width), lse


# ---------------------------------------------------------------------------------------------------- compile cases

WIDTHS = (64, 128, 256)
"""Head sizes that tiles are chosen for. Narrower heads take the tile of 64 and need less of everything."""


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in the heaviest variant that takes it; the usual ones, and float16, at one size."""
    yield from long_cases(chip, _forward, "attention.forward", forward_tile)


def long_cases(chip: Chip, kernel, name: str, tile) -> Iterator[CompileCase]:
    """The cases of a kernel for long rows, whose tile() takes what forward_tile() takes."""

    def case(kind, width, *, dropout=True, mask="add", D=None):
        to = tile(chip, kind, width, dropout + (mask != "none"))
        full = f"{name}/{variant_name(dropout=dropout, mask=mask)}/D{D or width}"
        return compile_case(kernel, full, kind, to, head_constants(D or width), dropout=dropout, mask=mask)

    for width in WIDTHS:
        for kind in product_kinds(chip):
            if spills(chip, kind, width):
                continue  # the route takes another way
            yield case(kind, width)
            if (kind, width) != ("bf16", 64) and tile(chip, kind, width, 1) != tile(chip, kind, width, 2):
                yield case(kind, width, mask="none")
        yield case("bf16", width, dropout=False, mask="none")
    yield case("fp16", 64)
    yield case("bf16", 64, mask="none")
    yield case("bf16", 64, mask="bool")
    yield case("bf16", 64, D=32)
