"""residual + dropout(x), and dropout alone: the elementwise ends of a residual stream.

Reads x and residual and writes their sum, 3 * M * N elements; the keep-mask is drawn from the seed, M * N / 8 Philox
blocks, so that backward, which is dropout of the gradient, keeps nothing.
Source: Vaswani et al. 2017 section 5.4.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.compile_case import CompileCase, kernel_case
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import ceil_div, chip, power_of_two
from fasttfm.kernels.parameter import Pointer, Shape
from fasttfm.kernels.philox import Dropout, drop, dropout_arguments
from fasttfm.kernels.tiles.rows import NARROWEST, RESIDUAL_ADD, RowTile


@jit
def _add_dropped(
    x: Pointer,  # (M, N)
    residual: Pointer,  # (M, N) or None
    out: Pointer,  # (M, N) out
    dropout: Dropout,
    shape: Shape,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out = residual + dropout(x)."""
    M, N = shape
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_column = tl.program_id(1) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    value = drop(value, dropout, rows, first_column, COLUMNS)
    if residual is not None:
        value += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=inside)


def tile(chip: Chip, N: int) -> RowTile:
    """Part of a few rows, 2,048 elements."""
    return RESIDUAL_ADD(chip, min(512, max(NARROWEST, power_of_two(N))))


def residual_add(
    x: Tensor, residual: Tensor, *, dropout_p: float = 0.0, seed: Tensor | None = None, site: int = 0
) -> Tensor:
    """residual + dropout(x), (M, N) contiguous, in residual's dtype."""
    return _run_add(x, residual, torch.empty_like(residual), dropout_arguments(dropout_p, seed, site))


def dropout(x: Tensor, *, dropout_p: float, seed: Tensor | None, site: int, dtype: torch.dtype) -> Tensor:
    """dropout(x), (M, N) contiguous, in dtype: also its own derivative."""
    return _run_add(x, None, torch.empty_like(x, dtype=dtype), dropout_arguments(dropout_p, seed, site))


def drop_(x: Tensor, dropout: Dropout) -> Tensor:
    """Zeroes what dropout drops of x (M, N) contiguous, in place; what is kept is not scaled."""
    return _run_add(x, None, x, dropout._replace(keep_scale=1.0))


def _run_add(x: Tensor, residual: Tensor | None, out: Tensor, dropout: Dropout) -> Tensor:
    M, N = x.shape
    if M:
        block = tile(chip(x.device), N)
        _add_dropped[(ceil_div(M, block.rows), ceil_div(N, block.columns))](
            x, residual, out, dropout, Shape(M, N),
            ROWS=block.rows, COLUMNS=block.columns, num_warps=block.warps, num_stages=1,
        )  # fmt: skip
    return out


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile, with dropout and a residual."""
    for dtype in ("fp32", "fp16", "bf16"):
        for N in (128, 256, 512):
            yield kernel_case(_add_dropped, "residual_add", dtype, tile(chip, N))
