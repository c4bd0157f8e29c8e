"""The benchmark report: an index, a page and a chart a machine; and README's figures, between two markers.

python -m benchmarks report              docs/benchmark-report
python -m benchmarks report --readme     README's figures too
python -m benchmarks report --all        every row as CSV on standard output
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
import pandas as pd

from benchmarks import host
from benchmarks.measure.machine import ROOT, is_cpu, machine_name, slug
from benchmarks.measure.records import GROUPS, RESULTS, Entry, load
from benchmarks.measure.text_table import markdown, replaced, short_dtype
from benchmarks.report import tables
from benchmarks.report.headline import claims, leading_machine, origin
from benchmarks.report.rows import duels, ratios, suite, without_pool
from fasttfm.cli.parser import Parser
from fasttfm.errors import UserError

matplotlib.use("Agg")
from matplotlib import pyplot as plt

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
_ALL = "python -m benchmarks report --all > rows.csv"
_DOTS = {"forward": ("tab:blue", 0.15), "backward": ("tab:orange", -0.15), "whole step or search": ("tab:green", 0.0)}
"""Kind of pass -> colour of its dots, and how far above their line they stand."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, names: int = 1) -> str:
    """A table of plain text; `names` columns at the left hold words, the others numbers."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    return markdown(cells[0], cells[1:], names=names)


def notice(entries: Sequence[Entry]) -> str:
    """The devices that have run the kernels, which a reader must know before any figure."""
    devices = sorted({machine_name(entry.machine) for entry in entries if not is_cpu(entry.machine)})
    if not devices:
        return "> **Every time here was measured on a CPU. No GPU has run these kernels.**"
    return f"> **Timed on {', '.join(devices)}; rows marked CPU on a CPU. No other device has run these kernels.**"


def statuses(rows: pd.DataFrame) -> str:
    """The number of rows of each status."""
    if rows.empty:
        return "no row of the suite"
    parts = [f"{count} {status}" for status, count in rows.status.value_counts().items()]
    return f"{len(rows)} rows: {', '.join(parts)}{f'; {rows.noisy.sum()} noisy' if rows.noisy.any() else ''}"


# ------------------------------------------------------------------------------------------------------------ a machine


def machine_page(name: str, entries: Sequence[Entry], everything: Sequence[Entry]) -> tuple[str, plt.Figure | None]:
    """The page of one machine, and its chart."""
    rows = suite(entries)
    sections = dict(_sections(name, entries, rows))
    contents = " · ".join(f"[{title}](#{_anchor(title)})" for title in sections)
    versions = [
        f"{part} {', '.join(said)}"
        for part in ("torch", "triton", "fasttfm", "driver")
        if (said := sorted({str(entry.machine[part]) for entry in entries if entry.machine.get(part)}))
    ]
    blocks = [
        f"# {name}",
        notice(everything),
        f"{statuses(rows).capitalize()}; measured {_days(entries)} with {', '.join(versions)}. Numbers are checked "
        "before any time; **bold** where ours is not the fastest; ± is half of p20 to p80; ratio: how many times as "
        "fast ours is; of limit: the least time that the device allows over ours; MiB: most memory beyond what there "
        "was before; noisy: times that spread by more than a quarter, or a busy machine: in no claim. "
        f"[Benchmarks](../benchmarks.md#reading-a-row) explains a row. Every row, the slower ways too: `{_ALL}`.",
        contents,
    ]
    figure = chart(rows, name)
    if figure is not None:
        blocks.append(f"![Times of the fastest other over ours, a dot a case]({slug(name)}.png)")
    for title, its in sections.items():
        blocks += [f"## {title}", *its]
    return "\n\n".join(blocks) + "\n", figure


def _sections(name: str, entries: Sequence[Entry], rows: pd.DataFrame) -> Iterator[tuple[str, list[str]]]:
    """(title, blocks) of a page's sections."""
    made = [(c.what.removesuffix(f"; {name}"), c.figure, origin(c.entries), c.locations) for c in claims(entries)]
    if made:
        yield "Claims", [table(("claim", "figure", "of commit", "record"), made, names=4)]
    found = tables.searches(rows)
    if not found.empty:
        yield "Searches", [f"With paper-base. {tables.searches_note(found)}", table(*tables.grid(found))]
    for group in GROUPS:
        for (dtype, threads), part in rows[rows.group == group].groupby(["dtype", "threads"], sort=False):
            on = f", {threads} thread{'s' * (threads != 1)}" if part.cpu.any() else ""
            yield f"{TITLES[group]}, {short_dtype(dtype)}{on}", list(_group(part))
    for entry in entries:
        if entry.kind == "host":
            yield (
                "Host time",
                [host.note(entry.record), table(host.HEAD, list(map(host.cells, entry.record["measured"])))],
            )
    others = pd.Series([(entry.kind, entry.file) for entry in entries if entry.kind != "benchmark"])
    if len(others):
        lines = [(kind, f"`{file}`", str(count)) for (kind, file), count in others.value_counts(sort=False).items()]
        yield "Other records", [table(("program", "file in benchmarks/results", "records"), lines, names=2)]


