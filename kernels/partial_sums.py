"""Adds up what programs summed on their own, in a fixed order: how parameter gradients stay the same every time.

Reads 4 * P * N bytes for P programs: a few percent of what the programs themselves read.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.launch import Chip, chip
from fasttfm.kernels.row_tile import RowTile, row_case, warps


@triton.jit
def _total(
    parts,  # (P, N) float32
    out,  # (N,) out
    tile,
    P,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, P, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < P)[:, None] & (columns < N)[None, :]
        total += tl.load(parts + rows[:, None] * N + columns[None, :], mask=inside, other=0.0)
    tl.store(out + columns, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=columns < N)


@triton.jit
def _add_parts(
    parts,  # (P, N) float32
    out,  # (N,) out
    parts2,  # (P, N2) float32, or None
    out2,  # (N2,) out, or None
    P,
    N,
    N2,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = tl.program_id(0)
    if out2 is None:
        _total(parts, out, tile, P, N, ROWS, COLUMNS)
    else:
        tiles = tl.cdiv(N, COLUMNS)
        if tile < tiles:
            _total(parts, out, tile, P, N, ROWS, COLUMNS)
        else:
            _total(parts2, out2, tile - tiles, P, N2, ROWS, COLUMNS)


def _tile(chip: Chip) -> RowTile:
    return RowTile(32, 32, warps(chip, 1024))


def add_parts(parts, out, parts2=None, out2=None):
    """out (N,) = sum over P of parts (P, N) float32 contiguous; a second pair, of another N but the same P, likewise.

    In one launch and a fixed order, rounded once to the dtype of what is written.
    """
    P, N = parts.shape
    N2 = 0 if parts2 is None else parts2.shape[1]
    to = _tile(chip(parts.device))
    _add_parts[(triton.cdiv(N, to.columns) + triton.cdiv(N2, to.columns),)](
        parts, out, parts2, out2, P, N, N2, ROWS=to.rows, COLUMNS=to.columns, num_warps=to.warps, num_stages=1
    )


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    for dtype in ("fp32", "bf16"):
        for variant, second in (("two", True), ("one", False)):
            arguments = {
                "parts": "*fp32",
                "out": f"*{dtype}",
                "parts2": "*fp32" if second else None,
                "out2": f"*{dtype}" if second else None,
                "P": "i32",
                "N2": "i32:16" if second else "i32",
            }
            yield row_case(_add_parts, f"partial_sums/{variant}", dtype, _tile(chip), arguments)
