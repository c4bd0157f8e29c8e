"""Attention for long rows, backward: two launches, no atomics, nothing of size L * S.

    P = 2^(S - LSE)        delta = rowsum(dO * O)        dP = dropout'(dO V^T)        dS = P * (dP - delta)
    dV = dropout(P)^T dO             dQ = dS K * scale             dK = dS^T Q * scale

The scores are computed anew in both launches (Dao et al. 2022). The first owns tiles of queries: it forms delta, which
the second needs, and dQ. The second owns tiles of keys and forms dK and dV with transposed scores, so that P^T and dS^T
are the left operands of their products as they come. Where query heads share a head of keys, a program of the second
launch walks over the queries of all of them and adds up in its registers: dK and dV are written once, in the same bits
every time, where a sum afterwards would write and read GROUP times as much.
14 * B * H * L * S * D floating-point operations in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.attention.forward import long_cases
from fasttfm.kernels.attention.launch import distinct, launch_options, like_heads, prepare, stages_for, strides, unit
from fasttfm.kernels.attention.tile import (
    LOG2E,
    LineStrides,
    Masking,
    Sizes,
    block,
    cap_slope,
    capped,
    hide_keys,
    key_range,
    keys_of,
    line_of,
    load_keys,
    load_rows,
    load_tile,
    locate,
    locate_queries,
    masking_of,
    member_of,
    offset_of,
    product,
    rows_of,
    sizes_of_keys,
    store_tile,
    window_range,
)
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choices import choice
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import ceil_div
from fasttfm.kernels.parameter import Float32Pointer, Int64Pointers, Pointer, Real, Strides
from fasttfm.kernels.philox import Dropout, keep_transposed, lanes_of, select, with_seed
from fasttfm.kernels.tiles.attention import BACKWARD_KEYS, BACKWARD_QUERIES, Tile


@triton.jit
def _walk_keys(
    acc,  # (ROWS, D), dQ so far
    q_tile,  # (ROWS, D)
    dout_tile,  # (ROWS, DV)
    lse_tile,  # (ROWS,)
    delta_tile,  # (ROWS,)
    k,  # first key of the head
    v,
    first,
    last,
    first_row,
    head,
    masking,
    dropout,
    scale,
    k_stride,
    v_stride,
    D: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Adds what the key tiles from first to last give to dQ."""
    rows = first_row + tl.arange(0, ROWS)
    for column in range(first, last, COLUMNS):
        offset = tl.cast(column, tl.int64)
        k_tile = load_keys(k + offset * k_stride, k_stride, head.visible - column, COLUMNS, D, not CHECKED)
        s = product(q_tile, tl.trans(k_tile), PRECISION) * scale  # (ROWS, COLUMNS)
        s = capped(s, masking)
        if masking.softcap is not None:
            slope = cap_slope(s, masking)
        s = hide_keys(s, first_row, column, head, masking, CAUSAL, CHECKED)
        p = tl.exp2(s - lse_tile[:, None])
        v_tile = load_keys(v + offset * v_stride, v_stride, head.visible - column, COLUMNS, DV, not CHECKED)
        dp = product(dout_tile, tl.trans(v_tile), PRECISION)
        if dropout.seed is not None:
            lane = lanes_of(dropout, head.plane, rows, column, COLUMNS)
            dp = select(dp, lane, dropout.threshold) * dropout.keep_scale
        ds = p * (dp - delta_tile[:, None])
        if masking.softcap is not None:
            ds *= slope
        acc += product(ds.to(k_tile.dtype), k_tile, PRECISION)
    return acc