def _group(rows: pd.DataFrame) -> Iterator[str]:
    """The tables of one group and dtype."""
    if (rows.level == "smoke").any():
        yield "> **Some rows were run with `--smoke`, to see that everything runs: their times mean nothing.**"
    lines = [
        (provider, *(f"{value:.2f}x" for value in (mean, least, most)), str(count))
        for provider, mean, least, most, count in ratios(rows).itertuples()
    ]
    if lines:
        yield table(("time in units of fasttfm's", "geometric mean", "least", "most", "cases that both ran"), lines)
    if (rows.status == "timed").any():
        yield table(*tables.cases(rows), names=2)
    if any(map(without_pool, rows.entry)):
        yield "Memory of the CUDA graph is left out: these rows were read without the graph's pool."
    missing = (
        rows[rows.status != "timed"]
        .groupby(["provider", "status"], sort=False)
        .reason.agg(["count", "first", "nunique"])
    )
    if len(missing):
        lines = [
            (provider, status, str(count), f"{first}{' (and other reasons)' if more > 1 else ''}")
            for (provider, status), count, first, more in missing.itertuples()
        ]
        yield table(("not timed", "status", "rows", "reason"), lines, names=4)


def _days(entries: Sequence[Entry]) -> str:
    days = sorted(str(entry.machine["time"])[:10] for entry in entries)
    return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def _anchor(title: str) -> str:
    return title.lower().replace(",", "").replace(" ", "-")


def chart(rows: pd.DataFrame, name: str) -> plt.Figure | None:
    """A dot a case by kernel or group: the fastest other's time over ours; left of 1 ours loses. None for few cases."""
    both = duels(rows[rows.usable]).dropna(subset="ratio")
    both = both[~both.noisy]
    if len(both) < 4:
        return None
    lines = both.case.where(both.group == "kernels", both.group.map(TITLES) + ": " + both.case)
    order = list(dict.fromkeys(lines))[::-1]
    low, high = min(0.8, both.ratio.min() / 1.15), max(1.25, 1.15 * both.ratio.max())
    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.32 * len(order)), layout="constrained")
    axes.axvspan(low, 1, color="tab:red", alpha=0.08)
    axes.axvline(1, color="black", linewidth=1)
    kinds = both["pass"].map({"forward": "forward", "training forward": "forward"}).fillna("backward")
    kinds = kinds.where(both["pass"].str.contains("ward"), "whole step or search")
    for kind, (colour, up) in _DOTS.items():
        some = kinds == kind
        if some.any():
            places = [order.index(line) + up for line in lines[some]]
            axes.scatter(both.ratio[some], places, s=26, color=colour, alpha=0.75, label=kind)
    ticks = [tick for tick in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 40) if low <= tick <= high]
    axes.set(xscale="log", xlim=(low, high), ylim=(-0.6, len(order) - 0.4), yticks=range(len(order)), yticklabels=order)
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="times as fast as the fastest other; red: slower")
    axes.set_title(f"{name}: {len(both)} cases, slower in {(both.ratio < 1).sum()}", fontsize=11)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=len(_DOTS), fontsize=9)
    return figure


# --------------------------------------------------------------------------------------------------------- all machines


