"""The ledger's record: one line of JSON a chip, with every case and dtype."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from fasttfm.kernels.proof import matrix
from fasttfm.kernels.proof.ledger import units, work
from fasttfm.kernels.proof.ledger.count import Usage
from fasttfm.kernels.proof.ledger.report import Row

COLUMNS = ("instructions", *units.UNITS, "bound", "by")
"""Of a loop, in the order in which the record has them: cycles of a scheduler an element, but for the first."""


def write(file: Path, rows: Iterable[Row]) -> None:
    """Writes the file anew."""
    by_chip: dict[str, list[dict[str, Any]]] = {}
    for chip, case, found in rows:
        elements = work.elements(chip, case)
        needs = found.resources
        by_chip.setdefault(chip.name, []).append(
            {
                "case": case.name,
                "dtype": case.dtype,
                "loops": [_columns(loop, elements) for loop in found.count.loops],
                "outside": _columns(found.count.outside, elements),
                "needs": [needs.registers, needs.spill, needs.shared, found.warps],
            }
        )
    about = {
        "benchmark": "ledger",
        "counted": "not measured",
        "command": shlex.join(["python", "-m", "fasttfm.kernels.proof.ledger", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": matrix.commit(),
        "triton": metadata.version("triton"),
        "columns": list(COLUMNS),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({**about, "chip": chip, "cases": cases}) for chip, cases in by_chip.items()]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _columns(used: Usage, elements: float) -> list[Any]:
    cycles = [round(value / elements, 2) for value in used.columns.values()]
    return [used.instructions, *cycles, round(used.bound / elements, 2), used.busiest]
