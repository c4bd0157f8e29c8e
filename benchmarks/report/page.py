"""All records as one page of Markdown, and README's figures, between two markers.

python -m benchmarks report              docs/benchmark-report/report.md
python -m benchmarks report --readme     README's figures too
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import text_table
from benchmarks.measure.machine import ROOT, is_cpu, machine_name, noisy
from benchmarks.measure.providers import OURS
from benchmarks.measure.records import GROUPS, RESULTS, Entry, Loaded, grouped, load
from benchmarks.measure.text_table import duration, number, shape_text, short_dtype
from benchmarks.report import gpu_table
from benchmarks.report.headline import Claim, by_case, claims, grid, grid_note, leading_machine, searches
from fasttfm.cli.parser import Parser
from fasttfm.errors import UserError

OUT = ROOT / "docs" / "benchmark-report"
README = ROOT / "README.md"
BEGIN = "<!-- measured: from benchmarks/results by `python -m benchmarks report --readme`; not to be edited -->"
END = "<!-- end of measured -->"
TITLES = {
    "kernels": "Kernels",
    "blocks": "Layers",
    "training_step": "Training step",
    "decoding": "Decoding",
    "padding": "Padding and packing",
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, names: int = 1, title: str = "") -> str:
    """A table of plain text; `names` columns at the left hold words, the others numbers."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    return (f"{title}:\n\n" if title else "") + text_table.markdown(cells[0], cells[1:], names=names)


def lead(files: Loaded) -> list[str]:
    """Return what a reader must know before any figure."""
    counts = Counter(entry.record["status"] for entry in files.suite)
    devices = sorted({machine_name(entry.machine) for entry in files.entries if not is_cpu(entry.machine)})
    notice = f"Timed on {', '.join(devices)}; figures marked CPU on a CPU. No other device has run these kernels."
    if not devices:
        notice = (
            "CPU. Every time on this page was taken on a CPU. No GPU has run these kernels: nothing here is a GPU time."
        )
    rows = "No row of the suite is recorded yet: `python -m benchmarks` writes them."
    if files.suite:
        rows = (
            f"{len(files.suite)} rows of the suite: {counts['timed']} timed, {counts['refused']} refused by their "
            f"provider, {counts['wrong']} wrong (no time is printed for wrong numbers), {counts['absent']} absent "
            "here. Numerics are checked before any time; providers take turns on the same random inputs and cold "
            "caches. A row is noisy whose times spread by more than a quarter of their median, or that was timed on a "
            "busy machine: its case is in no claim."
        )
    return [
        "The encoder-decoder Transformer beside its peers, in one run each, with the physical limit in every row.",
        f"> **{notice}**",
        rows,
    ]


def _claims(files: Loaded) -> list[str]:
    rows = [
        (claim.what, claim.figure.replace("\\|", "|"), f"`{claim.command}`", claim.origin, claim.locations)
        for claim in claims(files)
    ]
    machines = grouped(searches(files), lambda entry: machine_name(entry.machine))
    return [
        "## Claims and their records",
        "Every measured figure, README's among them, where it stands in `benchmarks/results` (file:line) "
        "and how to run it again. A claim is of the cases of which no row is noisy.",
        *(
            block
            for machine, entries in machines.items()
            for block in (f"Searches with paper-base, {machine}. {grid_note(entries)}", table(*grid(entries)))
        ),
        table(("claim", "figure", "command", "of commit", "record"), rows, names=5),
    ]


def _suite(files: Loaded) -> list[str]:
    """A section for every group that has rows: who is how fast at what, and every row, those without a time too."""
    result = []
    by_group = grouped(files.suite, lambda e: e.record["group"])
    for group in filter(by_group.__contains__, GROUPS):
        result.append(f"## {TITLES[group]}")
        settings = grouped(by_group[group], lambda e: (machine_name(e.machine), e.record["dtype"], e.record["threads"]))
        for (machine, dtype, threads), entries in settings.items():
            on = f", {threads} thread{'s' * (threads != 1)}" if machine.startswith("CPU") else ""
            result.append(f"### {machine}{on}, {dtype}")
            if any(entry.record["level"] == "smoke" for entry in entries):
                result.append(
                    "> **Some rows were run with `--smoke`, to see that everything runs: their times mean nothing.**"
                )
            result += _against_each(entries)
            title = f"All {len(entries)} rows of {TITLES[group].lower()} on {machine}, {short_dtype(dtype)}"
            result.append(table(_HEAD, [_row(entry) for entry in entries], names=5, title=title))
    return result


def ratios(entries: Sequence[Entry]) -> dict[str, list[float]]:
    """For every other provider, its median time over ours in each case that both ran."""
    result: dict[str, list[float]] = {}
    for rows in by_case([entry for entry in entries if entry.timed]):
        times = {row.provider: row.p50 for row in rows}
        for provider, time in times.items():
            if OURS in times and provider != OURS:
                result.setdefault(provider, []).append(time / times[OURS])
    return result


