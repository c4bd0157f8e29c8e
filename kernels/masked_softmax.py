"""Scale, mask, softmax and dropout in one pass over scores that cuBLAS made and for weights that cuBLAS takes.

    P = softmax(cap(scores * scale) + mask)        W = dropout(P)
    dscores = factor * cap' * P * (dropout'(dW) - rowsum(P * dropout'(dW)))

For chips on which Triton's products do not reach the tensor cores (V100, T4), for head sizes above 256 and wherever the
weights themselves are asked for. Windows, ALiBi and sinks are those of attention/steps.py. Scores and dW are float32.
Forward reads scores and writes P (over them if told so) and, under dropout, W: 2 to 3 times B * H * L * S elements.
Backward reads P and dW, writes dscores (over dW if told so) and, if asked, W once more, whose mask it draws anew; with
a soft cap it reads the scores, too. Rows of up to ONE_PASS keys stay in registers; longer ones are walked over twice.
Source: Vaswani et al. 2017, section 3.2.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.attention import steps
from fasttfm.kernels.attention.launch import masking_arguments
from fasttfm.kernels.attention.problem import Head, Masking, Sizes
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import ceil_div, chip, power_of_two
from fasttfm.kernels.parameter import Float32Pointer, Int64Pointer, Pointer, Real, RealOrNone, Size, Varying
from fasttfm.kernels.philox import Dropout, dropout_arguments, dropped, with_seed
from fasttfm.kernels.tiles.attention import MASKED_SOFTMAX

ONE_PASS = 8192


class Cap(NamedTuple):
    """A soft cap and the scores that it was laid on, for its derivative."""

    scores: Float32Pointer
    """(B, H, L, S), as the forward pass was given them; None: there is no cap."""
    scale: RealOrNone
    softcap: RealOrNone


@triton.jit
def _scores(
    x, first_row, column, scale, masking, L, S, visible, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """(ROWS, COLUMNS) scores in base 2 from `column` on; x: the tile's first row, masking: its plane's."""
    rows = tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < L - first_row) & (columns[None, :] < visible)
    offsets = rows[:, None] * S + columns[None, :]
    s = steps.capped(tl.load(x + offsets, mask=inside, other=0.0) * scale, masking)
    return steps.hide(s, first_row, column, masking, L, visible, CAUSAL, True, "plain")


@triton.jit
def _store(
    p, kept, weights, first_row, column, L, S, plane, dropout, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Writes weights (ROWS, COLUMNS), and the same after dropout; p and kept: the tile's first row in each."""
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
    p: Pointer,  # (B, H, L, S) out, the weights; may be scores
    kept: Pointer,  # (B, H, L, S) out, after dropout; None without it
    lse: Float32Pointer,  # (B, H, L) out, log2 of the sum of a row's exponentiated scores; None: not asked for
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
    masking = steps.masking_of(masking, Head(plane, b, (plane % H).to(tl.int64), 0, 0, L, S, S), Sizes(H, L, S))
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
    """The weights, the gradient of the weights before dropout and the weights after it, float32."""
    weights = tl.load(p + offsets, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dkept + offsets, mask=inside, other=0.0)
    gradient = tl.where(weights == 0.0, 0.0, gradient)  # of a hidden key it may be inf
    kept = weights
    if dropout.seed is not None:
        gradient = dropped(gradient, dropout, plane, rows, column, COLUMNS)
        kept = dropped(weights, dropout, plane, rows, column, COLUMNS)
    return weights, gradient, kept


@triton.jit
def _uncapped(ds, cap, begin, offsets, inside):
    """The gradient of the scores before the soft cap from that after it."""
    if cap.scores is not None:
        s = tl.load(cap.scores + begin + offsets, mask=inside, other=0.0) * (cap.scale * steps.LOG2E)
        ds *= steps.cap_slope(steps.capped(s, cap), cap)
    return ds


@jit
def _backward(
    p: Pointer,  # (B, H, L, S), the weights before dropout
    dkept: Float32Pointer,  # (B, H, L, S), gradient of the weights after dropout
    dscores: Pointer,  # (B, H, L, S) out; may be dkept
    kept: Pointer,  # (B, H, L, S) out, the weights after dropout; None: not asked for
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


def _launch(x: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """Grid, constants and options of a pass over x (B, H, L, S)."""
    batch, heads, queries, keys = x.shape
    columns = max(16, power_of_two(keys))
    one = columns <= ONE_PASS
    tile = MASKED_SOFTMAX(chip(x.device), columns if one else 2048)
    return (ceil_div(queries, tile.rows) * batch * heads,), {"ONE": one, **tile.options()}


def forward(
    scores: Tensor,
    scale: float,
    *,
    key_lengths: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
    lse: Tensor | None = None,
    dtype: torch.dtype | None = None,
    in_place: bool = False,
    **places: Any,
) -> tuple[Tensor, Tensor | None]:
    """scores (B, H, L, S) float32, contiguous; the rest as fasttfm.functional.attention's Options, places
    masking_arguments()'s; lse: memory (B, H, L) float32 for the log-sum-exp, in base 2, of rows with a key or a sink.

    Returns the weights before dropout in dtype, in scores' own memory where that may be, and after it (None without
    dropout).
    """
    p = scores if in_place and dtype in (None, scores.dtype) else torch.empty_like(scores, dtype=dtype)
    dropout = dropout_arguments(dropout_p, seed, site)
    kept = None if dropout.seed is None else torch.empty_like(p)
    if scores.numel():
        if key_lengths is not None:
            key_lengths = key_lengths.contiguous()
        masking = masking_arguments(scores.shape, **places)
        grid, options = _launch(scores)
        _forward[grid](
            scores, p, kept, lse, key_lengths, masking, dropout, scale, *scores.shape[1:], CAUSAL=causal, **options
        )
    elif lse is not None:
        lse.zero_()
    return p, kept


def backward(
    grad: Tensor,
    p: Tensor,
    factor: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
    *,
    cap: tuple[Tensor, float, float] | None = None,
    in_place: bool = False,
    with_kept: bool = False,
) -> tuple[Tensor, Tensor]:
    """grad float32, of the weights after dropout, and p (B, H, L, S) contiguous; cap: scores, scale and softcap of
    forward().

    Returns the gradient of the masked scores times factor in p's dtype, with cap that of the scores before the soft
    cap, in grad's own memory if it may be (in_place), and, if asked, the weights after dropout (p itself without
    dropout).
    """
    dscores = grad if in_place and grad.dtype == p.dtype else torch.empty_like(p)
    dropout = dropout_arguments(dropout_p, seed, site)
    kept = torch.empty_like(p) if with_kept and dropout.seed is not None else None
    if p.numel():
        grid, options = _launch(p)
        _backward[grid](p, grad, dscores, kept, Cap(*(cap or (None,) * 3)), dropout, factor, *p.shape[2:], **options)
    return dscores, p if kept is None else kept
