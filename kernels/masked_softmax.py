"""Scale, mask, softmax and dropout in one pass over scores, between the two cuBLAS products of attention.

    P = softmax(cap(scores * scale) + mask)        W = dropout(P)
    dscores = factor * cap' * P * (dropout'(dW) - rowsum(P * dropout'(dW)))

For chips on which Triton cannot use the tensor cores (V100, T4), for head sizes above 256, and for callers that want
the weights. Windows, ALiBi and sinks are those of attention/steps.py. Scores and dW are float32.
Forward reads scores and writes P (optionally in place) and, with dropout, W: 2 to 3 times B * H * L * S elements.
Backward reads P and dW, with a soft cap also the scores, and writes dscores (optionally in place) and, on request, W,
redrawing its mask. Rows of up to ONE_PASS keys stay in registers; longer ones are read twice.
Source: Vaswani et al. 2017, section 3.2.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.attention import steps
from fasttfm.kernels.attention.problem import Head, Masking
from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import ceil_div, chip, power_of_two
from fasttfm.kernels.parameter import Float32Pointer, Int64Pointer, Pointer, Real, RealOrNone, Size, Varying
from fasttfm.kernels.philox import Dropout, dropout_rate, dropped, with_seed
from fasttfm.kernels.tiles.attention import MASKED_SOFTMAX

ONE_PASS = 8192
"""Most keys, rounded up to a power of two, of a row that stays in registers."""


class Cap(NamedTuple):
    """Soft cap and the scores before it, for its derivative."""

    scores: Float32Pointer
    """(B, H, L, S), as passed to the forward pass; None: no cap."""
    scale: RealOrNone
    softcap: RealOrNone


NO_CAP = Cap(None, None, None)
NOTHING_MASKED = Masking(None, 0)


@triton.jit
def _scores(
    x, first_row, column, scale, masking, L, S, visible, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Load scores (ROWS, COLUMNS) from `column` on, capped and masked, in base 2; x: the tile's first row."""
    rows = tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < L - first_row) & (columns[None, :] < visible)
    offsets = rows[:, None] * S + columns[None, :]
    s = steps.capped(tl.load(x + offsets, mask=inside, other=0.0) * scale, masking)
    mask = steps.load_mask(masking, first_row, column, L, visible, ROWS, COLUMNS, True, "plain")
    return steps.hide(s, mask, first_row, column, masking, L, visible, CAUSAL, True, "plain")


@triton.jit
def _store(
    p, kept, weights, first_row, column, L, S, plane, dropout, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write weights (ROWS, COLUMNS) to p, and after dropout to kept; both point at the tile's first row."""
    rows = tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < L - first_row) & (columns[None, :] < S)
    offsets = rows[:, None] * S + columns[None, :]
    tl.store(p + offsets, weights.to(p.dtype.element_ty), mask=inside)
    if dropout.seed is not None:
        weights = dropped(weights, dropout, plane, first_row + rows, column, COLUMNS)
        tl.store(kept + offsets, weights.to(p.dtype.element_ty), mask=inside)


