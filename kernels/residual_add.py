"""residual + dropout(x), or dropout(x) alone.

Reads x and residual and writes their sum, 3 * M * N elements; the keep-mask is drawn from the seed, M * N / 16 Philox
blocks. Backward is dropout of the gradient and needs no saved tensors.
Source: Vaswani et al. 2017 section 5.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import ceil_div, chip, power_of_two
from fasttfm.kernels.parameter import Pointer, Shape
from fasttfm.kernels.philox import Dropout, drop_loaded, dropout_rate
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
    """Compute out = residual + dropout(x)."""
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
    """Return a tile of 2,048 elements."""
    return PASS(chip, min(512, max(NARROWEST, power_of_two(N))))


class Add:
    """residual + dropout(x), or dropout(x) alone, for one shape and rate; also its own derivative."""

    def __init__(
        self, shape: Sequence[int], device: torch.device, dropout_p: float = 0.0, *, scaled: bool = True
    ) -> None:
        """shape (..., N); scaled: whether to multiply kept values by 1 / (1 - p)."""
        M, N = math.prod(shape[:-1]), shape[-1]
        block, (threshold, scale) = tile(chip(device), N), dropout_rate(dropout_p)
        self.shape, self.dropout = Shape(M, N), (threshold, scale if scaled else 1.0)
        self.launch = Launch(_add_dropped, (ceil_div(M, block.rows), ceil_div(N, block.columns)), block.options())

    def __call__(
        self, x: Tensor, residual: Tensor | None, out: Tensor, seed: Tensor | None = None, site: int = 0
    ) -> Tensor:
        """Write out and return it; out: any dtype, may be x itself. All contiguous; seed None: no dropout."""
        self.launch(x, residual, out, (seed, site, *self.dropout), self.shape)
        return out
