"""README's performance table, written from the records between two markers."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure.machine import ROOT
from benchmarks.measure.result_files import Loaded, is_cpu
from benchmarks.measure.text_table import markdown
from benchmarks.report.headline import claims
from fasttfm.errors import UserError

README = ROOT / "README.md"
BEGIN = "<!-- measured: from benchmarks/results by `python -m benchmarks report --readme`; not to be edited -->"
END = "<!-- end of measured -->"


def table(files: Loaded) -> str:
    """What stands between the markers."""
    all_cpu = all(is_cpu(entry.machine) for entry in files.entries)
    kind = "All are CPU figures: no GPU has run this yet" if all_cpu else "What says CPU ran on one"
    rows = [(c.what, c.figure, f"`{c.command}`", c.origin) for c in claims(files) if c.leads]
    lines = [
        "Every figure is in a record in `benchmarks/results` that the named command wrote, with its machine, versions",
        f"and commit. {kind}. Machines: {'; '.join(files.machines)}.",
        "All figures: [benchmark report](docs/benchmark-report/report.md).",
        "",
        markdown(("what", "figure", "command", "of commit"), rows),
    ]
    return "\n".join(lines)


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
