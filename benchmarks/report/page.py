"""All records as one page of Markdown with figures, and README's figures.

python -m benchmarks report              docs/benchmark-report/report.md and figures/
python -m benchmarks report --readme     README's figures too
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure.machine import ROOT, is_cpu, machine_name
from benchmarks.measure.result_files import RESULTS, Loaded, grouped, load
from benchmarks.report import document as report_document
from benchmarks.report import readme_table
from benchmarks.report import runs as report_runs
from benchmarks.report import suite as report_suite
from benchmarks.report.document import Block, Section, Table
from benchmarks.report.headline import GRID_NOTE, claims, grid, searches
from fasttfm.cli.parser import Parser
from fasttfm.errors import UserError

OUT = ROOT / "docs" / "benchmark-report"
TITLE = "fasttfm: benchmark report"


def lead(files: Loaded) -> list[Block]:
    """What a reader must know before any figure."""
    counts = Counter(entry.record["status"] for entry in files.suite)
    devices = sorted({machine_name(entry.machine) for entry in files.entries if not is_cpu(entry.machine)})
    if not devices:
        notice = (
            "CPU. Every time on this page was taken on a CPU. No GPU has run these kernels: nothing here is a GPU time."
        )
    else:
        notice = f"Timed on {', '.join(devices)}; figures marked CPU on a CPU. No other device has run these kernels."
    blocks: list[Block] = [
        "The encoder-decoder Transformer beside its peers, in one run each, with the physical limit in every row. What "
        "is predicted of GPUs stands elsewhere: `python -m benchmarks static-evidence`.",
        f"> **{notice}**",
    ]
    if files.suite:
        blocks.append(
            f"{len(files.suite)} rows of the suite: {counts['timed']} timed, {counts['refused']} refused by their "
            f"provider, {counts['wrong']} wrong (no time is printed for wrong numbers), {counts['absent']} absent "
            "here. Numerics are checked before any time; providers take turns on the same random inputs and cold "
            "caches. A row is noisy whose times spread by more than a quarter of their median, or that was timed on a "
            "busy machine: its case is in no claim."
        )
    else:
        blocks.append("No row of the suite is recorded yet: `python -m benchmarks` writes them.")
    return blocks


def _machines(files: Loaded) -> Section:
    fields = ("system", "torch", "triton", "fasttfm", "python", "driver", "cuda")
    result = Counter(
        (machine_name(entry.machine), *(str(entry.machine.get(name) or "") for name in fields))
        for entry in files.entries
    )
    rows = [(*cells, str(count)) for cells, count in sorted(result.items())]
    return Section("Machines", [Table(("machine", *fields, "records"), rows, names=8)])


def _claims(files: Loaded) -> Section:
    rows = [
        (claim.what, claim.figure.replace("\\|", "|"), f"`{claim.command}`", claim.origin, claim.locations)
        for claim in claims(files)
    ]
    return Section(
        "Claims and their records",
        [
            "Every measured figure, README's among them, where it stands in `benchmarks/results` (file:line) "
            "and how to run it again. A claim is of the cases of which no row is noisy.",
            *_grids(files),
            Table(("claim", "figure", "command", "of commit", "record"), rows, names=5),
        ],
    )


def _grids(files: Loaded) -> list[Block]:
    """The times of all searches, for each machine."""
    machines = grouped(searches(files), lambda entry: machine_name(entry.machine))
    return [
        block
        for machine, entries in machines.items()
        for block in (f"Searches with paper-base, {machine}. {GRID_NOTE}", Table(*grid(entries)))
    ]


def _absent(files: Loaded) -> Section | None:
    result = Counter(
        (entry.provider, str(entry.record["reason"]), machine_name(entry.machine))
        for entry in files.suite
        if entry.record["status"] == "absent"
    )
    if not result:
        return None
    rows = [(provider, f"`{why}`", machine, str(count)) for (provider, why, machine), count in sorted(result.items())]
    head = ("provider", "to have it", "machine", "rows")
    return Section("Absent providers", [Table(head, rows, names=3)])


def sections(files: Loaded) -> list[Section]:
    """The sections of the page, in order."""
    result = [
        _claims(files),
        *report_suite.sections(files),
        report_runs.end_to_end(files),
        _absent(files),
        _machines(files),
    ]
    return [section for section in result if section is not None]


def write(files: Loaded, out: Path) -> None:
    """report.md and figures/ in the folder; figures that are no longer shown go."""
    parts = sections(files)
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        for old in (out / "figures").glob("*.svg"):
            old.unlink()
        (out / "report.md").write_text(report_document.markdown(TITLE, lead(files), parts), encoding="utf-8")
        for figure in report_document.figures(parts):
            (out / "figures" / f"{figure.name}.svg").write_text(figure.svg, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written to ({error.strerror}): name another folder") from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks report", description="One page from all records; README's figures.")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder or file of records (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the report (default: %(default)s)")
    parser.add_argument("--readme", action="store_true", help="write README's measured figures too")
    args = parser.parse_args(argv)
    files = load(args.results)
    write(files, args.out)
    print(f"{len(files.entries)} records: {args.out / 'report.md'}")
    if args.readme:
        changed = readme_table.write(files)
        print(f"README's figures {'are new' if changed else 'are as the records have them'}")
    return 0
