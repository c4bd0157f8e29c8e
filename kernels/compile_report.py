"""The compile matrix as a table for people."""

from __future__ import annotations

from collections.abc import Iterable

from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.launch import Chip
from fasttfm.kernels.resources import occupancy

_HEADINGS = ("case", "dtype", "chip", "registers", "spill B", "shared B", "warps", "occupancy", "matrix instr.")


def table(rows: Iterable[tuple[Chip, CompileCase, object]]) -> str:
    """One line per case and chip; occupancy is estimated from registers, shared memory and warps, not measured."""
    lines = [_HEADINGS]
    for chip, case, outcome in sorted(rows, key=lambda row: (row[1].name, row[1].dtype)):
        found = outcome.resources
        if found is None:
            lines.append((case.name, case.dtype, chip.name, outcome.error[:80], *[""] * 5))
            continue
        lines.append(
            (
                case.name,
                case.dtype,
                chip.name,
                str(found.registers),
                str(found.spill),
                str(found.shared),
                str(case.num_warps),
                f"{occupancy(chip, found, case.num_warps):.0%}",
                str(found.matrix),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    left = 3  # the first columns are names
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
