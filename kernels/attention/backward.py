"""Attention for long rows, backward: one or two launches, no atomics, no storage of size L * S.

    P = 2^(S - LSE)        delta = rowsum(dO * O)        dP = dropout'(dO V^T)        dS = P * (dP - delta)
    dV = dropout(P)^T dO             dQ = dS K * scale             dK = dS^T Q * scale

Both launches recompute the scores (Dao et al. 2022). Programs of the first own query tiles and compute dQ and delta,
which the second needs. Programs of the second own key tiles and compute dK and dV from transposed scores, so that P^T
and dS^T are left operands without a transpose. Where query heads share a key head, a program loops over the queries of
all GROUP heads and accumulates in registers: dK and dV are deterministic and written once, while a separate reduction
would write and read GROUP times as much. 14 * B * H * L * S * D FLOPs in total.

A single launch, _backward_heads(), takes 10 * B * H * L * S * D: a program owns a key head, loops over its key tiles in
order, and accumulates dQ in a float32 workspace of its own, deterministic without atomics. The workspace of
4 * B * H * L * D bytes should fit the L2 cache, and there must be enough heads to fill the chip: for rows of up to 512
keys (LAUNCHES in tiles/attention.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.attention import steps
from fasttfm.kernels.attention.hopper import rule
from fasttfm.kernels.attention.launch import Call, key_class, stages_for, strides
from fasttfm.kernels.attention.problem import LineStrides, Problem, Rows, Tiling, View
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import ceil_div
from fasttfm.kernels.parameter import Float32Pointer, Pointer, Strides
from fasttfm.kernels.philox import keep_transposed, lanes_spread, select, with_seed
from fasttfm.kernels.tiles.attention import (
    BACKWARD_HEADS,
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    HOPPER_BACKWARD_KEYS,
    HOPPER_BACKWARD_QUERIES,
    LAUNCHES,
    Tile,
)


@triton.jit
def _walk_keys(
    acc, q_tile, dout_tile, lse_tile, delta_tile, k, v, first, last, first_row, view, T, CHECKED: tl.constexpr
):
    """Add the contribution of keys first to last - 1 to acc (ROWS, D), dQ / scale.

    q_tile (ROWS, D), dout_tile (ROWS, DV), lse_tile and delta_tile (ROWS,); k and v are Rows, T the Tiling.
    """
    head, masking, dropout, scale = view
    rows = first_row + tl.arange(0, T.ROWS)
    HALF: tl.constexpr = q_tile.dtype != tl.float32  # operands of float32 products leave no registers for a mask
    for column in range(first, last, T.COLUMNS):
        k_tile = steps.load_keys(k, column, head.visible, T.COLUMNS, T.D, not CHECKED)
        if HALF:
            mask = steps.load_mask(masking, first_row, column, head.queries, head.visible, T.ROWS, T.COLUMNS, CHECKED)
        s = steps.product(q_tile, tl.trans(k_tile), T.PRECISION) * scale  # (ROWS, COLUMNS)
        s = steps.capped(s, masking)
        slope = steps.cap_slope(s, masking)
        if not HALF:
            mask = steps.load_mask(
                masking, first_row, column, head.queries, head.visible, T.ROWS, T.COLUMNS, CHECKED, WIDE=False
            )
        s = steps.hide(s, mask, first_row, column, masking, head.queries, head.visible, T.CAUSAL, CHECKED)
        p = tl.exp2(s - lse_tile[:, None])
        v_tile = steps.load_keys(v, column, head.visible, T.COLUMNS, T.DV, not CHECKED)
        dp = steps.product(dout_tile, tl.trans(v_tile), T.PRECISION)
        if dropout.seed is not None:
            lane = lanes_spread(dropout, head.plane, rows, column, T.COLUMNS)
            dp = select(dp, lane, dropout.threshold) * dropout.keep_scale
        ds = p * (dp - delta_tile[:, None]) * slope
        acc += steps.product(ds.to(k_tile.dtype), k_tile, T.PRECISION)
    return acc


@jit
def _backward_queries(
    q: Pointer, k: Pointer, v: Pointer, out: Pointer, dout: Pointer, dq: Pointer, lse: Float32Pointer,
    delta: Float32Pointer, problem: Problem, strides: Strides, lse_strides: LineStrides,
    D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dq and delta."""
    head, first_row = steps.locate_queries(problem, CAUSAL, ROWS)
    if first_row >= head.queries:
        return
    q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides = strides
    dropout = problem.dropout
    if dropout.seed is not None:
        dropout = with_seed(dropout)
    row = head.first_query + first_row
    count = head.queries - first_row
    keys = steps.rows_of(k, k_strides, steps.keys_of(head, GROUP), head.first_key)
    values = steps.rows_of(v, v_strides, steps.keys_of(head, GROUP), head.first_key)
    masking = steps.masking_of(problem.masking, head)
    q_tile = steps.load_tile(q, q_strides, head, row, count, ROWS, D)
    out_tile = steps.load_tile(out, out_strides, head, row, count, ROWS, DV)
    dout_tile = steps.load_tile(dout, dout_strides, head, row, count, ROWS, DV)
    rows = tl.arange(0, ROWS)
    inside = rows < count
    line = steps.line_of(lse_strides, head, row) + rows
    lse_tile = tl.load(lse + line, mask=inside, other=float("inf"))  # weight 0 past the end
    delta_tile = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    tl.store(delta + line, delta_tile, mask=inside)

    end, free = steps.key_range(head.visible, first_row, masking.causal_offset, CAUSAL, ROWS, COLUMNS)
    acc = tl.zeros((ROWS, steps.block(D)), tl.float32)
    first = 0
    if masking.window is not None:
        start, first = steps.window_range(first_row, masking, free, ROWS, COLUMNS)
        free = tl.maximum(free, first)
    T: tl.constexpr = Tiling(D, DV, CAUSAL, PRECISION, ROWS, COLUMNS)
    view = View(head, masking, dropout, problem.scale * steps.LOG2E)
    if masking.window is not None:
        acc = _walk_keys(
            acc, q_tile, dout_tile, lse_tile, delta_tile, keys, values, start, first, first_row, view, T, True
        )
    acc = _walk_keys(acc, q_tile, dout_tile, lse_tile, delta_tile, keys, values, first, free, first_row, view, T, False)
    acc = _walk_keys(acc, q_tile, dout_tile, lse_tile, delta_tile, keys, values, free, end, first_row, view, T, True)
    steps.store_tile(dq, acc * problem.scale, dq_strides, head, row, count, ROWS, D)


