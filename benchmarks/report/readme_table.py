"""README's measured figures, written from the records between two markers."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure.machine import ROOT, is_cpu, machine_name
from benchmarks.measure.result_files import Loaded
from benchmarks.measure.text_table import markdown
from benchmarks.report.headline import GRID_NOTE, Claim, claims, grid, leading_machine, searches
from fasttfm.errors import UserError

README = ROOT / "README.md"
BEGIN = "<!-- measured: from benchmarks/results by `python -m benchmarks report --readme`; not to be edited -->"
END = "<!-- end of measured -->"


def table(files: Loaded) -> str:
    """What stands between the markers."""
    all_cpu = all(is_cpu(entry.machine) for entry in files.entries)
    lines = [
        "The [benchmark report](docs/benchmark-report/report.md) has all figures and their commands. "
        + ("All are of CPUs: no GPU has run this yet." if all_cpu else "What says CPU ran on one.")
    ]
    machine = leading_machine(files, "decoding")
    rows = [entry for entry in searches(files) if machine_name(entry.machine) == machine]
    if rows:
        lines[0] += f" Searches with paper-base, {machine}, {Claim('', '', tuple(rows)).origin}. {GRID_NOTE}"
        lines += ["", markdown(*grid(rows))]
    leading = (f"- {c.what}: {c.figure}; commit {c.origin}".replace("\\|", "|") for c in claims(files) if c.leads)
    return "\n".join([*lines, "", *leading])


def updated(text: str, files: Loaded) -> str:
    """README with its table as the records have it. Raises UserError without both markers, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"README has no table to write: it needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table(files)}\n{END}{after}"


def write(files: Loaded, readme: Path = README) -> bool:
    """Rewrites the table; whether it changed."""
    text = readme.read_text(encoding="utf-8")
    new = updated(text, files)
    readme.write_text(new, encoding="utf-8")
    return new != text
