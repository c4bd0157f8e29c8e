"""Adds up what programs summed on their own, in a fixed order: how parameter gradients stay the same every time.

Any number of sums in one launch: a training step has some sixty, of a few kilobytes each, so launches are their cost.
Reads 4 * P * N bytes for P programs: a few percent of what the programs themselves read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton.language as tl
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.jit import jit
from fasttfm.kernels.launch import Chip, ceil_div, chip
from fasttfm.kernels.row_tile import RowTile, warps

_MOST = 120
"""Sums of one launch: their pointers and sizes, 24 bytes each, are kernel arguments, of which there may be 4 KB."""


@jit
def _add_parts(
    parts,  # tuple of (P, N) float32, P and N each their own
    outs,  # tuple of (N,) out, of one dtype
    programs,  # tuple of 2 * P + 1: Triton compiles anew for integers that are 1 or divide by 16, and these never do
    columns,  # tuple of 2 * N + 1
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    which = tl.program_id(1)
    source, target, P, N = parts[0].to(tl.int64), outs[0].to(tl.int64), programs[0], columns[0]
    for i in tl.static_range(1, len(parts)):
        source = tl.where(which == i, parts[i].to(tl.int64), source)
        target = tl.where(which == i, outs[i].to(tl.int64), target)
        P = tl.where(which == i, programs[i], P)
        N = tl.where(which == i, columns[i], N)
    source = source.to(parts[0].dtype)
    target = target.to(outs[0].dtype)
    P, N = P // 2, N // 2
    here = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, P, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < P)[:, None] & (here < N)[None, :]
        total += tl.load(source + rows[:, None] * N + here[None, :], mask=inside, other=0.0)
    tl.store(target + here, tl.sum(total, axis=0).to(target.dtype.element_ty), mask=here < N)


def _tile(chip: Chip) -> RowTile:
    return RowTile(32, 32, warps(chip, 1024))


def add_parts(sums: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """For each (parts, out): out (N,) = sum over P of parts (P, N) float32, both contiguous, rounded to out's dtype.

    In a fixed order; one launch for every dtype of outs, unless there are more sums than a launch can take.
    """
    for dtype in dict.fromkeys(out.dtype for _, out in sums):
        alike = [pair for pair in sums if pair[1].dtype == dtype]
        for first in range(0, len(alike), _MOST):
            _launch(alike[first : first + _MOST])


def _launch(sums):
    parts, outs = zip(*sums)
    to = _tile(chip(parts[0].device))
    _add_parts[(ceil_div(max(out.shape[0] for out in outs), to.columns), len(sums))](
        parts, outs, tuple(2 * p.shape[0] + 1 for p in parts), tuple(2 * p.shape[1] + 1 for p in parts),
        ROWS=to.rows, COLUMNS=to.columns, num_warps=to.warps, num_stages=1,
    )  # fmt: skip


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    to = _tile(chip)
    for dtype in ("fp32", "bf16"):
        for count in (1, 3, _MOST):
            yield CompileCase(
                kernel=_add_parts,
                name=f"partial_sums/{count}/{to.rows}x{to.columns}w{to.warps}s1",
                dtype=dtype,
                arguments={
                    "parts": ("*fp32",) * count,
                    "outs": (f"*{dtype}",) * count,
                    "programs": ("i32",) * count,
                    "columns": ("i32",) * count,
                    "ROWS": to.rows,
                    "COLUMNS": to.columns,
                },
                num_warps=to.warps,
                num_stages=1,
            )
