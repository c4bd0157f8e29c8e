"""LayerNorm or RMSNorm, optionally fused with residual connection and dropout; one pass forward, one backward.

    s = residual + dropout(x + x_bias)     y = (s - mean(s)) * rstd(s) * weight + bias,     rstd = (variance + eps)^-1/2

    x^ = (s - mean) * rstd             g = dy * weight
    ds_total = rstd * (g - mean(g) - x^ * mean(g * x^)) + ds           dresidual = ds_total
    dx = dropout'(ds_total)            dweight = sum over rows of dy * x^        dbias = sum over rows of dy
                                       dx_bias = sum over rows of dx

RMSNorm (Zhang and Sennrich 2019) has no mean and no bias, y = s * rstd(s) * weight with rstd = (mean(s^2) + eps)^-1/2,
and its derivative lacks the term mean(g). The kernels select it by mean = None.

x_bias is the bias of the product that computed x: adding it here saves a pass over x, and summing its gradient here a
pass over dx.

Forward reads x and residual, writes y and s: 4 * M * N elements, so an H200 (4.3 TB/s) needs at least 24 us at
M = 25,000, N = 512 in bfloat16. Backward reads dy, ds and s, writes dresidual and dx: 5 * M * N elements with dropout
in a pre-norm layer, 3 * M * N without both. Both passes draw the keep-mask from the seed, M * N / 8 Philox blocks.
Saved for backward: mean and rstd, float32 per row.

A program holds whole rows in registers, several if rows are short. In backward, a fixed number of programs loop over
the row tiles and accumulate partial sums of dweight and dbias in float32, which a second small kernel adds in a fixed
order: deterministic, without atomics. Above WIDEST columns no registers are left for these sums: another kernel then
reads dy and s again, a block of columns at a time, 2 * M * N elements.
Source: Ba et al. 2016; placement of dropout, Vaswani et al. 2017 section 5.4.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import ceil_div, chip, power_of_two
from fasttfm.kernels.parameter import Float32Pointer, ParameterPointer, Pointer, Real, ResidualPointer, Shape
from fasttfm.kernels.partial_sums import Sums
from fasttfm.kernels.philox import Dropout, drop, dropout_rate
from fasttfm.kernels.tiles.rows import COLUMN_SUMS, LAYER_NORM, MAX_COLUMNS, NARROWEST
from fasttfm.kernels.tiles.table import Tile

WIDEST = 4096
"""Most columns for which backward keeps a row and its partial sums of dweight and dbias in registers."""

_SHARES = 32
"""Most programs that share the rows of a block of columns in _column_sums."""


@jit
def _forward(
    x: Pointer,  # (M, N)
    x_bias: ParameterPointer,  # (N,) or None
    residual: ResidualPointer,  # (M, N), or None: s = x, not written; no dropout
    weight: ParameterPointer,  # (N,) or None
    bias: ParameterPointer,  # (N,) or None
    y: Pointer,  # (M, N) out
    s: ResidualPointer,  # (M, N) out, the new residual stream; None without residual
    mean: Float32Pointer,  # (M,) out; None: RMSNorm
    rstd: Float32Pointer,  # (M,) out
    dropout: Dropout,
    eps: Real,
    shape: Shape,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    M, N = shape
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    row_inside = rows < M
    inside = row_inside[:, None] & (columns < N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]

    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if x_bias is not None:
        value += tl.load(x_bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        value = drop(value, dropout, rows, 0, COLUMNS)
        value += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(s.dtype.element_ty)
        tl.store(s + offsets, rounded, mask=inside)
        value = rounded.to(tl.float32)  # backward reads the rounded s

    centered = value
    if mean is not None:
        row_mean = tl.sum(value, axis=1) / N
        centered = tl.where(inside, value - row_mean[:, None], 0.0)
    row_rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / N + eps)
    if mean is not None:
        tl.store(mean + rows, row_mean, mask=row_inside)
    tl.store(rstd + rows, row_rstd, mask=row_inside)

    out = centered * row_rstd[:, None]
    if weight is not None:
        out *= tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        out += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + offsets, out.to(y.dtype.element_ty), mask=inside)


@jit
def _backward(
    dy: Pointer,  # (M, N)
    dy2: Pointer,  # (M, N): gradient of a second use of y, or None
    ds: ResidualPointer,  # (M, N), or None: s has no other use
    s: ResidualPointer,  # (M, N)
    mean: Float32Pointer,  # (M,), or None: RMSNorm
    rstd: Float32Pointer,  # (M,)
    weight: ParameterPointer,  # (N,) or None
    dresidual: ResidualPointer,  # (M, N) out
    dx: Pointer,  # (M, N) out, or None: the same as dresidual
    parts: Float32Pointer,  # (2, programs, N) out: partial sums of dweight and dbias; (1, programs, N) for RMSNorm
    # (no bias); None: not needed
    x_parts: Float32Pointer,  # (programs, N) out: partial sums of dx_bias; or None
    dropout: Dropout,
    shape: Shape,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    M, N = shape
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.arange(0, COLUMNS)
    column_inside = columns < N
    if weight is not None:
        scale = tl.load(weight + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    if parts is not None:
        dweight = tl.zeros((ROWS, COLUMNS), tl.float32)
        if mean is not None:
            dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    if x_parts is not None:
        dx_bias = tl.zeros((ROWS, COLUMNS), tl.float32)

    for block in range(program, tl.cdiv(M, ROWS), programs):
        rows = block * ROWS + tl.arange(0, ROWS)
        row_inside = rows < M
        inside = row_inside[:, None] & column_inside[None, :]
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        gradient = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        if dy2 is not None:
            gradient += tl.load(dy2 + offsets, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(s + offsets, mask=inside, other=0.0).to(tl.float32)
        if mean is not None:
            row_mean = tl.load(mean + rows, mask=row_inside, other=0.0)[:, None]
        row_rstd = tl.load(rstd + rows, mask=row_inside, other=0.0)[:, None]
        if mean is not None:
            value -= row_mean
        normal = value * row_rstd  # garbage past the last column, where gradient is zero
        if parts is not None:
            dweight += gradient * normal
            if mean is not None:
                dbias += gradient
        if weight is not None:
            gradient *= scale
        if mean is not None:
            along_mean = tl.sum(gradient, axis=1)[:, None] / N
        along_normal = tl.sum(gradient * normal, axis=1)[:, None] / N
        if mean is not None:
            gradient -= along_mean
        total = row_rstd * (gradient - normal * along_normal)
        if ds is not None:
            total += tl.load(ds + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dresidual + offsets, total.to(dresidual.dtype.element_ty), mask=inside)
        if dx is not None:
            total = drop(total, dropout, rows, 0, COLUMNS)
            tl.store(dx + offsets, total.to(dx.dtype.element_ty), mask=inside)
        if x_parts is not None:
            dx_bias += tl.where(inside, total, 0.0)

    if parts is not None:
        sums = parts + program * N + columns
        tl.store(sums, tl.sum(dweight, axis=0), mask=column_inside)
        if mean is not None:
            tl.store(sums + programs * N, tl.sum(dbias, axis=0), mask=column_inside)
    if x_parts is not None:
        tl.store(x_parts + program * N + columns, tl.sum(dx_bias, axis=0), mask=column_inside)


@jit
def _column_sums(
    dy: Pointer,  # (M, N)
    s: ResidualPointer,  # (M, N)
    mean: Float32Pointer,  # (M,), or None: RMSNorm
    rstd: Float32Pointer,  # (M,)
    parts: Float32Pointer,  # (2, programs, N) out, (1, programs, N) for RMSNorm
    shape: Shape,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the partial sums of dweight and dbias of program (., p), for a block of columns."""
    M, N = shape
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    column_inside = columns < N
    dweight = tl.zeros((ROWS, COLUMNS), tl.float32)
    if mean is not None:
        dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(program, tl.cdiv(M, ROWS), programs):
        rows = tile * ROWS + tl.arange(0, ROWS)
        row_inside = rows < M
        inside = row_inside[:, None] & column_inside[None, :]
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        gradient = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(s + offsets, mask=inside, other=0.0).to(tl.float32)
        if mean is not None:
            row_mean = tl.load(mean + rows, mask=row_inside, other=0.0)[:, None]
        row_rstd = tl.load(rstd + rows, mask=row_inside, other=0.0)[:, None]
        if mean is not None:
            value -= row_mean
        dweight += gradient * value * row_rstd
        if mean is not None:
            dbias += gradient
    sums = parts + program * N + columns
    tl.store(sums, tl.sum(dweight, axis=0), mask=column_inside)
    if mean is not None:
        tl.store(sums + programs * N, tl.sum(dbias, axis=0), mask=column_inside)