@jit
def _backward_queries(
    q: Pointer,  # (B, H, L, D) through its strides, unit stride in D
    k: Pointer,  # (B, H // GROUP, S, D)
    v: Pointer,  # (B, H // GROUP, S, DV)
    out: Pointer,  # (B, H, L, DV)
    dout: Pointer,  # (B, H, L, DV)
    dq: Pointer,  # (B, H, L, D) out
    lse: Float32Pointer,  # (B, H, L), of the forward pass
    delta: Float32Pointer,  # (B, H, L) out
    spans: Int64Pointers,  # key_lengths, query_starts, key_starts, each or None
    masking: Masking,
    dropout: Dropout,
    scale: Real,
    sizes: Sizes,
    strides: Strides,  # of q, k, v, out, dout, dq
    lse_strides: LineStrides,  # of lse, delta
    D: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head, first_row = locate_queries(sizes, spans, CAUSAL, ROWS)
    if first_row >= head.queries:
        return
    q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides = strides
    if dropout.seed is not None:
        dropout = with_seed(dropout)
    row = head.first_query + first_row
    count = head.queries - first_row
    k = rows_of(k, k_strides, keys_of(head, GROUP), head.first_key)
    v = rows_of(v, v_strides, keys_of(head, GROUP), head.first_key)
    masking = masking_of(masking, head, sizes)
    q_tile = load_tile(q, q_strides, head, row, count, ROWS, D)
    out_tile = load_tile(out, out_strides, head, row, count, ROWS, DV)
    dout_tile = load_tile(dout, dout_strides, head, row, count, ROWS, DV)
    rows = tl.arange(0, ROWS)
    inside = rows < count
    line = line_of(lse_strides, head, row) + rows
    lse_tile = tl.load(lse + line, mask=inside, other=float("inf"))  # no weight in rows that do not exist
    delta_tile = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    tl.store(delta + line, delta_tile, mask=inside)

    end, free = key_range(head.visible, first_row, masking.causal_offset, CAUSAL, ROWS, COLUMNS)
    acc = tl.zeros((ROWS, block(D)), tl.float32)
    first = 0
    if masking.window is not None:
        start, first = window_range(first_row, masking, free, ROWS, COLUMNS)
        free = tl.maximum(free, first)
        acc = _walk_keys(
            acc, q_tile, dout_tile, lse_tile, delta_tile, k, v, start, first, first_row, head, masking, dropout,
            scale * LOG2E, k_strides[2], v_strides[2], D, DV, CAUSAL, PRECISION, ROWS, COLUMNS, True,
        )  # fmt: skip
    acc = _walk_keys(
        acc, q_tile, dout_tile, lse_tile, delta_tile, k, v, first, free, first_row, head, masking, dropout,
        scale * LOG2E, k_strides[2], v_strides[2], D, DV, CAUSAL, PRECISION, ROWS, COLUMNS, False,
    )  # fmt: skip
    acc = _walk_keys(
        acc, q_tile, dout_tile, lse_tile, delta_tile, k, v, free, end, first_row, head, masking, dropout,
        scale * LOG2E, k_strides[2], v_strides[2], D, DV, CAUSAL, PRECISION, ROWS, COLUMNS, True,
    )  # fmt: skip
    store_tile(dq, acc * scale, dq_strides, head, row, count, ROWS, D)


@triton.jit
def _walk_queries(
    dk_tile,  # (COLUMNS, D), dK so far
    dv_tile,  # (COLUMNS, DV), dV so far
    k_tile,  # (COLUMNS, D)
    v_tile,  # (COLUMNS, DV)
    q,  # first query of the head
    dout,
    lse,
    delta,
    first,
    last,
    first_column,
    head,
    masking,
    dropout,
    scale,
    q_stride,
    dout_stride,
    D: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Adds what the query tiles from first to last give to dK and dV.

    Keys past the visible ones gather rubbish, each in a row of its own, which the caller discards.
    """
    for row in range(first, last, ROWS):
        rows = row + tl.arange(0, ROWS)
        offset = tl.cast(row, tl.int64)
        count = head.queries - row
        q_tile = load_rows(q + offset * q_stride, q_stride, count, ROWS, D)
        lse_tile = tl.load(lse + rows, mask=rows < head.queries, other=float("inf"))
        s = product(k_tile, tl.trans(q_tile), PRECISION) * scale  # (COLUMNS, ROWS)
        s = capped(s, masking)
        if masking.softcap is not None:
            slope = cap_slope(s, masking)
        s = hide_keys(s, row, first_column, head, masking, CAUSAL, CHECKED, True)
        p = tl.exp2(s - lse_tile[None, :])
        dout_tile = load_rows(dout + offset * dout_stride, dout_stride, count, ROWS, DV)
        delta_tile = tl.load(delta + rows, mask=rows < head.queries, other=0.0)
        dp = product(v_tile, tl.trans(dout_tile), PRECISION)
        kept = p
        if dropout.seed is not None:
            keep = keep_transposed(dropout, head.plane, rows, first_column, COLUMNS)
            kept = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * dropout.keep_scale, 0.0)
        dv_tile += product(kept.to(dout_tile.dtype), dout_tile, PRECISION)
        ds = p * (dp - delta_tile[None, :])
        if masking.softcap is not None:
            ds *= slope
        dk_tile += product(ds.to(q_tile.dtype), q_tile, PRECISION)
    return dk_tile, dv_tile


@jit
def _backward_keys(
    q: Pointer,  # (B, H, L, D) through its strides, unit stride in D
    k: Pointer,  # (B, H // GROUP, S, D)
    v: Pointer,  # (B, H // GROUP, S, DV)
    dout: Pointer,  # (B, H, L, DV)
    dk: Pointer,  # (B, H // GROUP, S, D) out
    dv: Pointer,  # (B, H // GROUP, S, DV) out
    lse: Float32Pointer,  # (B, H, L), of the forward pass
    delta: Float32Pointer,  # (B, H, L), of _backward_queries
    strides: Strides,  # of q, k, v, dout, dk, dv
    lse_strides: LineStrides,  # of lse, delta
    spans: Int64Pointers,  # key_lengths, query_starts, key_starts, each or None
    masking: Masking,
    dropout: Dropout,
    scale: Real,
    sizes: Sizes,
    D: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sizes = sizes_of_keys(sizes, GROUP)
    tiles = (sizes.S + COLUMNS - 1) // COLUMNS
    head = locate(tl.program_id(0) // tiles, sizes, spans)
    first_column = (tl.program_id(0) % tiles) * COLUMNS
    if first_column >= head.keys:
        return
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides = strides
    if dropout.seed is not None:
        dropout = with_seed(dropout)
    column = head.first_key + first_column
    count = head.keys - first_column
    k_tile = load_tile(k, k_strides, head, column, count, COLUMNS, D)
    v_tile = load_tile(v, v_strides, head, column, count, COLUMNS, DV)

    first = 0  # rows from it on see some key of the tile
    free = 0  # rows from it on see all of them
    offset = offset_of(masking, head, sizes)
    if CAUSAL:
        first = tl.maximum(first_column - offset, 0) // ROWS * ROWS
        free = (tl.maximum(first_column + COLUMNS - 1 - offset, 0) + ROWS - 1) // ROWS * ROWS
    end = tl.where(first_column < head.visible, head.queries, 0)
    whole = end
    if masking.window is not None:
        border = tl.maximum(first_column - offset + masking.window + 1, 0)  # rows from it on do not see the first key
        end = tl.minimum(end, border + COLUMNS - 1)
        last = tl.maximum(free, border // ROWS * ROWS)  # rows from it on do not see all of the tile
        whole = tl.minimum(last, end)
    dk_tile = tl.zeros((COLUMNS, block(D)), tl.float32)
    dv_tile = tl.zeros((COLUMNS, block(DV)), tl.float32)
    for member in range(GROUP):
        reader = member_of(head, member, GROUP)
        q_rows = rows_of(q, q_strides, reader, head.first_query)
        dout_rows = rows_of(dout, dout_strides, reader, head.first_query)
        line = line_of(lse_strides, reader, head.first_query)
        reader_masking = masking_of(masking, reader, sizes)
        if CAUSAL:
            dk_tile, dv_tile = _walk_queries(
                dk_tile, dv_tile, k_tile, v_tile, q_rows, dout_rows, lse + line, delta + line,
                first, tl.minimum(free, end), first_column, reader, reader_masking, dropout, scale * LOG2E,
                q_strides[2], dout_strides[2], D, DV, CAUSAL, PRECISION, ROWS, COLUMNS, True,
            )  # fmt: skip
        dk_tile, dv_tile = _walk_queries(
            dk_tile, dv_tile, k_tile, v_tile, q_rows, dout_rows, lse + line, delta + line,
            free, whole, first_column, reader, reader_masking, dropout, scale * LOG2E,
            q_strides[2], dout_strides[2], D, DV, CAUSAL, PRECISION, ROWS, COLUMNS, False,
        )  # fmt: skip
        if masking.window is not None:
            dk_tile, dv_tile = _walk_queries(
                dk_tile, dv_tile, k_tile, v_tile, q_rows, dout_rows, lse + line, delta + line,
                last, end, first_column, reader, reader_masking, dropout, scale * LOG2E,
                q_strides[2], dout_strides[2], D, DV, CAUSAL, PRECISION, ROWS, COLUMNS, True,
            )  # fmt: skip
    seen = (first_column + tl.arange(0, COLUMNS))[:, None] < head.visible
    dk_tile = tl.where(seen, dk_tile * scale, 0.0)
    dv_tile = tl.where(seen, dv_tile * dropout.keep_scale, 0.0)
    store_tile(dk, dk_tile, dk_strides, head, column, count, COLUMNS, D)
    store_tile(dv, dv_tile, dv_strides, head, column, count, COLUMNS, DV)


# ------------------------------------------------------------------------------------------------------------ tiles


def _alternatives(chip: Chip, kind: str, width: int, extras: int) -> list[Tile]:
    sizes = ((128, 64, 8), (64, 128, 8), (64, 64, 8), (64, 64, 4), (64, 32, 4), (32, 64, 4), (32, 32, 4))
    return [Tile(rows, columns, warps, stages) for rows, columns, warps in sizes for stages in (1, 2)]


@choice("attention.backward_queries", alternatives=_alternatives)
def queries_tile(chip: Chip, kind: str, width: int, extras: int) -> Tile:
    """For dQ; arguments as forward.forward_tile()'s."""
    return BACKWARD_QUERIES(chip, kind, width, extras)


@choice("attention.backward_keys", alternatives=_alternatives)
def keys_tile(chip: Chip, kind: str, width: int, extras: int) -> Tile:
    """For dK and dV; arguments as forward.forward_tile()'s."""
    return BACKWARD_KEYS(chip, kind, width, extras)


# --------------------------------------------------------------------------------------------------------- launches


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    out: tuple[Tensor, ...] | None = None,
    tiles: tuple[Tile, Tile] | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """grad, output (B, H, L, DV), lse (B, H, L) of forward.forward(); the rest as there.

    Returns the gradients of query, key and value; out: memory for them; tiles: of the first launch and the second.
    """
    grad, query, key, value, output = (unit(x) for x in (grad, query, key, value, output))
    call = prepare(query, key, value, **options)
    dq, dk, dv = out or (like_heads(query), like_heads(key), like_heads(value))
    of_queries, of_keys = tiles or (queries_tile(*call.size_class), keys_tile(*call.size_class))
    delta = torch.empty_strided(lse.shape, lse.stride(), dtype=torch.float32, device=lse.device)
    if call.planes and call.queries:
        stages = stages_for(call.chip, of_queries, key, value, gradients=True)
        _backward_queries[(ceil_div(call.queries, of_queries.rows) * call.planes,)](
            query, key, value, output, grad, dq, lse, delta, *call.arguments,
            strides(query, key, value, output, grad, dq), LineStrides(*lse.stride()[:2]),
            **call.constants, **launch_options(of_queries, stages),
        )  # fmt: skip
    if call.planes and call.keys:
        stages = stages_for(call.chip, of_keys, query, grad, gradients=True)
        _backward_keys[(ceil_div(call.keys, of_keys.columns) * call.key_planes,)](
            query, key, value, grad, dk, dv, lse, delta,
            strides(query, key, value, grad, dk, dv), LineStrides(*lse.stride()[:2]), *call.arguments,
            **call.constants, **launch_options(of_keys, stages),
        )  # fmt: skip
    return dq, dk, dv


# ---------------------------------------------------------------------------------------------------- compile cases


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """The cases of both kernels: every tile in the heaviest variant that takes it, as in forward.py."""
    yield from distinct(long_cases(chip, _backward_queries, "attention.backward.queries", queries_tile))
    yield from distinct(long_cases(chip, _backward_keys, "attention.backward.keys", keys_tile))
