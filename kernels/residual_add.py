"""residual + dropout(x), and dropout alone: the elementwise ends of a residual stream.

Reads x and residual and writes their sum, 3 * M * N elements; the keep-mask is drawn from the seed, M * N / 8 Philox
blocks, so that backward, which is dropout of the gradient, keeps nothing.
Source: Vaswani et al. 2017 section 5.4.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.language as tl
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import Chip, ceil_div, chip, power_of_two
from fasttfm.kernels.philox import dropout_arguments, keep_mask
from fasttfm.kernels.row_tile import NARROWEST, RowTile, row_case, warps


@jit(do_not_specialize=["stream", "threshold", "M"])
def _add_dropped(
    x,  # (M, N)
    residual,  # (M, N) or None
    out,  # (M, N) out
    seed,  # (1,) int64 or None
    stream,
    threshold,
    keep_scale,
    M,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out = residual + dropout(x)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_column = tl.program_id(1) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if seed is not None:
        keep = keep_mask(tl.load(seed), stream, 0, rows, first_column, threshold, COLUMNS)
        value = tl.where(keep, value * keep_scale, 0.0)
    if residual is not None:
        value += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=inside)


def tile(chip: Chip, N: int) -> RowTile:
    """Part of a few rows, 2,048 elements."""
    columns = min(512, max(NARROWEST, power_of_two(N)))
    return RowTile(2048 // columns, columns, warps(chip, 2048))


def residual_add(x, residual, *, dropout_p=0.0, seed=None, stream=0):
    """residual + dropout(x), (M, N) contiguous, in residual's dtype."""
    return _run_add(x, residual, torch.empty_like(residual), *dropout_arguments(dropout_p, seed), stream)


def dropout(x, *, dropout_p, seed, stream, dtype):
    """dropout(x), (M, N) contiguous, in dtype: also its own derivative."""
    return _run_add(x, None, torch.empty_like(x, dtype=dtype), *dropout_arguments(dropout_p, seed), stream)


def drop_(x, seed, stream, threshold):
    """Zeroes what dropout drops of x (M, N) contiguous, in place; what is kept is not scaled."""
    return _run_add(x, None, x, seed, threshold, 1.0, stream)


def _run_add(x, residual, out, seed, threshold, scale, stream):
    M, N = x.shape
    if M:
        to = tile(chip(x.device), N)
        _add_dropped[(ceil_div(M, to.rows), ceil_div(N, to.columns))](
            x, residual, out, seed, stream, threshold, scale, M, N,
            ROWS=to.rows, COLUMNS=to.columns, num_warps=to.warps, num_stages=1,
        )  # fmt: skip
    return out


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    for dtype in ("fp32", "fp16", "bf16"):
        for N in (128, 256, 512):
            arguments = {
                "x": f"*{dtype}",
                "residual": f"*{dtype}",
                "out": f"*{dtype}",
                "seed": "*i64",
                "stream": "i32",
                "threshold": "i32",
                "keep_scale": "fp32",
                "M": "i32",
            }
            yield row_case(_add_dropped, "residual_add", dtype, tile(chip, N), arguments)
