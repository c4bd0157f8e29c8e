"""Attention for long rows, backward: two launches, no atomics, nothing of size L * S.

    P = 2^(S - LSE)        delta = rowsum(dO * O)        dP = dropout'(dO V^T)        dS = P * (dP - delta)
    dV = dropout(P)^T dO             dQ = dS K * scale             dK = dS^T Q * scale

The scores are computed anew in both launches (Dao et al. 2022). The first owns tiles of queries: it forms delta, which
the second needs, and dQ. The second owns tiles of keys and forms dK and dV with transposed scores, so that P^T and dS^T
are the left operands of their products as they come. 14 * B * H * L * S * D floating-point operations in all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from fasttfm.kernels.attention import long_cases
from fasttfm.kernels.attention_launch import Tile, like_heads, prepare, strides, unit
from fasttfm.kernels.attention_tile import LOG2E, VARYING, hide, load_rows, product, sequence, store_rows
from fasttfm.kernels.choices import choice
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import Chip, ceil_div
from fasttfm.kernels.philox import keep_mask


@triton.jit
def _walk_keys(
    acc,  # (ROWS, BLOCK_D), dQ so far
    q,  # (ROWS, BLOCK_D)
    dout,  # (ROWS, BLOCK_DV)
    lse,  # (ROWS,)
    delta,  # (ROWS,)
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
    keep_scale,
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
    """Adds what the key tiles from first to last give to dQ."""
    rows = first_row + tl.arange(0, ROWS)
    for column in range(first, last, COLUMNS):
        here = tl.cast(column, tl.int64)
        keys = load_rows(k + here * k_s, k_s, visible - column, COLUMNS, D, BLOCK_D, not CHECKED)
        s = product(q, tl.trans(keys), PRECISION, UPCAST) * scale  # (ROWS, COLUMNS)
        s = hide(
            s, first_row, column, tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], mask, mask_l, mask_s,
            queries, visible, causal_offset, CAUSAL, MASK, CHECKED,
        )  # fmt: skip
        p = tl.exp2(s - lse[:, None])
        values = load_rows(v + here * v_s, v_s, visible - column, COLUMNS, DV, BLOCK_DV, not CHECKED)
        dp = product(dout, tl.trans(values), PRECISION, UPCAST)
        if DROPOUT:
            keep = keep_mask(random, stream, plane, rows, column, threshold, COLUMNS)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        acc += product(ds.to(keys.dtype), keys, PRECISION, UPCAST)
    return acc


@jit(do_not_specialize=VARYING)
def _backward_queries(
    q,  # (B, H, L, D) through its strides, unit stride in D
    k,  # (B, H, S, D)
    v,  # (B, H, S, DV)
    out,  # (B, H, L, DV)
    dout,  # (B, H, L, DV)
    lse,  # (B, H, L) float32, of the forward pass
    delta,  # (B, H, L) float32 out
    dq,  # (B, H, L, D) out
    key_lengths,  # (B,) int or None
    query_starts,  # (B + 1,) int or None: packed, see attention.py
    key_starts,  # (B + 1,) int or None
    mask,  # (B, H, L, S) through its strides, or None
    seed,  # (1,) int64, or None: no dropout
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
    dout_b,
    dout_h,
    dout_l,
    dq_b,
    dq_h,
    dq_l,
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
        tile = tiles - 1 - tile  # the longest rows first
    b = (plane // H).to(tl.int64)
    h = (plane % H).to(tl.int64)
    first_query, first_key, queries, _, visible = sequence(b, L, S, key_lengths, query_starts, key_starts)
    first_row = tile * ROWS
    if first_row >= queries:
        return
    random = 0
    if DROPOUT:
        random = tl.load(seed)
    count = queries - first_row
    row = first_query + first_row
    k += b * k_b + h * k_h + first_key * k_s
    v += b * v_b + h * v_h + first_key * v_s
    if MASK != "none":
        mask += b * mask_b + h * mask_h
    x = load_rows(q + b * q_b + h * q_h + row * q_l, q_l, count, ROWS, D, BLOCK_D)
    o = load_rows(out + b * out_b + h * out_h + row * out_l, out_l, count, ROWS, DV, BLOCK_DV)
    do = load_rows(dout + b * dout_b + h * dout_h + row * dout_l, dout_l, count, ROWS, DV, BLOCK_DV)
    line = b * lse_b + h * lse_h + row + tl.arange(0, ROWS)
    inside = tl.arange(0, ROWS) < count
    logarithm = tl.load(lse + line, mask=inside, other=float("inf"))  # no weight in rows that do not exist
    sums = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + line, sums, mask=inside)

    end = visible
    free = visible
    if CAUSAL:
        end = tl.maximum(tl.minimum(visible, first_row + ROWS + causal_offset), 0)
        free = tl.maximum(tl.minimum(visible, first_row + causal_offset + 1), 0)
    free = free // COLUMNS * COLUMNS
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    acc = _walk_keys(
        acc, x, do, logarithm, sums, k, v, mask, random, 0, free, first_row, plane, stream, threshold, keep_scale,
        scale * LOG2E, causal_offset, queries, visible, k_s, v_s, mask_l, mask_s,
        D, DV, BLOCK_D, BLOCK_DV, CAUSAL, MASK, DROPOUT, PRECISION, UPCAST, ROWS, COLUMNS, False,
    )  # fmt: skip
    acc = _walk_keys(
        acc, x, do, logarithm, sums, k, v, mask, random, free, end, first_row, plane, stream, threshold, keep_scale,
        scale * LOG2E, causal_offset, queries, visible, k_s, v_s, mask_l, mask_s,
        D, DV, BLOCK_D, BLOCK_DV, CAUSAL, MASK, DROPOUT, PRECISION, UPCAST, ROWS, COLUMNS, True,
    )  # fmt: skip
    store_rows(dq + b * dq_b + h * dq_h + row * dq_l, acc * scale, dq_l, count, ROWS, D, BLOCK_D)


@triton.jit
def _walk_queries(
    acc_k,  # (COLUMNS, BLOCK_D), dK so far
    acc_v,  # (COLUMNS, BLOCK_DV), dV so far
    k,  # (COLUMNS, BLOCK_D)
    v,  # (COLUMNS, BLOCK_DV)
    q,  # first query of this sequence and head
    dout,
    lse,
    delta,
    mask,
    random,  # the seed
    first,
    last,
    first_column,
    plane,
    stream,
    threshold,
    keep_scale,
    scale,
    causal_offset,
    queries,
    visible,
    q_l,
    dout_l,
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
    """Adds what the query tiles from first to last give to dK and dV.

    Keys past the visible ones gather rubbish, each in a row of its own, which the caller discards.
    """
    for row in range(first, last, ROWS):
        rows = row + tl.arange(0, ROWS)
        here = tl.cast(row, tl.int64)
        x = load_rows(q + here * q_l, q_l, queries - row, ROWS, D, BLOCK_D)
        logarithm = tl.load(lse + rows, mask=rows < queries, other=float("inf"))
        s = product(k, tl.trans(x), PRECISION, UPCAST) * scale  # (COLUMNS, ROWS)
        s = hide(
            s, row, first_column, tl.arange(0, ROWS)[None, :], tl.arange(0, COLUMNS)[:, None], mask, mask_l, mask_s,
            queries, visible, causal_offset, CAUSAL, MASK, CHECKED,
        )  # fmt: skip
        p = tl.exp2(s - logarithm[None, :])
        do = load_rows(dout + here * dout_l, dout_l, queries - row, ROWS, DV, BLOCK_DV)
        sums = tl.load(delta + rows, mask=rows < queries, other=0.0)
        dp = product(v, tl.trans(do), PRECISION, UPCAST)
        kept = p
        if DROPOUT:
            keep = tl.trans(keep_mask(random, stream, plane, rows, first_column, threshold, COLUMNS))
            kept = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        acc_v += product(kept.to(do.dtype), do, PRECISION, UPCAST)
        ds = p * (dp - sums[None, :])
        acc_k += product(ds.to(x.dtype), x, PRECISION, UPCAST)
    return acc_k, acc_v


@jit(do_not_specialize=VARYING)
def _backward_keys(
    q,  # (B, H, L, D) through its strides, unit stride in D
    k,  # (B, H, S, D)
    v,  # (B, H, S, DV)
    dout,  # (B, H, L, DV)
    lse,  # (B, H, L) float32, of the forward pass
    delta,  # (B, H, L) float32, of _backward_queries
    dk,  # (B, H, S, D) out
    dv,  # (B, H, S, DV) out
    key_lengths,  # (B,) int or None
    query_starts,  # (B + 1,) int or None: packed, see attention.py
    key_starts,  # (B + 1,) int or None
    mask,  # (B, H, L, S) through its strides, or None
    seed,  # (1,) int64, or None: no dropout
    stream,
    threshold,
    keep_scale,
    scale,
    causal_offset,
    H,
    L,
    S,
    tiles,  # key tiles a head
    q_b,
    q_h,
    q_l,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    dout_b,
    dout_h,
    dout_l,
    dk_b,
    dk_h,
    dk_s,
    dv_b,
    dv_h,
    dv_s,
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
    b = (plane // H).to(tl.int64)
    h = (plane % H).to(tl.int64)
    first_query, first_key, queries, keys, visible = sequence(b, L, S, key_lengths, query_starts, key_starts)
    first_column = (tl.program_id(0) % tiles) * COLUMNS
    if first_column >= keys:
        return
    random = 0
    if DROPOUT:
        random = tl.load(seed)
    count = keys - first_column
    column = first_key + first_column
    x = load_rows(k + b * k_b + h * k_h + column * k_s, k_s, count, COLUMNS, D, BLOCK_D)
    y = load_rows(v + b * v_b + h * v_h + column * v_s, v_s, count, COLUMNS, DV, BLOCK_DV)
    q += b * q_b + h * q_h + first_query * q_l
    dout += b * dout_b + h * dout_h + first_query * dout_l
    line = b * lse_b + h * lse_h + first_query
    if MASK != "none":
        mask += b * mask_b + h * mask_h

    first = 0  # rows from it on see some key of the tile
    free = 0  # rows from it on see all of them
    if CAUSAL:
        first = tl.maximum(first_column - causal_offset, 0) // ROWS * ROWS
        free = (tl.maximum(first_column + COLUMNS - 1 - causal_offset, 0) + ROWS - 1) // ROWS * ROWS
    end = tl.where(first_column < visible, queries, 0)
    acc_k = tl.zeros((COLUMNS, BLOCK_D), tl.float32)
    acc_v = tl.zeros((COLUMNS, BLOCK_DV), tl.float32)
    if CAUSAL:
        acc_k, acc_v = _walk_queries(
            acc_k, acc_v, x, y, q, dout, lse + line, delta + line, mask, random, first, tl.minimum(free, end),
            first_column, plane, stream, threshold, keep_scale, scale * LOG2E, causal_offset, queries, visible,
            q_l, dout_l, mask_l, mask_s,
            D, DV, BLOCK_D, BLOCK_DV, CAUSAL, MASK, DROPOUT, PRECISION, UPCAST, ROWS, COLUMNS, True,
        )  # fmt: skip
    acc_k, acc_v = _walk_queries(
        acc_k, acc_v, x, y, q, dout, lse + line, delta + line, mask, random, free, end,
        first_column, plane, stream, threshold, keep_scale, scale * LOG2E, causal_offset, queries, visible,
        q_l, dout_l, mask_l, mask_s,
        D, DV, BLOCK_D, BLOCK_DV, CAUSAL, MASK, DROPOUT, PRECISION, UPCAST, ROWS, COLUMNS, False,
    )  # fmt: skip
    seen = (first_column + tl.arange(0, COLUMNS))[:, None] < visible
    acc_k = tl.where(seen, acc_k * scale, 0.0)
    acc_v = tl.where(seen, acc_v * keep_scale, 0.0)
    store_rows(dk + b * dk_b + h * dk_h + column * dk_s, acc_k, dk_s, count, COLUMNS, D, BLOCK_D)
    store_rows(dv + b * dv_b + h * dv_h + column * dv_s, acc_v, dv_s, count, COLUMNS, DV, BLOCK_DV)


# ------------------------------------------------------------------------------------------------------------ tiles


def _alternatives(chip: Chip, kind: str, width: int, extras: int) -> list[Tile]:
    sizes = ((128, 64, 8), (64, 128, 8), (64, 64, 8), (64, 64, 4), (64, 32, 4), (32, 64, 4), (32, 32, 4))
    return [Tile(rows, columns, warps, stages) for rows, columns, warps in sizes for stages in (1, 2)]


@choice("attention.backward_queries", alternatives=_alternatives)
def queries_tile(chip: Chip, kind: str, width: int, extras: int) -> Tile:
    """For dQ; arguments and limits as attention.forward_tile()'s."""
    if not chip.matrix_units or kind == "fp32":
        return {64: Tile(32, 32, 8, 1), 128: Tile(16, 16, 8, 1), 256: Tile(16, 16, 8, 1)}[width]
    if not chip.capability:
        return {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(32, 16, 8, 1)}[width]
    if kind == "tf32":
        rows = 16 if chip.capability in (86, 89, 120) else 32  # 32 spill there
        warps = 8 if chip.capability == 120 else 4  # four spill there
        return {64: Tile(32, 32, 8, 1), 128: Tile(rows, 32, warps, 1), 256: Tile(16, 32, 8, 1)}[width]
    if extras:
        stages = 1 if extras == 1 and chip.capability == 100 else 2  # two spill there
        rows = 32 if extras == 2 and chip.capability == 100 else 64  # 64 spill there
        return {
            64: Tile(64, 32, 8 if chip.capability == 120 else 4, stages),
            128: Tile(rows, 32, 8, 2),
            256: Tile(32, 32, 8, 1),
        }[width]
    rows = 64 if chip.capability == 100 else 128  # 128 spill there
    # 64 rows spill on sm_90, and so do 32 in one stage; 32 spill on sm_86 and sm_100.
    wide = Tile(32, 32, 8, 2) if chip.capability == 90 else Tile(64, 32, 8, 1)
    return {64: Tile(rows, 64, 8, 2), 128: Tile(64, 32, 4, 2), 256: wide}[width]


