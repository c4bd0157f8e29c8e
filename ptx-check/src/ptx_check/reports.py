"""Reports of faults and notes as text, JSON and SARIF.

Source of SARIF: OASIS, "Static Analysis Results Interchange Format 2.1.0", sections 3.27 (results), 3.28 (locations).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ptx_check.faults import KINDS, NOTES, Fault, Location
from ptx_check.version import __version__

if TYPE_CHECKING:
    from ptx_check.machine import Machine


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault or note with its context."""

    fault: Fault
    chip: str
    where: str = ""
    """Test or command that launched the kernel."""


@dataclass(slots=True)
class Findings:
    """Faults, deduplicated per chip, and the number of executed launches."""

    launches: int = 0
    left_out: int = 0
    """Programs skipped in those launches: executed(programs=)."""
    all: dict[tuple[Fault, str], Finding] = field(default_factory=dict)

    def add(self, machine: Machine, where: str = "") -> None:
        """Add a machine's results."""
        self.launches += len(machine.launches)
        self.left_out += sum(done.left_out for done in machine.launches)
        self.add_faults([*machine.faults, *machine.notes], machine.chip.name, where)

    def add_faults(self, faults: Iterable[Fault], chip: str, where: str = "") -> None:
        for fault in faults:
            self.all.setdefault((fault, chip), Finding(fault, chip, where))

    def faults(self) -> list[Finding]:
        """Faults only, without notes."""
        return [finding for finding in self.all.values() if finding.fault.kind not in NOTES]


def as_text(findings: Findings) -> str:
    """One line each, faults first."""
    ordered = sorted(findings.all.values(), key=lambda finding: finding.fault.kind in NOTES)
    lines = [
        f"{'note' if f.fault.kind in NOTES else 'fault'} on {f.chip}{f' in {f.where}' if f.where else ''}: {f.fault}"
        for f in ordered
    ]
    return "\n".join([*lines, _counted(findings)]) + "\n"


def _counted(findings: Findings) -> str:
    faults = len(findings.faults())
    counts = ((findings.launches, "launch", "es"), (faults, "fault", "s"), (len(findings.all) - faults, "note", "s"))
    text = ", ".join(f"{n:,} {what}{plural if n != 1 else ''}" for n, what, plural in counts)
    return f"{text}; {findings.left_out:,} programs left out" if findings.left_out else text


def as_json(findings: Findings) -> str:
    """JSON object with `version`, `launches`, `left_out` (skipped programs), and the lists `faults` and `notes`."""
    entries: dict[str, list] = {"faults": [], "notes": []}
    for finding in findings.all.values():
        fault = finding.fault
        entry = {"kind": fault.kind, "message": fault.message, "chip": finding.chip, "where": finding.where,
                 "at": _place(fault.location), "other": _place(fault.other) if fault.other else None}  # fmt: skip
        entries["notes" if fault.kind in NOTES else "faults"].append(entry)
    return (
        json.dumps(
            {"version": __version__, "launches": findings.launches, "left_out": findings.left_out, **entries}, indent=1
        )
        + "\n"
    )


def _place(location: Location) -> dict[str, Any]:
    return {"kernel": location.kernel, "ptx_line": location.line, "python": location.python, "file": location.file}


def as_sarif(findings: Findings) -> str:
    """SARIF with one run and a rule per kind; a result's location is the Python line and, logically, the kernel."""
    rules = [
        {"id": kind, "shortDescription": {"text": text}, "defaultConfiguration": {"level": level}}
        for level, kinds in (("error", KINDS), ("note", NOTES)) for kind, text in kinds.items()
    ]  # fmt: skip
    numbers = {rule["id"]: number for number, rule in enumerate(rules)}
    results = []
    for finding in findings.all.values():
        fault = finding.fault
        result = {
            "ruleId": fault.kind, "ruleIndex": numbers[fault.kind],
            "level": "note" if fault.kind in NOTES else "error",
            "message": {"text": f"{fault.message}, in kernel {fault.location.kernel} on {finding.chip}"},
            "locations": [_sarif_location(fault.location)],
            "properties": {"chip": finding.chip, "where": finding.where, "ptxLine": fault.location.line},
        }  # fmt: skip
        if fault.other is not None:
            result["relatedLocations"] = [{"id": 1, "message": {"text": "the other access"},
                                           **_sarif_location(fault.other)}]  # fmt: skip
        results.append(result)
    tool = {"driver": {"name": "ptx-check", "semanticVersion": __version__, "rules": rules}}
    return json.dumps({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0",
        "runs": [{"tool": tool, "columnKind": "utf16CodeUnits", "results": results,
                                     "properties": {"programsLeftOut": findings.left_out}}],
    }, indent=1) + "\n"  # fmt: skip


def _sarif_location(location: Location) -> dict[str, Any]:
    found = re.match(r"(.*?):(\d+):(\d+)", location.python)
    logical = {"logicalLocations": [{"name": location.kernel, "kind": "function"}]}
    if not found:
        return logical
    name, line, column = found.groups()
    path = Path(location.file or name)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    region = {"startLine": int(line), "startColumn": int(column) + 1}
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}, **logical}


FORMATS: Mapping[str, Callable[[Findings], str]] = {".txt": as_text, ".json": as_json, ".sarif": as_sarif}
"""Formats by file name extension."""


def write(findings: Findings, path: Path) -> None:
    """Write a report in the format of the file name's extension. Raises ValueError for an unknown extension."""
    path.write_text(form_of(path)(findings), encoding="utf-8")


def form_of(path: Path) -> Callable[[Findings], str]:
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: a report's name ends with one of {', '.join(FORMATS)}")
    return FORMATS[path.suffix]