def index(by_machine: dict[str, list[Entry]], everything: Sequence[Entry]) -> str:
    """The page that names the others."""
    lines = []
    for name, entries in by_machine.items():
        rows = suite(entries)
        held = [TITLES[group].lower() for group in GROUPS if (rows.group == group).any()]
        held += sorted({entry.kind.replace("_", " ") for entry in entries if entry.kind != "benchmark"})
        lines.append((f"[{name}]({slug(name)}.md)", _days(entries), ", ".join(held), statuses(rows)))
    blocks = [
        "# Benchmark report",
        "The encoder-decoder Transformer beside its peers, a page a machine; each is made from the records in "
        "`benchmarks/results` by `python -m benchmarks report`.",
        notice(everything),
        table(("machine", "measured", "what", "rows of the suite"), lines, names=4),
        "Providers take turns on the same random inputs and cold caches; no time is kept of wrong numbers. A claim is "
        "of the cases of which no row is noisy, and names the commit that was measured and its records; the record has "
        f"the command that runs it again. Every row of every machine: `{_ALL}`.",
    ]
    return "\n\n".join(blocks) + "\n"


def write(entries: Sequence[Entry], out: Path) -> list[Path]:
    """The pages and charts in the folder; their paths."""
    by_machine: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: (is_cpu(entry.machine), machine_name(entry.machine))):
        by_machine.setdefault(machine_name(entry.machine), []).append(entry)
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = [out / "report.md"]
        written[0].write_text(index(by_machine, entries), encoding="utf-8")
        for name, its in by_machine.items():
            text, figure = machine_page(name, its, entries)
            written.append(out / f"{slug(name)}.md")
            written[-1].write_text(text, encoding="utf-8")
            if figure is not None:
                written.append(out / f"{slug(name)}.png")
                figure.savefig(written[-1], dpi=100, metadata={"Software": None})
                plt.close(figure)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written to ({error.strerror}): name another folder") from error
    return written


def readme_table(entries: Sequence[Entry]) -> str:
    """Return the text between README's markers."""
    rows = suite(entries)
    lines = [
        "The [benchmark report](docs/benchmark-report/report.md) has a page a machine. "
        + (
            "All are CPUs: no GPU has run this yet."
            if all(is_cpu(e.machine) for e in entries)
            else "Rows marked CPU were measured on a CPU."
        )
    ]
    found, shown = tables.searches(rows), tables.gpu_kernels(rows)
    for machine in filter(None, (leading_machine(rows, "decoding", cpu) for cpu in (True, False))):
        some = found[found.machine == machine]
        said = f"Searches with paper-base, {machine}, {origin(some.entry)}. {tables.searches_note(some)}"
        lines += ["", said, "", markdown(*tables.grid(some))]
    for (machine, dtype), some in shown.groupby(["machine", "dtype"], sort=False):
        said = f"Kernels, {short_dtype(dtype)}, {machine}, {origin(some.entry)}. {tables.KERNELS_NOTE}"
        lines += ["", said, "", markdown(*tables.kernels(some))]
    leading = (
        f"- {claim.what}: {claim.figure}; commit {origin(claim.entries)}" for claim in claims(entries) if claim.leads
    )
    return "\n".join([*lines, "", *leading])


def updated(readme: str, entries: Sequence[Entry]) -> str:
    """README with its figures as the records have them."""
    return replaced(readme, BEGIN, END, f"\n{readme_table(entries)}\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m benchmarks report", description="A page a machine from all records; README's figures."
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder or file of records (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the report (default: %(default)s)")
    parser.add_argument("--readme", action="store_true", help="write README's measured figures too")
    parser.add_argument("--all", action="store_true", help="print every row of the suite as CSV, and write nothing")
    args = parser.parse_args(argv)
    entries = load(args.results)
    if args.all:
        lines = [{"file": e.file, "line": e.line, **e.record} for e in entries if e.kind == "benchmark"]
        pd.json_normalize(lines).to_csv(sys.stdout, index=False)
        return 0
    written = write(entries, args.out)
    print(f"{len(entries)} records: {', '.join(str(path) for path in written if path.suffix == '.md')}")
    if args.readme:
        text = README.read_text(encoding="utf-8")
        new = updated(text, entries)
        README.write_text(new, encoding="utf-8")
        print(f"README's figures {'are new' if new != text else 'are as the records have them'}")
    return 0