def _against_each(entries: Sequence[Entry]) -> list[str]:
    """Time of each provider in units of fasttfm's."""
    rows = []
    for provider, values in sorted(ratios(entries).items(), key=lambda item: -statistics.geometric_mean(item[1])):
        shown = (statistics.geometric_mean(values), min(values), max(values))
        rows.append([provider, *(f"{value:.2f}x" for value in shown), str(len(values))])
    head = ("time in units of fasttfm's", "geometric mean", "least", "most", "cases that both ran")
    return [table(head, rows)] if rows else []


_HEAD = (
    *("case", "shape", "pass", "provider", "status"),
    *("p20", "p50", "p80", "runs", "throughput", "TFLOP/s", "GB/s", "of limit", "peak MiB", "launches", "first call s"),
    *("error", "allowed", "record"),
)


def _row(entry: Entry) -> tuple[str, ...]:
    def shown(value: float | None) -> str:
        return "" if value is None else number(value)

    r = entry.record
    time, error, roof, rate = r["time_us"] or {}, r["error"] or {}, r["roofline"] or {}, r["throughput"] or {}
    return (
        r["case"].replace("_", " "),
        shape_text(r["shape"]),
        r["pass"],
        r["provider"],
        f"{r['status']}: {r['reason']}" if r["reason"] else "timed, noisy" if noisy(r) else r["status"],
        *(duration(time[q]) if time else "" for q in ("p20", "p50", "p80")),
        str(time.get("runs", "")),
        f"{number(rate['value'])} {rate['unit']}" if rate else "",
        shown(r["tflop_per_s"]),
        shown(r["gb_per_s"]),
        f"{roof['share']:.0%}" if roof else "",
        shown(r["peak_bytes"] / 2**20) if r["peak_bytes"] is not None else "",
        "" if r["launches"] is None else str(r["launches"]),
        shown(r["compile_s"]),
        *(f"{error[name]:.1e}" if error else "" for name in ("value", "allowed")),
        entry.location,
    )


def _machines(files: Loaded) -> list[str]:
    fields = ("system", "torch", "triton", "fasttfm", "python", "driver", "cuda")
    result = Counter(
        (machine_name(entry.machine), *(str(entry.machine.get(name) or "") for name in fields))
        for entry in files.entries
    )
    rows = [(*cells, str(count)) for cells, count in sorted(result.items())]
    return ["## Machines", table(("machine", *fields, "records"), rows, names=8)]


def write(files: Loaded, out: Path) -> None:
    """report.md in the folder."""
    blocks = ["# fasttfm: benchmark report", *lead(files), *_claims(files), *_suite(files), *_machines(files)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.md").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written to ({error.strerror}): name another folder") from error


def readme_table(files: Loaded) -> str:
    """Return the text between README's markers."""
    all_cpu = all(is_cpu(entry.machine) for entry in files.entries)
    lines = [
        "The [benchmark report](docs/benchmark-report/report.md) has all figures and their commands. "
        + ("All are of CPUs: no GPU has run this yet." if all_cpu else "What says CPU ran on one.")
    ]
    for machine in filter(None, (leading_machine(files, "decoding", cpu) for cpu in (True, False))):
        rows = [entry for entry in searches(files) if machine_name(entry.machine) == machine]
        said = f"Searches with paper-base, {machine}, {Claim('', '', tuple(rows)).origin}. {grid_note(rows)}"
        lines += ["", said, "", text_table.markdown(*grid(rows))]
    for (machine, dtype), entries in grouped(
        gpu_table.kernels(files), lambda entry: (machine_name(entry.machine), short_dtype(entry.record["dtype"]))
    ).items():
        origin = Claim("", "", tuple(entries)).origin
        lines += ["", f"Kernels, {dtype}, {machine}, {origin}. {gpu_table.NOTE}", ""]
        lines.append(text_table.markdown(gpu_table.HEAD, gpu_table.rows(entries)))
    leading = (f"- {c.what}: {c.figure}; commit {c.origin}".replace("\\|", "|") for c in claims(files) if c.leads)
    return "\n".join([*lines, "", *leading])


def updated(text: str, files: Loaded) -> str:
    """README with its table as the records have it. Raises UserError without both markers, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"README has no table to write: it needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{readme_table(files)}\n{END}{after}"


def write_readme(files: Loaded, readme: Path = README) -> bool:
    """Rewrites README's table; whether it changed."""
    text = readme.read_text(encoding="utf-8")
    new = updated(text, files)
    readme.write_text(new, encoding="utf-8")
    return new != text


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
        print(f"README's figures {'are new' if write_readme(files) else 'are as the records have them'}")
    return 0
