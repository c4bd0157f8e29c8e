"""The benchmark report: an index, a page and a chart a machine; README's figures and the pictures of docs.

python -m benchmarks report              docs/benchmark-report
python -m benchmarks report --readme     README's blocks and docs/images too
python -m benchmarks report --all        every row as CSV on standard output
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks import host
from benchmarks.measure.machine import ROOT, is_cpu, machine_name, slug
from benchmarks.measure.providers import OURS
from benchmarks.measure.records import GROUPS, RESULTS, Entry, load
from benchmarks.measure.text_table import duration, markdown, number, short_dtype
from benchmarks.report import pictures, readme
from benchmarks.report.rows import TITLES, duels, suite, without_pool
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
    sections = dict(_sections(entries, rows))
    contents = " · ".join(f"[{title}](#{_anchor(title)})" for title in sections)
    versions = [
        f"{part} {', '.join(said)}"
        for part in ("torch", "triton", "fasttfm", "driver")
        if (said := sorted({str(entry.machine[part]) for entry in entries if entry.machine.get(part)}))
    ]
    commits = ", ".join(dict.fromkeys(_commit(entry) for entry in entries if entry.kind == "benchmark"))
    blocks = [
        f"# {name}",
        readme.notice(everything),
        f"{statuses(rows).capitalize()}; measured {_days(entries)} with {', '.join(versions)}"
        f"{f', the suite at commit {commits}' if commits else ''}. Numbers are checked before any time; "
        "**bold** where ours is not the fastest; ± is half of p20 to p80; ratio: how many times as "
        "fast ours is; of limit: the least time that the device allows over ours; MiB: most memory beyond what there "
        "was before; noisy: times that spread by more than a quarter, or a busy machine: in no sum. "
        f"[Benchmarks](../benchmarks.md#reading-a-row) explains a row. Every row, the slower ways too: `{_ALL}`.",
        contents,
    ]
    if charted:
        blocks.append(f"![Times of the fastest other over ours, a bar a kernel]({slug(name)}.png)")
    for title, its in sections.items():
        blocks += [f"## {title}", *its]
    return "\n\n".join(blocks) + "\n"


def _sections(entries: Sequence[Entry], rows: pd.DataFrame) -> Iterator[tuple[str, list[str]]]:
    """(title, blocks) of a page's sections."""
    if runs := [_run(entry) for entry in entries if entry.kind in ("end_to_end", "speedrun")]:
        head = ("trained by", "of commit", "updates", "minutes", "tokens/s", "BLEU, cased", "signature")
        yield "From text to a score", [table(head, runs, names=2)]
    for group in GROUPS:
        for (dtype, threads), part in rows[rows.group == group].groupby(["dtype", "threads"], sort=False):
            on = f", {threads} thread{'s' * (threads != 1)}" if part.cpu.any() else ""
            yield f"{TITLES[group]}, {short_dtype(dtype)}{on}", list(_group(part))
    for entry in entries:
        if entry.kind == "host":
            measured = table(host.HEAD, list(map(host.cells, entry.record["measured"])))
            yield "Host time", [host.note(entry.record), measured]
        elif "measured" in entry.record:
            of = next(entry.record[name] for name in ("data", "preset", "text") if name in entry.record)
            yield f"{entry.kind.replace('_', ' ').capitalize()}, {of}", [_measured(entry)]
    others = pd.Series([(entry.kind, entry.file) for entry in entries if entry.kind != "benchmark"])
    if len(others):
        files = [(kind, f"`{file}`", str(count)) for (kind, file), count in others.value_counts(sort=False).items()]
        yield "Other records", [table(("program", "file in benchmarks/results", "records"), files, names=2)]


def _measured(entry: Entry) -> str:
    """The rows of a record that is not of the suite, without what is a list, under its command."""
    rows = pd.DataFrame(entry.record["measured"])
    rows = rows.loc[:, ~rows.map(lambda value: isinstance(value, list)).any()].astype(object).fillna("")
    head = [name.replace("_", " ") for name in rows]
    made = f"`{entry.machine['command']}`, commit {_commit(entry)} of {str(entry.machine['time'])[:10]}:"
    return f"{made}\n\n{table(head, rows.astype(str).to_numpy().tolist(), names=2)}"


