"""Label-smoothed cross entropy that overwrites the logits with their gradient.

    top = max over v of x[v]        total = sum over v of exp(x[v] - top)
    nll = log(total) + top - x[target]
    loss = (1 - a) nll + a (log(total) + top - mean over v of x[v])
    dx[v] = factor * (exp(x[v] - top) / total - a / V - (1 - a) [v == target])

The log-sum-exp, top + log(total), is never formed: for logits of 60,000 its rounding error is 0.002, which every
probability would inherit.

A program owns a row. The first pass computes the maximum, the sum of exponentials (online: rescaled as the maximum
grows, Milakov and Gimelshein 2018; per-thread maxima are merged at the end) and the plain sum. The second overwrites
the logits with the gradient, from the last tile back because the cache still holds it. A row of one tile, more than
half full, stays in registers between the passes. Traffic is 2 * M * V elements, with 2 * M * V exponentials: an H200
(4.3 TB/s) needs at least 0.86 ms at M = 25,000, V = 37,000 in bfloat16; a separate gradient would need another 1.85 GB.
Statistics are float32.
Source: Szegedy et al. 2016; Vaswani et al. 2017 section 5.4; torch.nn.functional.cross_entropy's definition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import ceil_div, chip, power_of_two
from fasttfm.kernels.parameter import Float32Pointer, Int64Pointer, Pointer, Real, Size, Stride, Varying
from fasttfm.kernels.tiles.rows import CROSS_ENTROPY
from fasttfm.kernels.wide import wide

LOG2E = tl.constexpr(1.4426950408889634)
HELD = tl.constexpr(16)  # elements per thread and tile, for rows of several tiles


@triton.jit
def _gradient(below, share, factor, smoothing, V):
    """Return factor * d loss / d x in float32 for classes other than the target; below: x - top; share: 1 / total, the
    largest logit's probability."""
    return tl.exp2(below * LOG2E) * (share * factor) - factor * (smoothing / V)


@triton.jit
def _store_target(row, t, exists, below, share, factor, smoothing, V):
    """Overwrite the target's gradient after its tile is stored, so that no element is compared with the target."""
    tl.debug_barrier()
    out = _gradient(below, share, factor, smoothing, V) - factor * (1.0 - smoothing)
    tl.store(row + t, out.to(row.dtype.element_ty), mask=exists)


