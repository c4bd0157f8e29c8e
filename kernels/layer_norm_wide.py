"""LayerNorm's backward pass over rows that, with the sums of dweight and dbias, would not fit the registers.

The formulas are layer_norm.py's. One kernel walks over each row twice, the second time from the cache; another reads dy
and s once more for the sums over rows, a block of columns at a time: in all 7 * M * N elements with dropout on a
pre-norm site, where narrower rows take 5.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import ceil_div, chip
from fasttfm.kernels.parameter import Float32Pointer, ParameterPointer, Pointer, ResidualPointer, Shape
from fasttfm.kernels.philox import Dropout, drop
from fasttfm.kernels.tiles.rows import COLUMN_SUMS, LAYER_NORM_WIDE

_SHARES = 32
"""Programs among which the rows of a block of columns are divided for their sums."""


@triton.jit
def _load(dy, s, weight, rows, columns, M, N):
    """The elements of a tile that are inside, their places, dy * weight and s."""
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    gradient = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        gradient *= tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    return inside, offsets, gradient, tl.load(s + offsets, mask=inside, other=0.0).to(tl.float32)


@jit
def _backward(
    dy: Pointer,  # (M, N)
    ds: ResidualPointer,  # (M, N), or None: nothing but the LayerNorm used s
    s: ResidualPointer,  # (M, N)
    mean: Float32Pointer,  # (M,), or None: RMSNorm
    rstd: Float32Pointer,  # (M,)
    weight: ParameterPointer,  # (N,) or None
    dresidual: ResidualPointer,  # (M, N) out
    dx: Pointer,  # (M, N) out, or None: the same as dresidual
    dropout: Dropout,
    shape: Shape,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Block of columns by block, once for the two means and once for all else."""
    M, N = shape
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_inside = rows < M
    row_mean = 0.0
    if mean is not None:
        row_mean = tl.load(mean + rows, mask=row_inside, other=0.0)[:, None]
    row_rstd = tl.load(rstd + rows, mask=row_inside, other=0.0)[:, None]
    along_mean = tl.zeros((ROWS, COLUMNS), tl.float32)
    along_normal = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, N, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside, offsets, gradient, value = _load(dy, s, weight, rows, columns, M, N)
        along_mean += gradient
        along_normal += gradient * (value - row_mean) * row_rstd
    along_mean = tl.sum(along_mean, axis=1)[:, None] / N if mean is not None else 0.0
    along_normal = tl.sum(along_normal, axis=1)[:, None] / N
    for start in range(0, N, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside, offsets, gradient, value = _load(dy, s, weight, rows, columns, M, N)
        total = row_rstd * (gradient - along_mean - (value - row_mean) * row_rstd * along_normal)
        if ds is not None:
            total += tl.load(ds + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dresidual + offsets, total.to(dresidual.dtype.element_ty), mask=inside)
        if dx is not None:
            total = drop(total, dropout, rows, start, COLUMNS)
            tl.store(dx + offsets, total.to(dx.dtype.element_ty), mask=inside)


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
    """Add the rows of program (., p) to dweight and dbias, for a block of columns."""
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
        _, _, gradient, value = _load(dy, s, None, rows, columns, M, N)
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


def wide_backward(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    dresidual: Tensor,
    dx: Tensor | None,
    dropout: Dropout,
    *,
    sums: bool,
) -> Tensor | None:
    """Writes dresidual and dx; the other tensors (M, N) contiguous, weight (N,).

    Returns with sums the parts of dweight and dbias (2, P, N) float32, of dweight (1, P, N) without mean, else None.
    """
    M, N = s.shape
    device = chip(s.device)
    block, columns = LAYER_NORM_WIDE(device), COLUMN_SUMS(device)
    shares = min(_SHARES, ceil_div(M, block.rows))
    parts = torch.empty(1 if mean is None else 2, shares, N, dtype=torch.float32, device=s.device) if sums else None
    if M:
        _backward[(ceil_div(M, block.rows),)](
            dy, ds, s, mean, rstd, weight, dresidual, dx, dropout, Shape(M, N),
            **block.options(),
        )  # fmt: skip
        if parts is not None:
            _column_sums[(ceil_div(N, columns.columns), shares)](
                dy, s, mean, rstd, parts, Shape(M, N),
                **columns.options(),
            )  # fmt: skip
    return parts
