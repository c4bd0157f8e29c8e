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
def _add_parts(
    parts,  # (2, P, N) float32
    dweight,  # (N,) out, or None
    dbias,  # (N,) out, or None
    P,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.zeros((ROWS, COLUMNS), tl.float32)
    second = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, P, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < P)[:, None] & (columns < N)[None, :]
        offsets = rows[:, None] * N + columns[None, :]
        if dweight is not None:
            first += tl.load(parts + offsets, mask=inside, other=0.0)
        if dbias is not None:
            second += tl.load(parts + P * N + offsets, mask=inside, other=0.0)
    if dweight is not None:
        tl.store(dweight + columns, tl.sum(first, axis=0).to(dweight.dtype.element_ty), mask=columns < N)
    if dbias is not None:
        tl.store(dbias + columns, tl.sum(second, axis=0).to(dbias.dtype.element_ty), mask=columns < N)


def _tile(chip: Chip) -> RowTile:
    return RowTile(32, 32, warps(chip, 1024))


def add_parts(parts, first, second):
    """first (N,) = sum of parts[0], second (N,) = sum of parts[1], either may be None; parts (1 or 2, P, N) float32.

    In a fixed order, rounded once to the dtype of what they are written to.
    """
    _, P, N = parts.shape
    to = _tile(chip(parts.device))
    _add_parts[(triton.cdiv(N, to.columns),)](
        parts, first, second, P, N, ROWS=to.rows, COLUMNS=to.columns, num_warps=to.warps, num_stages=1
    )


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    for variant, names in (("both", ("dweight", "dbias")), ("first", ("dweight",))):
        arguments = {"parts": "*fp32", "dweight": None, "dbias": None, "P": "i32", **dict.fromkeys(names, "*fp32")}
        yield row_case(_add_parts, f"partial_sums/{variant}", "fp32", _tile(chip), arguments)