def _commit(entry: Entry) -> str:
    """The commit that was measured, marked where the tree had changes."""
    commit = str(entry.machine.get("commit") or "unknown")[:7]
    return f"{commit} with changes" if entry.machine.get("uncommitted_changes") else commit


def _run(entry: Entry) -> tuple[str, ...]:
    """The cells of a whole run; the minutes are those of training, of a speedrun all."""
    run = entry.record
    words = run["train_command"].removeprefix("fasttfm train ").removeprefix("python -m benchmarks.peers.")
    note = f"; {run['note']}" if "note" in run else ""
    return (
        f"`{words}`",
        f"{_commit(entry)} of {str(entry.machine['time'])[:10]}{note}",
        f"{run['updates']:,}",
        f"{run.get('training_minutes', run.get('minutes')):.1f}",
        f"{run['target_tokens_per_second']:,}" if "target_tokens_per_second" in run else "",
        f"{run['bleu']:.2f}",
        f"`{run['bleu_signature'].removeprefix('BLEU|')}`",
    )


def _group(rows: pd.DataFrame) -> Iterator[str]:
    """The tables of one group and dtype."""
    if (rows.level == "smoke").any():
        yield "> **Some rows were run with `--smoke`, to see that everything runs: their times mean nothing.**"
    if (rows.status == "timed").any():
        head = ("case", "pass", "ours", "fastest other", "ratio", "of limit", "MiB", "MiB, other")
        yield table(head, [_case(duel) for duel in duels(rows).to_dict("records")], names=2)
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


def _case(duel: dict) -> list[str]:
    """The cells of a case: our fastest way, the fastest other, what is left to the device's limit, memory."""
    way = duel["provider"].removeprefix(OURS).strip(", ")
    ours = f"{duration(duel['p50'])} {_plus_minus(duel['spread'])}{f', {way}' if way else ''}"
    alone = np.isnan(duel["ratio"])
    return [
        f"{duel['case']} {duel['text']}",
        duel["pass"],
        f"**{ours}**" if duel["ratio"] < 1 else ours,
        "" if alone else f"{duel['provider_other']} {duration(duel['p50_other'])}",
        "" if alone else f"{duel['ratio']:.2f}x{', noisy' if duel['noisy'] else ''}",
        "" if np.isnan(duel["share"]) else f"{duel['share']:.0%}" if duel["share"] >= 0.01 else "<1%",
        *("" if np.isnan(value) else number(value) for value in (duel["mib"], duel["mib_other"])),
    ]


def _plus_minus(spread: float) -> str:
    """Half of p20 to p80 as a share of the median."""
    return f"±{spread / 2:.0%}" if spread >= 0.02 else f"±{spread / 2:.1%}"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def _days(entries: Sequence[Entry]) -> str:
    days = sorted(str(entry.machine["time"])[:10] for entry in entries)
    return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


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
        readme.notice(everything),
        table(("machine", "measured", "what", "rows of the suite"), lines, names=4),
        "Providers take turns on the same random inputs and cold caches; no time is kept of wrong numbers. A sum is of "
        "the cases of which no row is noisy; the record has the commit that was measured and the command that runs it "
        f"again. Every row of every machine: `{_ALL}`.",
    ]
    return "\n\n".join(blocks) + "\n"


def written(entries: Sequence[Entry], out: Path, *, with_readme: bool) -> dict[Path, str | pictures.Drawn]:
    """The pages and charts in the folder: path -> text, or what is drawn; with_readme: README and docs/images too."""
    by_machine: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: (is_cpu(entry.machine), machine_name(entry.machine))):
        by_machine.setdefault(machine_name(entry.machine), []).append(entry)
    made: dict[Path, str | pictures.Drawn] = {out / "report.md": index(by_machine, entries)}
    for name, its in by_machine.items():
        drawn = pictures.bars(its)
        made[out / f"{slug(name)}.md"] = machine_page(name, its, entries, charted=drawn is not None)
        if drawn is not None:
            made[out / f"{slug(name)}.png"] = drawn
    if with_readme:
        made[readme.README] = readme.updated(readme.README.read_text(encoding="utf-8"), entries)
        made.update(pictures.pictures(entries))
    return made


def drifted(entries: Sequence[Entry]) -> list[str]:
    """The pages and pictures of the repository that say something else than the records."""
    return [
        str(path)
        for path, its in written(entries, OUT, with_readme=True).items()
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
    made = written(entries, args.out, with_readme=args.readme)
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
