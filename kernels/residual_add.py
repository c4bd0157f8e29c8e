"""residual + dropout(x), and dropout alone: the elementwise ends of a residual stream.

Reads x and residual and writes their sum, 3 * M * N elements; the keep-mask is drawn from the seed, M * N / 16 Philox
blocks, so that backward, which is dropout of the gradient, keeps nothing.
Source: Vaswani et al. 2017 section 5.4.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import ceil_div, chip, power_of_two
from fasttfm.kernels.parameter import Pointer, Shape
from fasttfm.kernels.philox import Dropout, drop_loaded, dropout_arguments
from fasttfm.kernels.tiles.rows import NARROWEST, PASS
from fasttfm.kernels.tiles.table import Tile


@jit
def _add_dropped(
    x: Pointer,  # (M, N)
    residual: Pointer,  # (M, N) or None
    out: Pointer,  # (M, N) out
    dropout: Dropout,
    shape: Shape,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = residual + dropout(x)."""
    M, N = shape
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_column = tl.program_id(1) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    value = drop_loaded(tl.load(x + offsets, mask=inside, other=0.0), dropout, rows, first_column, COLUMNS)
    if residual is not None:
        value += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=inside)


def tile(chip: Chip, N: int) -> Tile:
    """Part of a few rows, 2,048 elements."""
    return PASS(chip, min(512, max(NARROWEST, power_of_two(N))))


def residual_add(x: Tensor, residual: Tensor, **dropout: Any) -> Tensor:
    """residual + dropout(x), (M, N) contiguous, in residual's dtype; dropout as dropout_arguments() takes it."""
    return _run_add(x, residual, torch.empty_like(residual), dropout_arguments(**dropout))


def dropout(x: Tensor, dtype: torch.dtype, **dropout: Any) -> Tensor:
    """dropout(x), (M, N) contiguous, in dtype: also its own derivative."""
    return _run_add(x, None, torch.empty_like(x, dtype=dtype), dropout_arguments(**dropout))


def drop_(x: Tensor, dropout: Dropout) -> Tensor:
    """Zeroes what dropout drops of x (M, N) contiguous, in place; what is kept is not scaled."""
    return _run_add(x, None, x, dropout._replace(keep_scale=1.0))


def _run_add(x: Tensor, residual: Tensor | None, out: Tensor, dropout: Dropout) -> Tensor:
    M, N = x.shape
    if M:
        block = tile(chip(x.device), N)
        _add_dropped[(ceil_div(M, block.rows), ceil_div(N, block.columns))](
            x, residual, out, dropout, Shape(M, N),
            **block.options(),
        )  # fmt: skip
    return out
