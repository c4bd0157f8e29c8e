"""Attention for long rows, forward: softmax(Q K^T * scale + mask) V without storing the scores.

    S = Q K^T * scale + mask           P = softmax(S)           O = dropout(P) V           LSE = log2 sum exp S

A program owns ROWS queries of one head and loops over key tiles of COLUMNS with an online softmax (Milakov and
Gimelshein 2018; Dao et al. 2022): a running maximum m and running sum l in float32, in base 2,

    m' = max(m, max S)       l' = l * 2^(m - m') + sum 2^(S - m')       acc' = acc * 2^(m - m') + dropout(2^(S - m')) V

Key tiles right of the diagonal or past the visible keys are skipped; only tiles that cross one of these borders compare
indices. Cost: 4 * B * H * L * S * D FLOPs (half when causal); reads Q, K, V, writes O and 4 bytes of log-sum-exp per
row. Dropout draws L * S / 16 Philox blocks per head. Query heads that share a key head (Ainslie et al. 2023) are
adjacent in the grid and read the same K and V.
Source: Vaswani et al. 2017, equation 1.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.attention import steps
from fasttfm.kernels.attention.hopper import rule
from fasttfm.kernels.attention.launch import Call, stages_for, strides
from fasttfm.kernels.attention.problem import LineStrides, Problem, Tiling, View
from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import ceil_div
from fasttfm.kernels.parameter import Float32Pointer, Pointer, Strides
from fasttfm.kernels.philox import lanes_spread, select, with_seed
from fasttfm.kernels.tiles.attention import BLACKWELL_FORWARD, FORWARD, HOPPER_FORWARD


@triton.jit
def _walk(acc, peak, total, q_tile, k, v, first, last, first_row, view, T, CHECKED: tl.constexpr):
    """Accumulate keys first to last - 1 into acc (ROWS, DV), running maximum and running sum (ROWS,).

    q_tile (ROWS, D); k and v are Rows, T is the Tiling. CHECKED: tiles may cross a border.
    """
    head, masking, dropout, scale = view
    rows = first_row + tl.arange(0, T.ROWS)
    for column in range(first, last, T.COLUMNS):
        k_tile = steps.load_keys(k, column, head.visible, T.COLUMNS, T.D, not CHECKED)
        mask = steps.load_mask(masking, first_row, column, head.queries, head.visible, T.ROWS, T.COLUMNS, CHECKED)
        s = steps.product(q_tile, tl.trans(k_tile), T.PRECISION)  # (ROWS, COLUMNS)
        s, factor = steps.unscaled(s, masking, scale)
        s = steps.hide(s, mask, first_row, column, masking, head.queries, head.visible, T.CAUSAL, CHECKED)
        highest = tl.maximum(peak, tl.max(s, 1) * factor)
        base = highest
        if CHECKED or masking.mask is not None:
            base = tl.where(highest == float("-inf"), 0.0, highest)  # no key seen yet: -inf - -inf would be NaN
        p = tl.exp2(s * factor - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(p, 1)
        peak = highest
        v_tile = steps.load_keys(v, column, head.visible, T.COLUMNS, T.DV, not CHECKED)
        weights = p.to(v_tile.dtype)
        if dropout.seed is not None:
            weights = select(weights, lanes_spread(dropout, head.plane, rows, column, T.COLUMNS), dropout.threshold)
        acc = acc * fade[:, None] + steps.product(weights, v_tile, T.PRECISION)
    return acc, peak, total


@jit
def _forward(
    q: Pointer, k: Pointer, v: Pointer, out: Pointer, lse: Float32Pointer,
    strides: Strides, lse_strides: LineStrides, problem: Problem,
    D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write out and lse."""
    head, first_row = steps.locate_queries(problem, CAUSAL, ROWS)
    if first_row >= head.queries:
        return
    q_strides, k_strides, v_strides, out_strides = strides
    dropout = problem.dropout
    if dropout.seed is not None:
        dropout = with_seed(dropout)
    row = head.first_query + first_row
    count = head.queries - first_row
    keys = steps.rows_of(k, k_strides, steps.keys_of(head, GROUP), head.first_key)
    values = steps.rows_of(v, v_strides, steps.keys_of(head, GROUP), head.first_key)
    masking = steps.masking_of(problem.masking, head)
    q_tile = steps.load_tile(q, q_strides, head, row, count, ROWS, D)
    scale = tl.maximum(problem.scale * steps.LOG2E, 1e-37)  # scale 0: 0 * -inf would be NaN
    view = View(head, masking, dropout, scale)
    T: tl.constexpr = Tiling(D, DV, CAUSAL, PRECISION, ROWS, COLUMNS)

    end, free = steps.key_range(head.visible, first_row, masking.causal_offset, CAUSAL, ROWS, COLUMNS)
    acc = tl.zeros((ROWS, steps.block(DV)), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    first = 0
    if masking.window is not None:
        start, first = steps.window_range(first_row, masking, free, ROWS, COLUMNS)
        free = tl.maximum(free, first)
        acc, peak, total = _walk(acc, peak, total, q_tile, keys, values, start, first, first_row, view, T, True)
    acc, peak, total = _walk(acc, peak, total, q_tile, keys, values, first, free, first_row, view, T, False)
    acc, peak, total = _walk(acc, peak, total, q_tile, keys, values, free, end, first_row, view, T, True)
    if masking.sinks is not None:
        highest = tl.maximum(peak, masking.sinks)
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        fade = tl.exp2(peak - highest)
        total = total * fade + tl.exp2(masking.sinks - highest)
        acc *= fade[:, None]
        peak = highest
    empty = total == 0.0
    acc *= (dropout.keep_scale / tl.where(empty, 1.0, total))[:, None]
    steps.store_tile(out, acc, out_strides, head, row, count, ROWS, DV)
    rows = tl.arange(0, ROWS)
    logarithm = tl.where(empty, 0.0, peak + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + steps.line_of(lse_strides, head, row) + rows, logarithm, mask=rows < count)


def plan(call: Call, out: Tensor, lse: Tensor) -> Callable[..., None]:
    """Return the forward pass for one signature: a Gluon kernel if the chip's choice selects it, else Forward."""
    fallback = Forward(call, out, lse)
    if (tile := rule.choose(HOPPER_FORWARD, call)) is not None:
        from fasttfm.kernels.attention.hopper import forward

        return rule.Attempt(forward.Forward(call, tile, out, lse), fallback)
    if (tile := rule.choose(BLACKWELL_FORWARD, call, chip="sm_100")) is not None:
        from fasttfm.kernels.attention import blackwell

        return rule.Attempt(blackwell.Forward(call, tile, out, lse), fallback)
    return fallback


class Forward:
    """The forward pass for one signature."""

    def __init__(self, call: Call, out: Tensor, lse: Tensor) -> None:
        """out (B, H, L, DV), lse (B, H, L): tensors with the layouts of the outputs."""
        tile = FORWARD(*call.size_class)
        constants = call.constants | tile.options(stages_for(call.chip, tile, *call.inputs[1:]))
        self._launch = Launch(_forward, (ceil_div(call.queries, tile.rows) * call.planes,), constants)
        self._strides = strides(*call.inputs, out), LineStrides(*lse.stride()[:2])

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, problem: tuple) -> None:
        """Write the output to out and the log-sum-exp in base 2 to lse."""
        self._launch(query, key, value, out, lse, *self._strides, problem)
