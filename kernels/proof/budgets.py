"""Recorded resources of every compile case, and the rules that hold independently of the record.

Review budgets.csv: a number that grows in a commit is a kernel that got heavier on that chip. `python -m
fasttfm.kernels.proof.matrix --update-budgets` writes it with the pinned Triton; its first line is
assembler.toolchain().
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import Resources
from ptx_check.ledger.count import Usage

FILE = Path(__file__).with_name("budgets.csv")
_FIELDS = ("registers", "spill", "shared", "matrix", "bound", "outside")

ALLOWED_GROWTH = 1.03
"""Tolerated growth of a count: the compiler's instruction order moves it by a percent or two."""

Key = tuple[str, str, str]
"""Chip, case, dtype."""


def key(chip: Chip, case: CompileCase) -> Key:
    return chip.name, case.name, case.dtype


def read(file: Path = FILE) -> tuple[str, dict[Key, Resources]]:
    """The recording toolchain and the budgets."""
    with file.open(newline="") as lines:
        toolchain = lines.readline().removeprefix("# ").strip()
        return toolchain, {(row["chip"], row["case"], row["dtype"]): _parsed(row) for row in csv.DictReader(lines)}


def _parsed(row: Mapping[str, str]) -> Resources:
    registers, spill, shared, matrix = (int(row[field]) for field in ("registers", "spill", "shared", "matrix"))
    return Resources(registers, spill, shared, matrix, float(row.get("bound") or 0), int(row.get("outside") or 0))


def write(toolchain: str, budgets: Mapping[Key, Resources], file: Path = FILE) -> None:
    """Writes the budgets sorted by case, then chip from the oldest on, so that a tile's chips are adjacent."""

    def order(key: Key) -> tuple:
        chip, case, dtype = key
        number = chip.removeprefix("sm_")
        return case, dtype, (0, int(number)) if number.isdigit() else (1, chip)

    with file.open("w", newline="") as lines:
        lines.write(f"# {toolchain}\n")
        rows = csv.writer(lines, lineterminator="\n")
        rows.writerow(("case", "dtype", "chip", *_FIELDS))
        for chip, case, dtype in sorted(budgets, key=order):
            measured = budgets[chip, case, dtype]
            rows.writerow((case, dtype, chip, *(getattr(measured, field) for field in _FIELDS)))


_MOST_SPILLED = {
    # On an H100 tiles with these spills were faster than those without.
    ("sm_90", "attention.short.backward"): 48,
    ("sm_90", "attention.backward.keys"): 8,
    # Row addresses that live across work items spill outside of the loops over tiles: see broken_rules().
    **{(chip, "attention.backward.heads"): 320 for chip in ("sm_80", "sm_89", "sm_90", "sm_120")},
    ("sm_90", "attention.hopper.forward"): 48,
    ("sm_90", "attention.hopper.backward.queries"): 24,
    ("sm_100", "attention.blackwell"): 40,
    ("sm_90", "attention.hopper.backward.keys"): 64,
}
"""(chip, kernel) -> allowed bytes of spills."""
_UNEVEN = 24
"""Allowed bytes of spills with uneven strides: tiles are chosen for even ones, and have several stages with them."""
_OUTSIDE = ("attention.backward.heads", "attention.hopper", "attention.blackwell")
"""Kernels that may spill only outside of their loops over tiles."""


def broken_rules(chip: Chip, case: CompileCase, measured: Resources, loops: Sequence[Usage] = ()) -> list[str]:
    """The rules that a case breaks: too much shared memory, spills from sm_80 on, idle matrix units in a half-precision
    or TF32 product, or a float32 product computed in TF32.

    loops: the counted loops over tiles, if any.
    """
    kernel = case.name.split("/")[0]
    broken = []
    if measured.shared > chip.shared_memory:
        broken.append(f"takes {measured.shared} bytes of shared memory, {chip.name} has {chip.shared_memory}")
    allowed = _UNEVEN if "+uneven/" in case.name else _MOST_SPILLED.get((chip.name, kernel), 0)
    if chip.capability >= 80 and measured.spill > allowed:
        broken.append(f"spills {measured.spill} bytes: use a smaller tile or more warps")
    if kernel.startswith(_OUTSIDE) and any(loop.spilled for loop in loops):
        broken.append("spills inside of a loop over tiles: use a smaller tile or more warps")
    if case.matrix_product and chip.matrix_units and case.dtype != "fp32" and not measured.matrix:
        broken.append("has no matrix instruction: its product is computed with ordinary multiply-adds")
    if case.matrix_product and chip.capability and case.dtype == "fp32" and measured.matrix:
        # NVIDIA has none for float32: on sm_100 Triton 3.7.1 issues IEEE products of 64 rows or more as TF32.
        broken.append("has a matrix instruction: its float32 product is computed in TF32; use fewer than 64 rows")
    return broken


def regressions(measured: Resources, budget: Resources | None) -> list[str]:
    """The resources in which a case exceeds its budget."""
    if budget is None:
        return ["is not in budgets.csv: review its numbers, then run with --update-budgets"]
    grown = []
    for field in ("registers", "spill", "shared"):
        now, then = getattr(measured, field), getattr(budget, field)
        if now > then:
            grown.append(f"{field} {then} -> {now}")
    if measured.matrix < budget.matrix:
        grown.append(f"matrix instructions {budget.matrix} -> {measured.matrix}")
    if budget.bound and measured.bound > budget.bound * ALLOWED_GROWTH:
        grown.append(f"bound {budget.bound:.1f} -> {measured.bound:.1f} cycles per element")
    if budget.bound and measured.outside > budget.outside * ALLOWED_GROWTH + 4:
        grown.append(f"instructions outside of loops {budget.outside} -> {measured.outside}")
    return grown
