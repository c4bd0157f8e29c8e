"""The ledger's record: one JSON line per chip, with every case and dtype."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof import matrix
from fasttfm.kernels.proof.budgets import ALLOWED_GROWTH
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import work
from fasttfm.kernels.proof.ledger.report import Row
from ptx_check.ledger import units
from ptx_check.ledger.count import Usage
from ptx_check.ledger.counted import Counted

Entry = dict[str, Any]
"""A case in a record."""
COLUMNS = ("instructions", *units.UNITS, "bound", "by")
"""Recorded numbers of a loop, in order: instructions, cycles of a scheduler per element by unit, their maximum, and the
unit that sets it."""


def entries_of(file: Path, chip: str) -> list[Entry]:
    """The recorded entries of a chip, each with its commit."""
    return [
        {"commit": line["commit"], **entry} for line in _lines(file) if line["chip"] == chip for entry in line["cases"]
    ]


def write(file: Path, by_chip: Mapping[str, Sequence[Entry]]) -> None:
    """Replaces the lines of these chips; lines of other chips stay."""
    origin = matrix.origin("fasttfm.kernels.proof.ledger")
    about = {"benchmark": "ledger", "counted": "not measured", **origin, "columns": list(COLUMNS)}
    lines = {line["chip"]: line for line in _lines(file)}
    for chip, entries in by_chip.items():
        cases = [{k: v for k, v in entry.items() if (k, v) != ("commit", origin["commit"])} for entry in entries]
        lines[chip] = {**about, "chip": chip, "cases": cases}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines.values()), encoding="utf-8")


def _lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a record; none without a file."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines()]  # noqa: TID251 (kernels know nothing of fasttfm)


def entry_of(chip: Chip, case: CompileCase, result: Counted) -> Entry:
    """The entry of a case; has the orders of the loops if there are asynchronous products."""
    elements = work.elements(chip, case)
    needs = result.resources
    orders = {"orders": list(result.count.orders)} if any(result.count.orders) else {}
    return {
        "case": case.name,
        "dtype": case.dtype,
        "loops": [_columns(loop, elements) for loop in result.count.loops],
        **orders,
        "outside": _columns(result.count.outside, elements),
        "needs": [needs.registers, needs.spill, needs.shared, result.warps],
    }


def against(file: Path, rows: Iterable[Row]) -> tuple[list[str], int, int]:
    """Compares rows with the record in `file`.

    Returns a line per case whose bound has grown by more than 3% in a loop or outside of loops, the number of cases
    that have shrunk by as much, and the number of cases compared. Cycles are per element, so a case with a new tile is
    compared with the recorded tile if there is only one.
    """
    recorded: dict[tuple[str, ...], dict[str, Entry]] = {}
    for recorded_chip in _lines(file):
        for entry in recorded_chip["cases"]:
            key = (recorded_chip["chip"], _untiled(entry["case"]), entry["dtype"])
            recorded.setdefault(key, {})[entry["case"]] = entry
    grown, shrunk, compared = [], 0, 0
    for chip, case, result in rows:
        tiles = recorded.get((chip.name, _untiled(case.name), case.dtype), {})
        before = tiles.get(case.name) or (next(iter(tiles.values())) if len(tiles) == 1 else None)
        if before is None:
            continue
        compared += 1
        parts = [_bounds(each) for each in (before, entry_of(chip, case, result))]
        if len(parts[0]) != len(parts[1]):  # another number of loops: compare the lightest, and outside of loops
            parts = [each[:2] for each in parts]
        changes = [(then, now) for then, now in zip(*parts) if then or now]
        if max(now - then * ALLOWED_GROWTH for then, now in changes) > 0:
            cycles = ", ".join(f"{then:.1f} -> {now:.1f}" for then, now in changes)
            grown.append(f"{chip.name} {case.name} {case.dtype}: {cycles} cycles per element")
        less = any(now < then / ALLOWED_GROWTH for then, now in changes)
        shrunk += less and all(now <= then for then, now in changes)
    return grown, shrunk, compared


def _untiled(name: str) -> str:
    return name.rpartition("/")[0]


def _bounds(entry: Entry) -> list[float]:
    """The bound outside of loops, then of each loop, lightest first."""
    bound = COLUMNS.index("bound")
    return [entry["outside"][bound], *(loop[bound] for loop in entry["loops"])]


def _columns(used: Usage, elements: float) -> list[Any]:
    cycles = [round(value / elements, 2) for value in used.columns.values()]
    return [used.instructions, *cycles, round(used.bound / elements, 2), used.busiest]
