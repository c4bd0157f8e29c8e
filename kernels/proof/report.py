"""Text tables of the compile matrix, and its page in docs/."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import occupancy
from ptx_check.ledger.text_table import aligned

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compile-matrix.md"
"""The page of a checkout with the recorded report, between these two lines."""
BEGIN = "<!-- the table: written by compile_matrix --update-budgets -->"
END = "<!-- the end of the table -->"

Row = tuple[Chip, CompileCase, Any]
"""Chip, case and Outcome."""


def by_kernel(rows: Iterable[Row]) -> str:
    """Table with one line per kernel and chip: the worst of its cases in each column.

    Occupancy is estimated from registers, shared memory and warps, not measured. Matrix instructions: the fewest among
    the cases that must have them.
    """
    groups: dict[tuple[str, Chip], list[Row]] = {}
    for row in rows:
        chip, case, _ = row
        groups.setdefault((f"{family(case)}.{case.kernel.__name__.strip('_')}", chip), []).append(row)
    lines: list[Sequence[str]] = [
        ("kernel", "chip", "cases", "registers", "spill B", "shared B", "occupancy", "matrix instr.", "errors")
    ]
    for (kernel, chip), members in sorted(groups.items(), key=lambda item: item[0][0]):
        compiled = [(case, outcome.resources) for _, case, outcome in members if outcome.resources is not None]
        cells = [""] * 5
        if compiled:
            worst = [max(getattr(r, field) for _, r in compiled) for field in ("registers", "spill", "shared")]
            share = min(occupancy(chip.name, r, case.num_warps) for case, r in compiled)
            matrix = [r.matrix for case, r in compiled if case.matrix_product and case.dtype != "fp32"]
            cells = [*map(str, worst), f"{share:.0%}", str(min(matrix, default="-"))]
        lines.append((kernel, chip.name, str(len(members)), *cells, str(len(members) - len(compiled))))
    return aligned(lines, names=2)


def family(case: CompileCase) -> str:
    """The kernel file of a case, such as attention.forward."""
    function = getattr(case.kernel, "fn", case.kernel)  # the module of an interpreted kernel is the interpreter
    return function.__module__.removeprefix("fasttfm.kernels.")


def write_page(table: str) -> None:
    """Replaces the table of the page. Raises ValueError if BEGIN or END is missing."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} must have the lines {BEGIN} and {END} around the table")
    PAGE.write_text(f"{before}{begin}\n```text\n{table}\n```\n{end}{after}")
