"""The benchmark report: an index, a page and a chart a machine; README's figures and the pictures of docs.

python -m benchmarks report              docs/benchmark-report
python -m benchmarks report --readme     README's blocks and docs/images too
python -m benchmarks report --all        every row as CSV on standard output
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from benchmarks import host
from benchmarks.measure.machine import ROOT, is_cpu, machine_name, slug
from benchmarks.measure.records import GROUPS, RESULTS, Entry, load
from benchmarks.measure.text_table import markdown, short_dtype
from benchmarks.report import pictures, tables
from benchmarks.report.headline import claims, origin
from benchmarks.report.readme import README, notice, updated
from benchmarks.report.rows import TITLES, ratios, suite, without_pool
from fasttfm.cli.parser import Parser
from fasttfm.errors import UserError

OUT = ROOT / "docs" / "benchmark-report"
_ALL = "python -m benchmarks report --all > rows.csv"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, names: int = 1) -> str:
    """A table of plain text; `names` columns at the left hold words, the others numbers."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    return markdown(cells[0], cells[1:], names=names)


def statuses(rows: pd.DataFrame) -> str:
    """The number of rows of each status."""
    if rows.empty:
        return "no row of the suite"
    parts = [f"{count} {status}" for status, count in rows.status.value_counts().items()]
    return f"{len(rows)} rows: {', '.join(parts)}{f'; {rows.noisy.sum()} noisy' if rows.noisy.any() else ''}"


# ------------------------------------------------------------------------------------------------------------ a machine


def machine_page(name: str, entries: Sequence[Entry], everything: Sequence[Entry], *, charted: bool) -> str:
    """The page of one machine; charted: whether it has a chart."""
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
    if charted:
        blocks.append(f"![Times of the fastest other over ours, a bar a kernel]({slug(name)}.png)")
    for title, its in sections.items():
        blocks += [f"## {title}", *its]
    return "\n\n".join(blocks) + "\n"


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


def written(entries: Sequence[Entry], out: Path, *, readme: bool) -> dict[Path, str | pictures.Drawn]:
    """The pages and charts in the folder: path -> text, or what is drawn. readme: README and docs/images too."""
    by_machine: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: (is_cpu(entry.machine), machine_name(entry.machine))):
        by_machine.setdefault(machine_name(entry.machine), []).append(entry)
    made: dict[Path, str | pictures.Drawn] = {out / "report.md": index(by_machine, entries)}
    for name, its in by_machine.items():
        drawn = pictures.bars(its)
        made[out / f"{slug(name)}.md"] = machine_page(name, its, entries, charted=drawn is not None)
        if drawn is not None:
            made[out / f"{slug(name)}.png"] = drawn
    if readme:
        made[README] = updated(README.read_text(encoding="utf-8"), entries)
        made.update(pictures.pictures(entries))
    return made


def drifted(entries: Sequence[Entry]) -> list[str]:
    """The pages and pictures of the repository that say something else than the records."""
    return [
        str(path)
        for path, its in written(entries, OUT, readme=True).items()
        if (
            not path.is_file() or path.read_text(encoding="utf-8") != its
            if isinstance(its, str)
            else pictures.is_stale(path, *its)
        )
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m benchmarks report", description="A page a machine from all records; README's figures."
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder or file of records (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the report (default: %(default)s)")
    parser.add_argument("--readme", action="store_true", help="write README's figures and draw docs/images too")
    parser.add_argument("--check", action="store_true", help="write nothing: name what differs from the records")
    parser.add_argument("--all", action="store_true", help="print every row of the suite as CSV, and write nothing")
    args = parser.parse_args(argv)
    entries = load(args.results)
    if args.all:
        lines = [{"file": e.file, "line": e.line, **e.record} for e in entries if e.kind == "benchmark"]
        pd.json_normalize(lines).to_csv(sys.stdout, index=False)
        return 0
    if args.check:
        found = drifted(entries)
        print("\n".join([f"{path} is not as the records have it" for path in found] or ["all as the records have it"]))
        return 1 if found else 0
    made = written(entries, args.out, readme=args.readme)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        for path, its in made.items():
            if isinstance(its, str):
                path.write_text(its, encoding="utf-8")
            else:
                pictures.save(path, *its)
    except OSError as error:
        raise UserError(f"--out {args.out} cannot be written to ({error.strerror}): name another folder") from error
    print(f"{len(entries)} records: {', '.join(str(path) for path in made if path.suffix == '.md')}")
    return 0