@triton.jit
def _walk_queries(
    dk_tile, dv_tile, k_tile, v_tile, q, dout, dq, lse, delta, first, last, first_column, view, T, CHECKED: tl.constexpr
):
    """Add the contribution of queries first to last - 1 to dk_tile (COLUMNS, D) and dv_tile (COLUMNS, DV), unscaled.

    k_tile (COLUMNS, D), v_tile (COLUMNS, DV); q and dout are Rows, lse and delta point at the first row, T is the
    Tiling. Keys past the visible ones accumulate garbage in their own rows, which the caller discards. dq: Rows of the
    float32 workspace of dQ / scale, which the first keys of a head initialize and the others add to, or None.
    """
    head, masking, dropout, scale = view
    for row in range(first, last, T.ROWS):
        rows = row + tl.arange(0, T.ROWS)
        q_tile = steps.load(q, row, head.queries, T.ROWS, T.D)
        lse_tile = tl.load(lse + rows, mask=rows < head.queries, other=float("inf"))
        mask = steps.load_mask(
            masking, row, first_column, head.queries, head.visible, T.ROWS, T.COLUMNS, CHECKED, ORDER="transposed"
        )
        s = steps.product(k_tile, tl.trans(q_tile), T.PRECISION) * scale  # (COLUMNS, ROWS)
        s = steps.capped(s, masking)
        slope = steps.cap_slope(s, masking)
        s = steps.hide(
            s, mask, row, first_column, masking, head.queries, head.visible, T.CAUSAL, CHECKED, ORDER="transposed"
        )
        p = tl.exp2(s - lse_tile[None, :])
        dout_tile = steps.load(dout, row, head.queries, T.ROWS, T.DV)
        delta_tile = tl.load(delta + rows, mask=rows < head.queries, other=0.0)
        dp = steps.product(v_tile, tl.trans(dout_tile), T.PRECISION)
        kept = p
        if dropout.seed is not None:
            keep = keep_transposed(dropout, head.plane, rows, first_column, T.COLUMNS)
            kept = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * dropout.keep_scale, 0.0)
        dv_tile += steps.product(kept.to(dout_tile.dtype), dout_tile, T.PRECISION)
        ds = p * (dp - delta_tile[None, :]) * slope
        ds = ds.to(q_tile.dtype)
        dk_tile += steps.product(ds, q_tile, T.PRECISION)
        if dq is not None:
            before = steps.load(dq, row, tl.where(first_column > 0, head.queries, 0), T.ROWS, T.D)
            part = steps.product(tl.trans(ds), k_tile, T.PRECISION)
            steps.store(dq, row, before + part, head.queries, T.ROWS, T.D)
    return dk_tile, dv_tile


