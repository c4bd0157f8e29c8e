"""Attention for short rows: a program holds all keys of its head, for a one-pass softmax and a one-launch backward.

    P = softmax(Q K^T * scale + mask)             O = dropout(P) V
    dP = dropout'(dO V^T)     dS = P * (dP - rowsum(P * dP))     dQ = dS K * scale     dK = dS^T Q * scale
    dV = dropout(P)^T dO

At sentence lengths attention is bound by memory and launches, not by products: for 27 words, 128 x 128 tiles compute 22
times the needed scores, 32 x 32 tiles only 1.4 times. A row of up to 128 scores stays in registers with its sum of
P * dP: backward reads neither the output nor delta, and needs no second launch. It loops over the queries with
transposed scores, so that warps split the keys, and accumulates dK and dV in float32 registers, deterministically.
Query heads that share a key head are processed one after the other, into the same dK and dV.
Forward moves 2 * B * H * (L + S) * D elements, backward 3 * L * D + 4 * S * D per head.
Source: Vaswani et al. 2017, equation 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor

from fasttfm.kernels.attention import steps
from fasttfm.kernels.attention.backward import Backward as LongBackward
from fasttfm.kernels.attention.launch import Call, key_class, strides
from fasttfm.kernels.attention.problem import LineStrides, Problem
from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import ceil_div
from fasttfm.kernels.parameter import Float32Pointer, Pointer, Strides
from fasttfm.kernels.philox import keep_mask, keep_transposed, lanes_spread, select, with_seed
from fasttfm.kernels.tiles.attention import SHORT_BACKWARD, SHORT_BY_LONG, SHORT_FORWARD, Tile


@jit
def _forward(
    q: Pointer, k: Pointer, v: Pointer, out: Pointer, lse: Float32Pointer,
    problem: Problem, strides: Strides, lse_strides: LineStrides,
    D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write out and lse; S is at most COLUMNS."""
    spans, masking, dropout, scale, sizes = problem
    tiles = (sizes.L + ROWS - 1) // ROWS
    head = steps.locate(tl.program_id(0) // tiles, sizes, spans)
    first_row = (tl.program_id(0) % tiles) * ROWS
    if first_row >= head.queries:
        return
    q_strides, k_strides, v_strides, out_strides = strides
    rows = first_row + tl.arange(0, ROWS)
    count = head.queries - first_row
    row = head.first_query + first_row
    q_tile = steps.load_tile(q, q_strides, head, row, count, ROWS, D)
    # Without matrix units a thread holds consecutive scores, as it reads the mask.
    EARLY: tl.constexpr = steps.matrix_units(q_tile.dtype, PRECISION)
    ORDER: tl.constexpr = "spread" if EARLY or masking.mask is None else "plain"
    keys = steps.rows_of(k, k_strides, steps.keys_of(head, GROUP), head.first_key)
    values = steps.rows_of(v, v_strides, steps.keys_of(head, GROUP), head.first_key)
    if ORDER == "spread":
        k_tile = steps.load_keys(keys, 0, head.visible, COLUMNS, D)
        v_tile = steps.load_keys(values, 0, head.visible, COLUMNS, DV)
    else:
        k_tile = steps.load(keys, 0, head.visible, COLUMNS, D)
        v_tile = steps.load(values, 0, head.visible, COLUMNS, DV)
    masking = steps.masking_of(masking, head)
    scale = tl.maximum(scale * steps.LOG2E, 1e-37)  # scale 0: 0 * -inf would be NaN
    if EARLY:
        mask = steps.load_mask(masking, first_row, 0, head.queries, head.visible, ROWS, COLUMNS, True, ORDER)
    s, factor = steps.unscaled(steps.product(q_tile, tl.trans(k_tile), PRECISION), masking, scale)  # (ROWS, COLUMNS)
    if not EARLY:
        mask = steps.load_mask(masking, first_row, 0, head.queries, head.visible, ROWS, COLUMNS, True, ORDER)
    s = steps.hide(s, mask, first_row, 0, masking, head.queries, head.visible, CAUSAL, True, ORDER)
    peak = tl.max(s, 1) * factor
    if masking.sinks is not None:
        peak = tl.maximum(peak, masking.sinks)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # a row that sees no key: -inf - -inf would be NaN
    p = tl.exp2(s * factor - peak[:, None])
    total = tl.sum(p, 1)
    if masking.sinks is not None:
        total += tl.exp2(masking.sinks - peak)
    weights = p.to(v_tile.dtype)
    if dropout.seed is not None:
        seeded = with_seed(dropout)
        if ORDER == "spread":
            weights = select(weights, lanes_spread(seeded, head.plane, rows, 0, COLUMNS), dropout.threshold)
        else:
            keep = keep_mask(seeded.seed, seeded.site, head.plane, rows, 0, dropout.threshold, COLUMNS)
            weights = tl.where(keep, weights, 0.0)
    total = tl.where(total == 0.0, 1.0, total)
    acc = steps.product(weights, v_tile, PRECISION) * (dropout.keep_scale / total)[:, None]
    steps.store_tile(out, acc, out_strides, head, row, count, ROWS, DV)
    first = head.first_query
    tl.store(lse + steps.line_of(lse_strides, head, first) + rows, peak + tl.log2(total), mask=rows < head.queries)


@jit
def _backward(
    q: Pointer, k: Pointer, v: Pointer, dout: Pointer, dq: Pointer, dk: Pointer, dv: Pointer, lse: Float32Pointer,
    dq_sums: Float32Pointer,  # (B, H, D) out: dq summed over L, for the bias of a projection; None: not requested
    dk_sums: Float32Pointer,  # (B, H // GROUP, D) out: dk summed over S; None with dq_sums
    dv_sums: Float32Pointer,  # (B, H // GROUP, DV) out: dv summed over S; None with dq_sums
    problem: Problem, strides: Strides,
    sum_strides: Strides,  # batch strides: of dq_sums, and of dk_sums and dv_sums
    lse_strides: LineStrides,
    D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dq, dk and dv; S is at most COLUMNS."""
    spans, masking, dropout, scale, sizes = problem
    sizes = steps.sizes_of_keys(sizes, GROUP)
    head = steps.locate(tl.program_id(0), sizes, spans)
    q_strides, k_strides, v_strides, dout_strides, dq_strides, dk_strides, dv_strides = strides
    k_tile = steps.load_tile(k, k_strides, head, head.first_key, head.visible, COLUMNS, D)
    v_tile = steps.load_tile(v, v_strides, head, head.first_key, head.visible, COLUMNS, DV)
    if dropout.seed is not None:
        dropout = with_seed(dropout)
    dk_tile = tl.zeros((COLUMNS, steps.block(D)), tl.float32)
    dv_tile = tl.zeros((COLUMNS, steps.block(DV)), tl.float32)
    for member in range(GROUP):
        reader = steps.member_of(head, member, GROUP)
        q_rows = steps.rows_of(q, q_strides, reader, head.first_query)
        dout_rows = steps.rows_of(dout, dout_strides, reader, head.first_query)
        dq_rows = steps.rows_of(dq, dq_strides, reader, head.first_query)
        lse_rows = lse + steps.line_of(lse_strides, reader, head.first_query)
        reader_masking = steps.masking_of(masking, reader)
        if dq_sums is not None:
            dq_sum = tl.zeros((steps.block(D),), tl.float32)
        for row in range(0, head.queries, ROWS):
            rows = row + tl.arange(0, ROWS)
            q_tile = steps.load(q_rows, row, head.queries, ROWS, D)
            dout_tile = steps.load(dout_rows, row, head.queries, ROWS, DV)
            # weight 0 past the end
            lse_tile = tl.load(lse_rows + rows, mask=rows < head.queries, other=float("inf"))
            s = steps.product(k_tile, tl.trans(q_tile), PRECISION) * (scale * steps.LOG2E)  # (COLUMNS, ROWS)
            s = steps.capped(s, masking)
            slope = steps.cap_slope(s, masking)
            mask = steps.load_mask(
                reader_masking, row, 0, head.queries, head.visible, ROWS, COLUMNS, True, ORDER="transposed"
            )
            s = steps.hide(
                s, mask, row, 0, reader_masking, head.queries, head.visible, CAUSAL, True, ORDER="transposed"
            )
            p = tl.exp2(s - lse_tile[None, :])
            dp = steps.product(v_tile, tl.trans(dout_tile), PRECISION)
            kept = p
            if dropout.seed is not None:
                keep = keep_transposed(dropout, reader.plane, rows, 0, COLUMNS)
                kept = tl.where(keep, p, 0.0)
                dp = tl.where(keep, dp * dropout.keep_scale, 0.0)
            dv_tile += steps.product(kept.to(dout_tile.dtype), dout_tile, PRECISION)
            # lse is rounded: for large scores the recomputed weights sum to total, not to 1. dS cancels only if
            # delta is the mean of dP under these same weights; the whole row is in registers anyway.
            total = tl.sum(p, 0)
            if masking.sinks is not None:
                total += tl.exp2(reader_masking.sinks - lse_tile)
            delta_tile = tl.sum(p * dp, 0) / tl.where(total == 0.0, 1.0, total)
            ds = p * (dp - delta_tile[None, :]) * slope
            ds = ds.to(k_tile.dtype)
            dk_tile += steps.product(ds, q_tile, PRECISION)
            if COLUMNS >= 8 * ROWS:
                # Before sm_90 Triton splits all products of the loop over warps as it does this one: along columns if
                # there are more of them than rows. Eight warps would split the scores of 16 queries, each four times.
                dq_tile = tl.trans(steps.product(tl.trans(k_tile), ds, PRECISION)) * scale
            else:
                dq_tile = steps.product(tl.trans(ds), k_tile, PRECISION) * scale
            steps.store(dq_rows, row, dq_tile, head.queries, ROWS, D)
            if dq_sums is not None:
                dq_sum += tl.sum(dq_tile, 0)  # rows past the end have weight 0, so no gradient
        if dq_sums is not None:
            column = tl.arange(0, steps.block(D))
            tl.store(dq_sums + head.b * sum_strides[0] + reader.h * D + column, dq_sum, mask=column < D)
    if dq_sums is not None:
        column = tl.arange(0, steps.block(D))
        dk_sum = tl.sum(dk_tile, 0) * scale
        tl.store(dk_sums + head.b * sum_strides[1] + head.h * D + column, dk_sum, mask=column < D)
        column = tl.arange(0, steps.block(DV))
        dv_sum = tl.sum(dv_tile, 0) * dropout.keep_scale
        tl.store(dv_sums + head.b * sum_strides[1] + head.h * DV + column, dv_sum, mask=column < DV)
    steps.store_tile(dk, dk_tile * scale, dk_strides, head, head.first_key, head.keys, COLUMNS, D)
    steps.store_tile(dv, dv_tile * dropout.keep_scale, dv_strides, head, head.first_key, head.keys, COLUMNS, DV)


class Forward:
    """The forward pass for one signature that launch.fits_short() accepts."""

    def __init__(self, call: Call, out: Tensor, lse: Tensor) -> None:
        """out (B, H, L, DV), lse (B, H, L): tensors with the layouts of the outputs."""
        tile = SHORT_FORWARD(*call.size_class, key_class(call.keys))
        constants = call.constants | tile.options()
        self._launch = Launch(_forward, (ceil_div(call.queries, tile.rows) * call.planes,), constants)
        self._strides = strides(*call.inputs, out), LineStrides(*lse.stride()[:2])

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, problem: tuple) -> None:
        """Write the output to out and the log-sum-exp in base 2 to lse."""
        self._launch(query, key, value, out, lse, problem, *self._strides)


def backward(
    call: Call, grad: Tensor, out: Tensor, lse: Tensor, gradients: Sequence[Tensor], sums: Sequence[Tensor] | None,
    *, packed: bool = False,
) -> Backward | LongBackward:  # fmt: skip
    """Return the backward pass for one signature: Backward, or the kernels for long rows where they were measured to be
    faster (SHORT_BY_LONG; padded rows without sums). Arguments as for Backward; out: of the forward pass."""
    if sums is None and not packed:
        tile = SHORT_BY_LONG(*call.size_class, key_class(call.queries), key_class(call.keys))
        if isinstance(tile, Tile):
            return LongBackward(call, grad, out, lse, gradients, tile)
    return Backward(call, grad, lse, gradients, sums)


class Backward:
    """The backward pass over short rows for one signature."""

    def __init__(
        self, call: Call, grad: Tensor, lse: Tensor, gradients: Sequence[Tensor], sums: Sequence[Tensor] | None
    ) -> None:
        """grad, lse, gradients (of query, key, value), sums: tensors with the layouts of those of the calls."""
        tile = SHORT_BACKWARD(*call.size_class, key_class(call.keys))
        self._launch = Launch(_backward, (call.key_planes,), call.constants | tile.options())
        of_sums = (0, 0) if sums is None else (sums[0].stride(0), sums[1].stride(0))
        self._strides = strides(*call.inputs, grad, *gradients), of_sums, LineStrides(*lse.stride()[:2])

    def __call__(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
        gradients: Sequence[Tensor], problem: tuple, sums: Sequence[Tensor | None] = (None, None, None),
    ) -> None:  # fmt: skip
        """Write the gradients of query, key and value. sums: their sums over queries or keys, float32, three (B, heads,
        width) with contiguous heads, those of key and value with equal strides. out is not read."""
        self._launch(query, key, value, grad, *gradients, lse, *sums, problem, *self._strides)