@jit
def _forward(
    scores: Float32Pointer,  # (B, H, L, S)
    p: Pointer,  # (B, H, L, S) out, the weights; may alias scores
    kept: Pointer,  # (B, H, L, S) out, after dropout; None without it
    lse: Float32Pointer,  # (B, H, L) out, log2 of the sum of a row's exponentiated scores; None: not requested
    key_lengths: Int64Pointer,  # (B,) int or None
    masking: Masking,
    dropout: Dropout,
    scale: Real,
    H: Varying,
    L: Varying,
    S: Size,
    CAUSAL: tl.constexpr,
    ONE: tl.constexpr,  # a tile holds the whole row
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tiles = (L + ROWS - 1) // ROWS
    plane = tl.program_id(0) // tiles
    first_row = (tl.program_id(0) % tiles) * ROWS
    b = (plane // H).to(tl.int64)
    begin = (plane.to(tl.int64) * L + first_row) * S
    scores += begin
    p += begin
    if kept is not None:
        kept += begin
    masking = steps.masking_of(masking, Head(plane, b, (plane % H).to(tl.int64), 0, 0, L, S, S))
    visible = S
    if key_lengths is not None:
        visible = tl.maximum(tl.minimum(tl.load(key_lengths + b), S), 0).to(tl.int32)
    if dropout.seed is not None:
        dropout = with_seed(dropout)
    scale *= steps.LOG2E
    if ONE:
        s = _scores(scores, first_row, 0, scale, masking, L, S, visible, CAUSAL, ROWS, COLUMNS)
        peak = tl.max(s, 1)
        if masking.sinks is not None:
            peak = tl.maximum(peak, masking.sinks)
        peak = tl.where(peak == float("-inf"), 0.0, peak)  # a row that sees no key: -inf - -inf would be NaN
        weights = tl.exp2(s - peak[:, None])
        total = tl.sum(weights, 1)
        if masking.sinks is not None:
            total += tl.exp2(masking.sinks - peak)
        total = tl.where(total == 0.0, 1.0, total)
        weights /= total[:, None]
        _store(p, kept, weights, first_row, 0, L, S, plane, dropout, ROWS, COLUMNS)
    else:
        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        if masking.sinks is not None:
            peak = tl.maximum(peak, masking.sinks)
            total += tl.where(masking.sinks == float("-inf"), 0.0, tl.exp2(masking.sinks - peak))
        for column in range(0, visible, COLUMNS):
            s = _scores(scores, first_row, column, scale, masking, L, S, visible, CAUSAL, ROWS, COLUMNS)
            highest = tl.maximum(peak, tl.max(s, 1))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(s - base[:, None]), 1)
            peak = highest
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.where(total == 0.0, 1.0, total)
        for column in range(0, S, COLUMNS):
            s = _scores(scores, first_row, column, scale, masking, L, S, visible, CAUSAL, ROWS, COLUMNS)
            weights = tl.exp2(s - peak[:, None]) / total[:, None]
            _store(p, kept, weights, first_row, column, L, S, plane, dropout, ROWS, COLUMNS)
    if lse is not None:
        rows = first_row + tl.arange(0, ROWS)
        tl.store(lse + (plane.to(tl.int64) * L + rows), peak + tl.log2(total), mask=rows < L)


@triton.jit
def _gradient(p, dkept, offsets, inside, plane, rows, column, dropout, COLUMNS: tl.constexpr):
    """Return the weights, their gradient before dropout, and the weights after dropout, all float32."""
    weights = tl.load(p + offsets, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dkept + offsets, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.where(weights == 0.0, 0.0, gradient)  # may be inf for a hidden key: 0 * inf would be NaN
    kept = weights
    if dropout.seed is not None:
        gradient = dropped(gradient, dropout, plane, rows, column, COLUMNS)
        kept = dropped(weights, dropout, plane, rows, column, COLUMNS)
    return weights, gradient, kept


@triton.jit
def _uncapped(ds, cap, begin, offsets, inside):
    """Return the gradient of the scores before the soft cap, from that after it."""
    if cap.scores is not None:
        s = tl.load(cap.scores + begin + offsets, mask=inside, other=0.0) * (cap.scale * steps.LOG2E)
        ds *= steps.cap_slope(steps.capped(s, cap), cap)
    return ds


@jit
def _backward(
    p: Pointer,  # (B, H, L, S), the weights before dropout
    dkept: Float32Pointer,  # (B, H, L, S), gradient of the weights after dropout
    dscores: Pointer,  # (B, H, L, S) out; may alias dkept
    kept: Pointer,  # (B, H, L, S) out, the weights after dropout; None: not requested
    cap: Cap,
    dropout: Dropout,
    factor: Real,
    L: Varying,
    S: Size,
    ONE: tl.constexpr,  # a tile holds the whole row
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tiles = (L + ROWS - 1) // ROWS
    plane = tl.program_id(0) // tiles
    first_row = (tl.program_id(0) % tiles) * ROWS
    rows = first_row + tl.arange(0, ROWS)
    begin = (plane.to(tl.int64) * L + first_row) * S
    p += begin
    dkept += begin
    dscores += begin
    if kept is not None:
        kept += begin
    if dropout.seed is not None:
        dropout = with_seed(dropout)
    line = tl.arange(0, ROWS)[:, None] * S
    columns = tl.arange(0, COLUMNS)[None, :]
    if ONE:
        inside = (rows[:, None] < L) & (columns < S)
        weights, gradient, dropped = _gradient(p, dkept, line + columns, inside, plane, rows, 0, dropout, COLUMNS)
        ds = weights * (gradient - tl.sum(weights * gradient, 1)[:, None]) * factor
        ds = _uncapped(ds, cap, begin, line + columns, inside)
        tl.store(dscores + line + columns, ds.to(dscores.dtype.element_ty), mask=inside)
        if kept is not None:
            tl.store(kept + line + columns, dropped.to(kept.dtype.element_ty), mask=inside)
    else:
        total = tl.zeros((ROWS,), tl.float32)
        for column in range(0, S, COLUMNS):
            inside = (rows[:, None] < L) & (column + columns < S)
            weights, gradient, _ = _gradient(
                p, dkept, line + column + columns, inside, plane, rows, column, dropout, COLUMNS
            )
            total += tl.sum(weights * gradient, 1)
        for column in range(0, S, COLUMNS):
            inside = (rows[:, None] < L) & (column + columns < S)
            weights, gradient, dropped = _gradient(
                p, dkept, line + column + columns, inside, plane, rows, column, dropout, COLUMNS
            )
            ds = weights * (gradient - total[:, None]) * factor
            ds = _uncapped(ds, cap, begin, line + column + columns, inside)
            tl.store(dscores + line + column + columns, ds.to(dscores.dtype.element_ty), mask=inside)
            if kept is not None:
                tl.store(kept + line + column + columns, dropped.to(kept.dtype.element_ty), mask=inside)


def _launch(kernel: Any, x: Tensor, **constants: Any) -> Launch:
    """Return the launch of a pass over x (B, H, L, S); its grid is empty if S is 0."""
    batch, heads, queries, keys = x.shape
    columns = max(16, power_of_two(keys))
    one = columns <= ONE_PASS
    tile = MASKED_SOFTMAX(chip(x.device), columns if one else 2048)
    grid = (ceil_div(queries, tile.rows) * batch * heads * min(keys, 1),)
    return Launch(kernel, grid, {**constants, "ONE": one, **tile.options()})


class Forward:
    """The forward pass for one signature, over scores (B, H, L, S) float32, contiguous."""

    def __init__(
        self, scores: Tensor, *, causal: bool = False, dropout_p: float = 0.0, dtype: torch.dtype | None = None,
        in_place: bool = False,
    ) -> None:  # fmt: skip
        """dtype: of the weights, None for the dtype of scores; in_place: overwrite the scores if dtypes agree."""
        self.launch = _launch(_forward, scores, CAUSAL=causal)
        self.sizes, self.dropout = tuple(scores.shape[1:]), dropout_rate(dropout_p)
        self.dtype, self.in_place = dtype, in_place and dtype in (None, scores.dtype)

    def __call__(
        self, scores: Tensor, scale: float, masking: tuple = NOTHING_MASKED, key_lengths: Tensor | None = None,
        seed: Tensor | None = None, site: int = 0, lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the weights before dropout, and after it (None without dropout).

        masking: from masking_arguments(); key_lengths (B,) contiguous; lse: buffer (B, H, L) float32 for the
        log-sum-exp in base 2, 0 for rows without a key or sink.
        """
        p = scores if self.in_place else torch.empty_like(scores, dtype=self.dtype)
        kept = None if seed is None else torch.empty_like(p)
        self.launch(scores, p, kept, lse, key_lengths, masking, (seed, site, *self.dropout), scale, *self.sizes)
        if lse is not None and not p.numel():
            lse.zero_()
        return p, kept


class Backward:
    """The backward pass for one signature; p (B, H, L, S) contiguous: the weights before dropout."""

    def __init__(self, p: Tensor, dropout_p: float = 0.0, *, in_place: bool = False, with_kept: bool = False) -> None:
        """in_place: overwrite the gradient if p is float32; with_kept: also return the weights after dropout."""
        self.launch = _launch(_backward, p)
        self.sizes, self.dropout = tuple(p.shape[2:]), dropout_rate(dropout_p)
        self.in_place, self.with_kept = in_place and p.dtype is torch.float32, with_kept

    def __call__(
        self, grad: Tensor, p: Tensor, factor: float, seed: Tensor | None = None, site: int = 0, cap: tuple = NO_CAP
    ) -> tuple[Tensor, Tensor]:
        """Return factor times the gradient of the masked scores in p's dtype (with cap: of the scores before the soft
        cap), and the weights after dropout, or p. grad: of the weights after dropout, float32, contiguous."""
        dscores = grad if self.in_place else torch.empty_like(p)
        kept = torch.empty_like(p) if self.with_kept and seed is not None else None
        self.launch(p, grad, dscores, kept, cap, (seed, site, *self.dropout), factor, *self.sizes)
        return dscores, p if kept is None else kept