@triton.jit
def _walk(row, whole, COLUMNS: tl.constexpr):
    """Return per-thread statistics of a row's whole tiles, (COLUMNS / HELD,) each: maximum, sum of exponentials, sum of
    x - base, and base. Threads do not exchange anything, so no tile waits for a reduction."""
    columns = _columns(row, COLUMNS)
    top = tl.full((columns.shape[1],), float("-inf"), tl.float32)
    total = tl.zeros((columns.shape[1],), tl.float32)
    distance = tl.zeros((columns.shape[1],), tl.float32)
    base = tl.zeros((columns.shape[1],), tl.float32)
    for first in range(0, whole, COLUMNS):
        x = wide(tl.load(row + first + columns))
        higher = tl.maximum(top, tl.max(tl.max(x, axis=2), axis=0))
        before = base
        base = tl.where(higher == float("-inf"), 0.0, higher)  # all -inf so far: -inf - -inf would be NaN
        below = x - base[None, :, None]
        total = total * tl.exp2((top - base) * LOG2E) + tl.sum(tl.sum(tl.exp2(below * LOG2E), axis=2), axis=0)
        distance += (before - base) * (first // COLUMNS * HELD) + tl.sum(tl.sum(below, axis=2), axis=0)
        top = higher
    return top, total, distance, base


@triton.jit
def _add_both(first, second, other, another):
    return first + other, second + another


@triton.jit
def _columns(row, COLUMNS: tl.constexpr):
    """Return a tile's columns, (HELD / GROUP, COLUMNS / HELD, GROUP): the middle axis is the thread, the last one a
    16-byte load."""
    GROUP: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth
    parts = tl.arange(0, HELD // GROUP)[:, None, None] * (COLUMNS // HELD * GROUP)
    return parts + tl.arange(0, COLUMNS // HELD)[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]


@triton.jit
def _overwrite(row, first, top, share, factor, smoothing, V, COLUMNS: tl.constexpr, CHECKED: tl.constexpr):
    """Overwrite a tile's logits with their gradient."""
    columns = first + tl.arange(0, COLUMNS)
    if CHECKED:
        x = tl.load(row + columns, mask=columns < V, other=0.0).to(tl.float32)
        out = _gradient(x - top, share, factor, smoothing, V)
        tl.store(row + columns, out.to(row.dtype.element_ty), mask=columns < V)
    else:
        x = wide(tl.load(row + columns))
        out = _gradient(x - top, share, factor, smoothing, V)
        tl.store(row + columns, out.to(row.dtype.element_ty))


@jit
def _forward(
    logits: Pointer,  # (M, V), rows `stride` elements apart; OVERWRITE: replaced by the gradient
    target: Int64Pointer,  # (M,)
    losses: Float32Pointer,  # (2, M) out: loss, and loss without smoothing, of every row
    statistics: Float32Pointer,  # (2, M) out: largest logit of every row, and its probability; or None
    factor: Float32Pointer,  # () or (M,), multiplies the gradient; None: 1
    factor_step: Varying,  # 0 or 1
    smoothing: Real,
    ignore_index: Varying,
    stride: Stride,
    M: Varying,
    V: Size,
    COLUMNS: tl.constexpr,
    ONE_TILE: tl.constexpr,  # the row stays in registers: COLUMNS / 2 < V <= COLUMNS
    OVERWRITE: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    t = tl.load(target + row)
    counted = t != ignore_index
    if counted:
        # A target outside [0, V) is not loaded and gives a NaN loss.
        exists = (t >= 0) & (t < V)
        whole = V // COLUMNS * COLUMNS
        picked = tl.load(logits + t, mask=exists, other=float("nan")).to(tl.float32)
        if ONE_TILE:
            # Two halves in unmasked 16-byte loads, and less than 16 bytes at the end. The second half begins at a
            # multiple of 16 bytes, so it repeats whole groups of the first, which the sums leave out.
            HALF: tl.constexpr = COLUMNS // 2
            GROUP: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
            groups = tl.arange(0, HALF // GROUP)
            lower = logits + (groups * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
            begin = (V - HALF) // GROUP * GROUP
            upper = lower + begin
            last = begin + HALF + tl.arange(0, GROUP)
            left = last < V
            x, x2 = wide(tl.load(lower)), wide(tl.load(upper))
            x3 = tl.load(logits + last, mask=left, other=float("-inf")).to(tl.float32)
            top = tl.maximum(tl.max(tl.max(tl.maximum(x, x2), axis=1), axis=0), tl.max(x3, axis=0))
            below, below2, below3 = x - top, x2 - top, x3 - top
            fresh = begin + groups * GROUP >= HALF
            total = tl.sum(tl.exp2(below * LOG2E), axis=1)
            total += tl.where(fresh, tl.sum(tl.exp2(below2 * LOG2E), axis=1), 0.0)
            total = tl.sum(total, axis=0) + tl.sum(tl.exp2(below3 * LOG2E), axis=0)
            distance = tl.sum(below, axis=1) + tl.where(fresh, tl.sum(below2, axis=1), 0.0)
            distance = tl.sum(distance, axis=0) + tl.sum(tl.where(left, below3, 0.0), axis=0)
        else:
            tops, totals, distances, base = _walk(logits, whole, COLUMNS)
            columns = whole + _columns(logits, COLUMNS)
            x = wide(tl.load(logits + columns, mask=columns < V, other=float("-inf")))
            top = tl.max(tl.maximum(tops, tl.max(tl.max(x, axis=2), axis=0)), axis=0)
            below = x - top
            totals *= tl.exp2((tops - top) * LOG2E)
            totals += tl.sum(tl.sum(tl.exp2(below * LOG2E), axis=2), axis=0)
            below = tl.where(columns < V, below, 0.0)
            distances += (base - top) * (whole // COLUMNS * HELD) + tl.sum(tl.sum(below, axis=2), axis=0)
            total, distance = tl.reduce((totals, distances), 0, _add_both)
        logarithm = tl.log(total)
        share = 1.0 / total
        nll = logarithm + (top - picked)
        # A logit of -inf makes the loss infinite with smoothing, and is ignored without, as in torch.
        spread = tl.where(smoothing > 0.0, smoothing * (logarithm - distance / V), 0.0)
        tl.store(losses + row, (1.0 - smoothing) * nll + spread)
        tl.store(losses + M + row, nll)
        if statistics is not None:
            tl.store(statistics + row, top)
            tl.store(statistics + M + row, share)
        if OVERWRITE:
            scale = 1.0
            if factor is not None:
                scale = tl.load(factor + row * factor_step)
            if ONE_TILE:
                tl.debug_barrier()  # all threads must have read `picked` before it is overwritten
                out = _gradient(below, share, scale, smoothing, V)
                tl.store(lower, out.to(logits.dtype.element_ty))
                out = _gradient(below2, share, scale, smoothing, V)
                tl.store(upper, out.to(logits.dtype.element_ty), mask=fresh[:, None])
                out = _gradient(below3, share, scale, smoothing, V)
                tl.store(logits + last, out.to(logits.dtype.element_ty), mask=left)
            else:
                if whole < V:
                    _overwrite(logits, whole, top, share, scale, smoothing, V, COLUMNS, True)
                for done in range(COLUMNS, whole + 1, COLUMNS):
                    _overwrite(logits, whole - done, top, share, scale, smoothing, V, COLUMNS, False)
            _store_target(logits, t, exists, picked - top, share, scale, smoothing, V)
    else:
        tl.store(losses + row, 0.0)
        tl.store(losses + M + row, 0.0)
        if statistics is not None:
            tl.store(statistics + row, 0.0)
            tl.store(statistics + M + row, 1.0)
        if OVERWRITE:
            for first in range(0, V, COLUMNS):
                columns = first + tl.arange(0, COLUMNS)
                zeros = tl.zeros((COLUMNS,), logits.dtype.element_ty)
                tl.store(logits + columns, zeros, mask=columns < V)


@jit
def _backward(
    logits: Pointer,  # (M, V), rows `stride` apart
    target: Int64Pointer,  # (M,)
    statistics: Float32Pointer,  # (2, M)
    gradient: Pointer,  # (M, V) out, contiguous
    factor: Float32Pointer,  # () or (M,)
    factor_step: Varying,  # 0 or 1
    smoothing: Real,
    ignore_index: Varying,
    stride: Stride,
    M: Varying,
    V: Size,
    COLUMNS: tl.constexpr,
):
    """Compute the gradient out of place in the backward pass, for logits that are still needed."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.load(target + row)
    logits += row.to(tl.int64) * stride
    gradient += row.to(tl.int64) * V
    out = tl.zeros((COLUMNS,), tl.float32)
    if t != ignore_index:
        x = wide(tl.load(logits + columns, mask=columns < V, other=0.0))
        top, share = tl.load(statistics + row), tl.load(statistics + M + row)
        scale = tl.load(factor + row * factor_step)
        out = _gradient(x - top, share, scale, smoothing, V)
        tl.store(gradient + columns, out.to(gradient.dtype.element_ty), mask=columns < V)
        mine = (t >= 0) & (t < V) & (t // COLUMNS == tl.program_id(1))
        below = tl.load(logits + t, mask=mine, other=0.0).to(tl.float32) - top
        _store_target(gradient, t, mine, below, share, scale, smoothing, V)
    else:
        tl.store(gradient + columns, out.to(gradient.dtype.element_ty), mask=columns < V)


_SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_WIDEST = 4096  # widest row that stays in registers


def size_class(V: int) -> int:
    """Return the smallest of _SIZES >= V, else the largest."""
    return min(_SIZES[-1], max(_SIZES[0], power_of_two(V)))


class Forward:
    """The loss of every row of logits, for one signature."""

    def __init__(
        self, logits: Tensor, target: Tensor, *, label_smoothing: float, ignore_index: int, overwrite: bool = False,
        factor_step: int = 0,
    ) -> None:  # fmt: skip
        """logits (M, V) with unit stride along V, only shape and strides are used; target (M,) int64. overwrite: the
        logits become factor * d loss / d logits; factor_step: stride of factor, 0 for a scalar."""
        self.M, V = logits.shape
        block = CROSS_ENTROPY(chip(target.device), size_class(V))
        constants = {"ONE_TILE": block.columns >= V > block.columns // 2, "OVERWRITE": overwrite}
        self.launch, self.overwrite = Launch(_forward, (self.M,), constants | block.options()), overwrite
        self.numbers = factor_step, label_smoothing, ignore_index, logits.stride(0), self.M, V

    def __call__(self, logits: Tensor, target: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return losses (2, M) float32, with and without smoothing, 0 for ignored rows; and statistics (2, M) float32
        for Backward: the largest logit of every row and its probability, None with overwrite.

        target: contiguous; factor () or (M,) float32, None for 1.
        """
        losses = logits.new_empty((2, self.M), dtype=torch.float32)
        statistics = None if self.overwrite else torch.empty_like(losses)
        self.launch(logits, target, losses, statistics, factor, *self.numbers)
        return losses, statistics


class Backward:
    """The gradient of rows of logits, for one signature."""

    def __init__(self, logits: Tensor, *, label_smoothing: float, ignore_index: int, factor_step: int) -> None:
        """Arguments as for Forward."""
        M, V = self.shape = logits.shape
        block = CROSS_ENTROPY(chip(logits.device), min(_WIDEST, size_class(V)))
        self.launch = Launch(_backward, (M, ceil_div(V, block.columns)), block.options())
        self.numbers = factor_step, label_smoothing, ignore_index, logits.stride(0), M, V

    def __call__(self, factor: Tensor, logits: Tensor, target: Tensor, statistics: Tensor) -> Tensor:
        """Return factor * d loss / d logits, (M, V) contiguous in logits' dtype; arguments as for Forward."""
        gradient = logits.new_empty(self.shape)
        self.launch(logits, target, statistics, gradient, factor, *self.numbers)
        return gradient