@choice("attention.backward_keys", alternatives=_alternatives)
def keys_tile(chip: Chip, kind: str, width: int, extras: int) -> Tile:
    """For dK and dV; arguments and limits as attention.forward_tile()'s."""
    if not chip.matrix_units or kind == "fp32":
        return {64: Tile(16, 32, 8, 1), 128: Tile(16, 16, 8, 1), 256: Tile(16, 16, 8, 1)}[width]
    if not chip.capability or kind == "tf32":
        return {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)}[width]
    if extras < 2 and width == 64 and chip.capability not in (90, 100):
        # Eight warps share 128 queries. Of 64 keys they would share 16 rows each, every row twice, and spill.
        return Tile(128, 32, 8, 2)
    if extras:
        wide = Tile(32, 32, 8, 1) if extras == 2 or chip.capability == 100 else Tile(32, 64, 8, 2)  # 64 spill there
        return {64: Tile(32, 64, 8, 1 if extras == 2 else 2), 128: wide, 256: Tile(16, 32, 8, 1)}[width]
    return {64: Tile(64, 64, 8, 2), 128: Tile(32, 64, 8, 2), 256: Tile(32, 32, 8, 1)}[width]


# --------------------------------------------------------------------------------------------------------- launches


def backward(grad, query, key, value, output, lse, *, out=None, tiles=None, **options):
    """grad, output (B, H, L, DV), lse (B, H, L) of attention.forward(); the rest as there.

    Returns the gradients of query, key and value; out: memory for them.
    """
    grad, query, key, value, output = (unit(x) for x in (grad, query, key, value, output))
    call = prepare(query, key, value, **options)
    dq, dk, dv = out or (like_heads(query), like_heads(key), like_heads(value))
    to_queries, to_keys = tiles or (queries_tile(*call.size_class), keys_tile(*call.size_class))
    delta = torch.empty_strided(lse.shape, lse.stride(), dtype=torch.float32, device=lse.device)
    rows, columns = ceil_div(call.queries, to_queries.rows), ceil_div(call.keys, to_keys.columns)
    if call.planes and rows:
        _backward_queries[(rows * call.planes,)](
            query, key, value, output, grad, lse, delta, dq, *call.arguments, rows,
            *strides(query, key, value, output, grad, dq), *lse.stride()[:2], *call.mask_strides, **call.constants,
            ROWS=to_queries.rows, COLUMNS=to_queries.columns, num_warps=to_queries.warps, num_stages=to_queries.stages,
        )  # fmt: skip
    if call.planes and columns:
        _backward_keys[(columns * call.planes,)](
            query, key, value, grad, lse, delta, dk, dv, *call.arguments, columns,
            *strides(query, key, value, grad, dk, dv), *lse.stride()[:2], *call.mask_strides, **call.constants,
            ROWS=to_keys.rows, COLUMNS=to_keys.columns, num_warps=to_keys.warps, num_stages=to_keys.stages,
        )  # fmt: skip
    return dq, dk, dv


# ---------------------------------------------------------------------------------------------------- compile cases


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """As attention.py's."""
    yield from long_cases(chip, _backward_queries, "attention_backward.queries", queries_tile)
    yield from long_cases(chip, _backward_keys, "attention_backward.keys", keys_tile)
