"""LayerNorm's backward pass over rows that, with the sums of dweight and dbias, would not fit the registers.

The formulas are layer_norm.py's. One kernel walks over each row twice, the second time from the cache; another reads dy
and s once more for the sums over rows, a block of columns at a time: in all 7 * M * N elements with dropout on a
pre-norm site, where narrower rows take 5.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.compile_case import CompileCase, kernel_case
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import ceil_div, chip
from fasttfm.kernels.parameter import (
    Float32Pointer,
    ParameterPointer,
    Pointer,
    ResidualPointer,
    Shape,
)
from fasttfm.kernels.philox import Dropout, dropped, with_seed
from fasttfm.kernels.tiles.rows import COLUMN_SUMS, LAYER_NORM_WIDE

_SHARES = 32
"""Programs among which the rows of a block of columns are divided for their sums."""


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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
        inside = row_inside[:, None] & (columns < N)[None, :]
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        gradient = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        if weight is not None:
            gradient *= tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        value = tl.load(s + offsets, mask=inside, other=0.0).to(tl.float32)
        along_mean += gradient
        along_normal += gradient * (value - row_mean) * row_rstd
    along_mean = tl.sum(along_mean, axis=1)[:, None] / N if mean is not None else 0.0
    along_normal = tl.sum(along_normal, axis=1)[:, None] / N
    for start in range(0, N, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = row_inside[:, None] & (columns < N)[None, :]
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        gradient = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        if weight is not None:
            gradient *= tl.load(weight + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        value = tl.load(s + offsets, mask=inside, other=0.0).to(tl.float32)
        total = row_rstd * (gradient - along_mean - (value - row_mean) * row_rstd * along_normal)
        if ds is not None:
            total += tl.load(ds + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dresidual + offsets, total.to(dresidual.dtype.element_ty), mask=inside)
        if dx is not None:
            if dropout.seed is not None:
                total = dropped(total, with_seed(dropout), 0, rows, start, COLUMNS)
            tl.store(dx + offsets, total.to(dx.dtype.element_ty), mask=inside)


@jit
def _column_sums(
    dy: Pointer,  # (M, N)
    s: ResidualPointer,  # (M, N)
    mean: Float32Pointer,  # (M,), or None: RMSNorm
    rstd: Float32Pointer,  # (M,)
    parts: Float32Pointer,  # (2, programs, N) out, (1, programs, N) for RMSNorm
    shape: Shape,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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


# --------------------------------------------------------------------------------------------------------- launches


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
            ROWS=block.rows, COLUMNS=block.columns, num_warps=block.warps, num_stages=1,
        )  # fmt: skip
        if parts is not None:
            _column_sums[(ceil_div(N, columns.columns), shares)](
                dy, s, mean, rstd, parts, Shape(M, N),
                ROWS=columns.rows, COLUMNS=columns.columns, num_warps=columns.warps, num_stages=1,
            )  # fmt: skip
    return parts


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """With dropout and a gradient of s, for every combination of dtypes that a model has."""
    dtypes: list[tuple[str, dict[str, str]]] = [("fp32", {})]
    for dtype in ("fp16", "bf16"):
        dtypes += [(dtype, {}), (dtype, {"residual": "fp32"}), (dtype, {"parameter": dtype})]
    for dtype, others in dtypes:
        suffix = "".join(f"+{kind}-{what}" for what, kind in others.items())
        name = f"layer_norm_wide.backward/ds+dropout{suffix}"
        yield kernel_case(_backward, name, dtype, LAYER_NORM_WIDE(chip), dtypes=others)
        if "parameter" not in others:
            name = f"layer_norm_wide.column_sums/rows{suffix}"
            yield kernel_case(_column_sums, name, dtype, COLUMN_SUMS(chip), dtypes=others)
    rms = {"mean": None}
    yield kernel_case(_backward, "layer_norm_wide.backward/rms+ds+dropout", "bf16", LAYER_NORM_WIDE(chip), given=rms)
    yield kernel_case(_column_sums, "layer_norm_wide.column_sums/rms+rows", "bf16", COLUMN_SUMS(chip), given=rms)