@triton.jit
def _gradients_of_keys(
    q, k, v, dout, dq, dk, dv, lse, delta, strides, lse_strides, problem, head, first_column, T, GROUP: tl.constexpr
):
    """Write dk and dv of the COLUMNS keys of a head from first_column on; dq: workspace of dQ / scale with D elements
    per element of lse, or None."""
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides = strides
    masking = problem.masking
    dropout = problem.dropout
    if dropout.seed is not None:
        dropout = with_seed(dropout)
    column = head.first_key + first_column
    count = head.keys - first_column
    k_tile = steps.load_tile(k, k_strides, head, column, count, T.COLUMNS, T.D)
    v_tile = steps.load_tile(v, v_strides, head, column, count, T.COLUMNS, T.DV)

    first = 0  # query tiles from it on see some key of the tile
    free = 0  # query tiles from it on see all of them, in every row
    offset = steps.offset_of(masking, head)
    if T.CAUSAL:
        first = tl.maximum(first_column - offset, 0) // T.ROWS * T.ROWS
        free = (tl.maximum(first_column + T.COLUMNS - 1 - offset, 0) + T.ROWS - 1) // T.ROWS * T.ROWS
    end = tl.where(first_column < head.visible, head.queries, 0)
    # dQ sums over the keys of the tile: mask those that are not visible; and none past them has a mask
    if dq is not None or masking.mask is not None:
        free = tl.where(first_column + T.COLUMNS <= head.visible, free, end)
    whole = end
    if masking.window is not None:
        border = tl.maximum(first_column - offset + masking.window + 1, 0)  # rows from it on do not see the first key
        end = tl.minimum(end, border + T.COLUMNS - 1)
        last = tl.maximum(free, border // T.ROWS * T.ROWS)  # query tiles from it on do not see every key
        whole = tl.minimum(last, end)
    dk_tile = tl.zeros((T.COLUMNS, steps.block(T.D)), tl.float32)
    dv_tile = tl.zeros((T.COLUMNS, steps.block(T.DV)), tl.float32)
    for member in range(GROUP):
        reader = steps.member_of(head, member, GROUP)
        queries = steps.rows_of(q, q_strides, reader, head.first_query)
        douts = steps.rows_of(dout, dout_strides, reader, head.first_query)
        line = steps.line_of(lse_strides, reader, head.first_query)
        dqs = None
        if dq is not None:
            dqs = Rows(dq + line * T.D, T.D)
        reader_masking = steps.masking_of(masking, reader)
        lses = lse + line
        deltas = delta + line
        part = tl.minimum(free, end)
        view = View(reader, reader_masking, dropout, problem.scale * steps.LOG2E)
        if T.CAUSAL or dq is not None or masking.mask is not None:
            dk_tile, dv_tile = _walk_queries(
                dk_tile, dv_tile, k_tile, v_tile, queries, douts, dqs, lses, deltas, first, part, first_column, view, T,
                True,
            )  # fmt: skip
        dk_tile, dv_tile = _walk_queries(
            dk_tile, dv_tile, k_tile, v_tile, queries, douts, dqs, lses, deltas, free, whole, first_column, view, T,
            False,
        )  # fmt: skip
        if masking.window is not None:
            dk_tile, dv_tile = _walk_queries(
                dk_tile, dv_tile, k_tile, v_tile, queries, douts, dqs, lses, deltas, last, end, first_column, view, T,
                True,
            )  # fmt: skip
    seen = (first_column + tl.arange(0, T.COLUMNS))[:, None] < head.visible
    dk_tile = tl.where(seen, dk_tile * problem.scale, 0.0)
    dv_tile = tl.where(seen, dv_tile * dropout.keep_scale, 0.0)
    steps.store_tile(dk, dk_tile, dk_strides, head, column, count, T.COLUMNS, T.D)
    steps.store_tile(dv, dv_tile, dv_strides, head, column, count, T.COLUMNS, T.DV)


@jit
def _backward_keys(
    q: Pointer, k: Pointer, v: Pointer, dout: Pointer, dk: Pointer, dv: Pointer, lse: Float32Pointer,
    delta: Float32Pointer, problem: Problem, strides: Strides, lse_strides: LineStrides,
    D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dk and dv."""
    sizes = steps.sizes_of_keys(problem.sizes, GROUP)
    tiles = (sizes.S + COLUMNS - 1) // COLUMNS
    head = steps.locate(tl.program_id(0) // tiles, sizes, problem.spans)
    first_column = (tl.program_id(0) % tiles) * COLUMNS
    if first_column >= head.keys:
        return
    T: tl.constexpr = Tiling(D, DV, CAUSAL, PRECISION, ROWS, COLUMNS)
    _gradients_of_keys(
        q, k, v, dout, None, dk, dv, lse, delta, strides, lse_strides, problem, head, first_column, T, GROUP
    )


@jit
def _backward_heads(
    q: Pointer, k: Pointer, v: Pointer, out: Pointer, dout: Pointer, dq: Pointer, dk: Pointer, dv: Pointer,
    lse: Float32Pointer, delta: Float32Pointer, sums: Float32Pointer, problem: Problem, strides: Strides,
    lse_strides: LineStrides,
    D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dq, dk and dv. Workspaces: delta; sums, dQ / scale in float32, D elements per element of lse."""
    sizes = steps.sizes_of_keys(problem.sizes, GROUP)
    head = steps.locate(tl.program_id(0), sizes, problem.spans)
    q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides, dk_strides, dv_strides = strides
    T: tl.constexpr = Tiling(D, DV, CAUSAL, PRECISION, ROWS, COLUMNS)
    for member in range(GROUP):
        reader = steps.member_of(head, member, GROUP)
        outs = steps.rows_of(out, out_strides, reader, head.first_query)
        douts = steps.rows_of(dout, dout_strides, reader, head.first_query)
        deltas = delta + steps.line_of(lse_strides, reader, head.first_query)
        for row in range(0, head.queries, ROWS):
            rows = row + tl.arange(0, ROWS)
            out_tile = steps.load(outs, row, head.queries, ROWS, DV)
            dout_tile = steps.load(douts, row, head.queries, ROWS, DV)
            tl.store(deltas + rows, tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1), rows < head.queries)
    inner = (q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides)
    for first_column in range(0, head.keys, COLUMNS):
        tl.debug_barrier()  # threads read delta and sums that others wrote
        _gradients_of_keys(
            q, k, v, dout, sums, dk, dv, lse, delta, inner, lse_strides, problem, head, first_column, T, GROUP
        )
    tl.debug_barrier()
    first = 0  # query tiles from it on see some key, if there is one; sums is not written for the others
    if CAUSAL:
        first = tl.maximum(-steps.offset_of(problem.masking, head), 0) // ROWS * ROWS
    for member in range(GROUP):
        reader = steps.member_of(head, member, GROUP)
        dqs = steps.rows_of(dq, dq_strides, reader, head.first_query)
        read = Rows(sums + steps.line_of(lse_strides, reader, head.first_query) * D, D)
        for row in range(0, head.queries, ROWS):
            tile = steps.load(read, row, tl.where((row >= first) & (head.visible > 0), head.queries, 0), ROWS, D)
            steps.store(dqs, row, tile * problem.scale, head.queries, ROWS, D)


def _launch(
    call: Call, kernel: Any, programs: int, tile: Tile, walked: Sequence[Tensor], *placed: Any
) -> Callable[..., None]:  # fmt: skip
    """Return a launch that appends `placed` to its arguments."""
    stages = stages_for(call.chip, tile, *walked)
    launch = Launch(kernel, (programs,), call.constants | tile.options(stages))
    return lambda *arguments: launch(*arguments, *placed)


def _of_queries(
    call: Call, tile: Tile | None, out: Tensor, grad: Tensor, lse: Tensor, d_query: Tensor
) -> Callable[..., None]:
    """Return the launch that writes dQ and delta, called like BackwardQueries of hopper/; tile as for Backward."""
    query, key, value = call.inputs
    of_queries = tile or BACKWARD_QUERIES(*call.size_class)
    programs = ceil_div(call.queries, of_queries.rows) * call.planes
    placed = strides(query, key, value, out, grad, d_query), LineStrides(*lse.stride()[:2])
    launch = _launch(call, _backward_queries, programs, of_queries, (key, value), *placed)
    fits = rule.queries_fit(call.constants["D"], dropout=call.problem.dropout.seed is not None)
    hopper = rule.choose(HOPPER_BACKWARD_QUERIES, call, out, grad) if tile is None and fits else None
    if hopper is None:
        return launch
    from fasttfm.kernels.attention.hopper.backward_queries import BackwardQueries

    return rule.Attempt(BackwardQueries(call, hopper, out, grad, lse, d_query), launch)


def _of_keys(
    call: Call, tile: Tile | None, grad: Tensor, lse: Tensor, gradients: tuple[Tensor, Tensor]
) -> Callable[..., None]:
    """Return the launch that writes dK and dV, called like BackwardKeys of hopper/; tile as for Backward."""
    query, key, value = call.inputs
    of_keys = tile or BACKWARD_KEYS(*call.size_class)
    programs = ceil_div(call.keys, of_keys.columns) * call.key_planes
    placed = strides(query, key, value, grad, *gradients), LineStrides(*lse.stride()[:2])
    launch = _launch(call, _backward_keys, programs, of_keys, (query, grad), *placed)
    fits = rule.keys_fit(call.constants["D"], dropout=call.problem.dropout.seed is not None)
    hopper = rule.choose(HOPPER_BACKWARD_KEYS, call, grad) if tile is None and fits else None
    if hopper is None:
        return launch
    from fasttfm.kernels.attention.hopper.backward_keys import BackwardKeys

    return rule.Attempt(BackwardKeys(call, hopper, grad, lse, gradients), launch)


class Backward:
    """The backward pass for one signature."""

    def __init__(
        self, call: Call, grad: Tensor, out: Tensor, lse: Tensor, gradients: Sequence[Tensor], tile: Tile | None = None
    ) -> None:
        """grad, out, lse, gradients (of query, key, value): tensors with the layouts of those of the calls. tile:
        overrides the tables and selects two launches."""
        query, key, value = call.inputs
        d_query, d_key, d_value = gradients
        self._heads = self._queries = self._keys = None
        if tile is None and count_launches(call) == 1:
            of_heads = BACKWARD_HEADS(*call.size_class)
            placed = strides(query, key, value, out, grad, *gradients), LineStrides(*lse.stride()[:2])
            self._heads = _launch(call, _backward_heads, call.key_planes, of_heads, (query, grad), *placed)
            self._width = query.shape[-1]
            return
        if call.queries:
            self._queries = _of_queries(call, tile, out, grad, lse, d_query)
        if call.keys:
            self._keys = _of_keys(call, tile, grad, lse, (d_key, d_value))

    def __call__(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
        gradients: Sequence[Tensor], problem: tuple, sums: None = None,
    ) -> None:  # fmt: skip
        """Write the gradients of query, key and value. out and lse: from the forward pass; lse contiguous."""
        delta = torch.empty_like(lse)
        d_query, d_key, d_value = gradients
        if self._heads is not None:
            rows = lse.new_empty(lse.numel() * self._width)
            self._heads(query, key, value, out, grad, *gradients, lse, delta, rows, problem)
            return
        if self._queries is not None:
            self._queries(query, key, value, out, grad, d_query, lse, delta, problem)
        if self._keys is not None:
            self._keys(query, key, value, grad, d_key, d_value, lse, delta, problem)


def count_launches(call: Call) -> int:
    """Return 1 if one launch, whose programs own key heads, computes all gradients, else 2."""
    if call.problem.masking.window is not None:  # hides the first keys, which initialize dQ, from later queries
        return 2
    rows = max(call.keys, call.queries * call.constants["GROUP"])
    rounds = "whole" if whole_rounds(call.key_planes, call.chip) else "broken"
    return LAUNCHES(*call.size_class, key_class(rows), rounds)


def whole_rounds(programs: int, chip: Chip) -> bool:
    """Return whether programs, two at a time per processor, fill at least four fifths of their waves."""
    slots = 2 * chip.processors
    return 5 * programs >= 4 * slots * ceil_div(programs, slots)