def tile(chip: Chip, N: int, *, backward: bool) -> Tile:
    """Return the tile for rows of N columns. Raises ValueError above MAX_COLUMNS."""
    if N > MAX_COLUMNS:
        raise ValueError(f"LayerNorm over {N} columns: a row must fit in registers, at most {MAX_COLUMNS} columns")
    return LAYER_NORM(chip, max(NARROWEST, power_of_two(N)), "backward" if backward else "forward")


def _programs(chip: Chip, tile: Tile, M: int) -> int:
    """Return how many programs share the row tiles in backward: 24 warps per processor, as many as registers allow."""
    return min(ceil_div(M, tile.rows), max(1, 24 // tile.warps) * chip.processors)


class Forward:
    """The forward pass for one signature: contiguous x and residual (..., N); weight, bias and x_bias (N,) or None."""

    def __init__(self, x: Tensor, residual: Tensor | None, *, rms: bool = False, dropout_p: float = 0.0) -> None:
        """rms: RMSNorm instead of LayerNorm."""
        N = x.shape[-1]
        M = x.numel() // N
        self.M, self.shape = M, x.shape
        self.joined, self.rms, self.numbers = residual is not None, rms, Shape(M, N)
        self.dropout = dropout_rate(dropout_p)
        block = tile(chip(x.device), N, backward=False)
        self.launch = Launch(_forward, (ceil_div(M, block.rows),), block.options())

    def __call__(
        self, x: Tensor, residual: Tensor | None, x_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        eps: float, seed: Tensor | None = None, site: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return y in x's dtype, s in residual's dtype (x itself without residual), mean (empty for RMSNorm) and rstd
        (M,) float32."""
        M = self.M
        y = x.new_empty(self.shape)
        s = residual.new_empty(self.shape) if residual is not None else x
        rstd = x.new_empty(M, dtype=torch.float32)
        mean = x.new_empty(0 if self.rms else M, dtype=torch.float32)
        self.launch(
            x, x_bias, residual, weight, bias, y, s if self.joined else None, None if self.rms else mean, rstd,
            (seed, site, *self.dropout), eps, self.numbers,
        )  # fmt: skip
        return y, s, mean, rstd


class Backward:
    """The backward pass for one signature."""

    def __init__(
        self, s: Tensor, *parameters: Tensor | None, x_dtype: torch.dtype | None = None, rms: bool = False,
        dropout_p: float = 0.0,
    ) -> None:  # fmt: skip
        """s: of Forward; parameters: its x_bias, weight and bias. x_dtype: dtype of dx, None if dx equals ds_total.
        rms, dropout_p: as for Forward."""
        N = s.shape[-1]
        M = s.numel() // N
        device = chip(s.device)
        self.numbers, self.x_dtype, self.rms = Shape(M, N), x_dtype, rms
        self.wide = wide = N > WIDEST
        self.dropout = dropout_rate(dropout_p)
        block, columns = tile(device, N, backward=True), COLUMN_SUMS(device)
        programs = _programs(device, block, M)
        shares = min(_SHARES, ceil_div(M, columns.rows)) if wide else programs
        self.launch = Launch(_backward, (programs,), block.options())
        self.columns = Launch(_column_sums, (ceil_div(N, columns.columns), shares), columns.options())
        x_bias, weight, bias = parameters
        self.copied = weight is not None and not weight.is_contiguous()
        self.parts = None if weight is None and bias is None else (1 if rms else 2, shares, N)
        self.x_parts = None if x_bias is None else (1 if wide else programs, N)
        summed = [(place, each) for place, each in enumerate(parameters) if each is not None]
        shapes = [(1 if wide and not place else shares, N) for place, _ in summed]
        places, dtypes = [place for place, _ in summed], [each.dtype for _, each in summed]
        self.sums = Sums(places, shapes, dtypes, device)

    def __call__(
        self, dy: Tensor, dy2: Tensor | None, ds: Tensor | None, s: Tensor, mean: Tensor | None, rstd: Tensor,
        x_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None, seed: Tensor | None = None, site: int = 0,
    ) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """Return dx (None if it equals ds_total), ds_total, and the gradients of x_bias, weight and bias (or None).

        dy, dy2, ds: gradients of y, of a second use of y, and of s, contiguous; dy2 and ds may be None.
        """
        dresidual = torch.empty_like(s)
        dx = None if self.x_dtype is None else torch.empty_like(s, dtype=self.x_dtype)
        wide = self.wide
        if self.copied:
            weight = weight.contiguous()  # type: ignore[union-attr]
        if wide and dy2 is not None:
            dy, dy2 = dy + dy2, None
        parts = None if self.parts is None else s.new_empty(self.parts, dtype=torch.float32)
        x_parts = None if self.x_parts is None or wide else s.new_empty(self.x_parts, dtype=torch.float32)
        self.launch(
            dy, dy2, ds, s, None if self.rms else mean, rstd, weight, dresidual, dx,
            None if wide else parts, x_parts, (seed, site, *self.dropout), self.numbers,
        )  # fmt: skip
        if wide and parts is not None:
            self.columns(dy, s, None if self.rms else mean, rstd, parts, self.numbers)
        if wide and self.x_parts is not None:
            total = dresidual if dx is None else dx
            x_parts = total.view(-1, s.shape[-1]).sum(0, keepdim=True, dtype=torch.float32)
        sums = x_parts, None if weight is None else parts[0], None if bias is None else parts[-1]  # type: ignore[index]
        return dx, dresidual, *self.sums(sums)
