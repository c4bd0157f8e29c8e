"""The compile matrix as a table for people."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import occupancy
from ptx_check.ledger.text_table import aligned

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compile-matrix.md"
"""The page of a checkout that shows the report of what is recorded, between these two lines."""
BEGIN = "<!-- the table: written by compile_matrix --update-budgets -->"
END = "<!-- the end of the table -->"

Row = tuple[Chip, CompileCase, Any]
"""Chip, case and Outcome."""


def by_kernel(rows: Iterable[Row]) -> str:
    """One line for every kernel and chip: the worst of its cases in each column.

    Occupancy is estimated from registers, shared memory and warps, not measured. Matrix instructions are the fewest in
    any case that must have them.
    """
    groups: dict[tuple[str, Chip], list[Row]] = {}
    for row in rows:
        chip, case, _ = row
        groups.setdefault((f"{_family(case)}.{case.kernel.__name__.strip('_')}", chip), []).append(row)
    lines: list[Sequence[str]] = [
        ("kernel", "chip", "cases", "registers", "spill B", "shared B", "occupancy", "matrix instr.", "errors")
    ]
    for (kernel, chip), members in sorted(groups.items(), key=lambda item: item[0][0]):
        known = [(case, outcome.resources) for _, case, outcome in members if outcome.resources is not None]
        errors = str(len(members) - len(known))
        if not known:
            lines.append((kernel, chip.name, str(len(members)), *[""] * 5, errors))
            continue
        must_match = [r.matrix for case, r in known if case.matrix_product and case.dtype != "fp32"]
        lines.append(
            (
                kernel,
                chip.name,
                str(len(members)),
                str(max(r.registers for _, r in known)),
                str(max(r.spill for _, r in known)),
                str(max(r.shared for _, r in known)),
                f"{min(occupancy(chip.name, r, case.num_warps) for case, r in known):.0%}",
                str(min(must_match)) if must_match else "-",
                errors,
            )
        )
    return aligned(lines, names=2)


def by_case(rows: Iterable[Row]) -> str:
    """One line for every case and chip."""
    lines: list[Sequence[str]] = [
        ("case", "dtype", "chip", "registers", "spill B", "shared B", "warps", "occupancy", "matrix instr.")
    ]
    for chip, case, outcome in sorted(rows, key=lambda row: (row[1].name, row[1].dtype)):
        measured = outcome.resources
        if measured is None:
            lines.append((case.name, case.dtype, chip.name, *[""] * 5, outcome.error[:80]))
            continue
        numbers = (measured.registers, measured.spill, measured.shared, case.num_warps)
        share = f"{occupancy(chip.name, measured, case.num_warps):.0%}"
        lines.append((case.name, case.dtype, chip.name, *map(str, numbers), share, str(measured.matrix)))
    return aligned(lines, names=3)


def _family(case: CompileCase) -> str:
    function = getattr(case.kernel, "fn", case.kernel)  # an interpreted kernel's own module is the interpreter
    return function.__module__.removeprefix("fasttfm.kernels.")


def write_page(table: str, page: Path = PAGE) -> None:
    """Puts the table where the page has its own. Raises ValueError when the page has no place for it."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} must have the lines {BEGIN} and {END}, between which the table goes")
    page.write_text(f"{before}{begin}\n```text\n{table}\n```\n{end}{after}")
