"""The benchmark report: an index, a page and a chart per machine, README's blocks and the pictures of docs.

python -m benchmarks report              docs/benchmark-report
python -m benchmarks report --readme     README's blocks and docs/images too
python -m benchmarks check               whether all of them match the records
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks import command, host
from benchmarks.measure.machine import ROOT, is_cpu, machine_name, slug
from benchmarks.measure.providers import OURS
from benchmarks.measure.records import GROUPS, RESULTS, Entry, load
from benchmarks.measure.text_table import duration, markdown, number, short_dtype
from benchmarks.report import pictures, readme, seeds
from benchmarks.report.rows import TITLES, duels, suite, without_pool
from fasttfm.cli.parser import Parser

OUT = ROOT / "docs" / "benchmark-report"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, names: int = 1) -> str:
    """Markdown table of plain text; the first `names` columns are words, the others numbers."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    return markdown(cells[0], cells[1:], names=names)


def statuses(rows: pd.DataFrame) -> str:
    if rows.empty:
        return "no rows of the suite"
    parts = [f"{count} {status}" for status, count in rows.status.value_counts().items()]
    return f"{len(rows)} rows: {', '.join(parts)}{f'; {rows.noisy.sum()} noisy' if rows.noisy.any() else ''}"


# ------------------------------------------------------------------------------------------------------------ a machine


def machine_page(name: str, entries: Sequence[Entry], everything: Sequence[Entry], *, charted: bool) -> str:
    """Page of one machine, with its chart if charted."""
    rows = suite(entries)
    sections = dict(_sections(entries, rows))
    contents = " · ".join(f"[{title}](#{_anchor(title)})" for title in sections)
    versions = [
        f"{part} {', '.join(found)}"
        for part in ("torch", "triton", "fasttfm", "driver")
        if (found := sorted({str(entry.machine[part]) for entry in entries if entry.machine.get(part)}))
    ]
    commits = ", ".join(dict.fromkeys(_commit(entry) for entry in entries if entry.kind == "benchmark"))
    blocks = [
        f"# {name}",
        readme.notice(everything),
        f"{statuses(rows).capitalize()}; measured {_days(entries)} with {', '.join(versions)}"
        f"{f', the suite at commit {commits}' if commits else ''}. Results are checked before timing. **Bold**: ours "
        "is not the fastest. ±: half of p20 to p80. Ratio: the other's time over ours. Of limit: the device's minimum "
        "time over ours. MiB: peak memory above the start. Noisy: times spread by more than a quarter, or the machine "
        "was busy; left out of means. [Benchmarks](../benchmarks.md#reading-a-row) explains a row; rows of slower "
        "providers are in the records.",
        contents,
    ]
    if charted:
        blocks.append(f"![Time of the fastest other over ours, by kernel]({slug(name)}.png)")
    for title, content in sections.items():
        blocks += [f"## {title}", *content]
    return "\n\n".join(blocks) + "\n"


def _sections(entries: Sequence[Entry], rows: pd.DataFrame) -> Iterator[tuple[str, list[str]]]:
    """(title, blocks) of each section of a page."""
    if runs := [_run(entry) for entry in entries if entry.kind in ("end_to_end", "speedrun")]:
        head = ("trained by", "of commit", "updates", "minutes", "tokens/s", "BLEU, cased", "signature")
        means = [f"- `{_words(mean.command)}`{_scored(mean.test)}: {mean.words()}" for mean in seeds.means(entries)]
        yield "From text to a score", [table(head, runs, names=2), *(["\n".join(means)] if means else [])]
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
    """Table of a program's record, without columns that are lists, under its command."""
    rows = pd.DataFrame(entry.record["measured"])
    rows = rows.loc[:, ~rows.map(lambda value: isinstance(value, list)).any()].astype(object).fillna("")
    head = [name.replace("_", " ") for name in rows]
    made = f"`{entry.machine['command']}`, commit {_commit(entry)} of {str(entry.machine['time'])[:10]}:"
    return f"{made}\n\n{table(head, rows.astype(str).to_numpy().tolist(), names=2)}"


def _commit(entry: Entry) -> str:
    """The measured commit, marked if the tree had local changes."""
    commit = str(entry.machine.get("commit") or "unknown")[:7]
    return f"{commit} with changes" if entry.machine.get("uncommitted_changes") else commit


def _run(entry: Entry) -> tuple[str, ...]:
    """Cells of an end-to-end run, with minutes of training (of a speedrun: of all steps)."""
    run = entry.record
    note = f"; {run['note']}" if "note" in run else ""
    return (
        f"`{_words(run['train_command'])}`{_scored(run.get('test'))}",
        f"{_commit(entry)} of {str(entry.machine['time'])[:10]}{note}",
        f"{run['updates']:,}",
        f"{run.get('training_minutes', run.get('minutes')):.1f}",
        f"{run['target_tokens_per_second']:,}" if "target_tokens_per_second" in run else "",
        f"{run['bleu']:.2f}",
        f"`{run['bleu_signature'].removeprefix('BLEU|')}`",
    )


def _words(command: str) -> str:
    return command.removeprefix("fasttfm train ").removeprefix("python -m benchmarks.peers.")


def _scored(test: str | None) -> str:
    return f", scored on {test}" if test else ""


def _group(rows: pd.DataFrame) -> Iterator[str]:
    """Tables of one group and dtype."""
    if (rows.level == "smoke").any():
        yield "> **Some rows are of level smoke, which only checks that everything runs: their times are meaningless.**"
    if (rows.status == "timed").any():
        head = ("case", "pass", "ours", "fastest other", "ratio", "of limit", "MiB", "MiB, other")
        yield table(head, [_case(duel) for duel in duels(rows).to_dict("records")], names=2)
    if any(map(without_pool, rows.entry)):
        yield "Memory of CUDA graphs is left out: it was measured without the graph's pool."
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
    """Cells of a case: our fastest provider, the fastest other, share of the roofline, memory."""
    variant = duel["provider"].removeprefix(OURS).strip(", ")
    spread = f"±{duel['spread'] / 2:{'.0%' if duel['spread'] >= 0.02 else '.1%'}}"  # half of p20 to p80
    ours = f"{duration(duel['p50'])} {spread}{f', {variant}' if variant else ''}"
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


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def _days(entries: Sequence[Entry]) -> str:
    days = sorted(str(entry.machine["time"])[:10] for entry in entries)
    return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


# --------------------------------------------------------------------------------------------------------- all machines


def index(by_machine: dict[str, list[Entry]], everything: Sequence[Entry]) -> str:
    lines = []
    for name, entries in by_machine.items():
        rows = suite(entries)
        held = [TITLES[group].lower() for group in GROUPS if (rows.group == group).any()]
        held += sorted({entry.kind.replace("_", " ") for entry in entries if entry.kind != "benchmark"})
        lines.append((f"[{name}]({slug(name)}.md)", _days(entries), ", ".join(held), statuses(rows)))
    blocks = [
        "# Benchmark report",
        "The encoder-decoder Transformer and its peers, one page per machine, generated from the records in "
        "`benchmarks/results` by `python -m benchmarks report`.",
        readme.notice(everything),
        table(("machine", "measured", "what", "rows of the suite"), lines, names=4),
        "Providers take turns on the same random inputs with cold caches; wrong results have no time. Means leave out "
        "cases with a noisy row. Each record has the measured commit and the command to run it again.",
    ]
    return "\n\n".join(blocks) + "\n"


def written(entries: Sequence[Entry], out: Path, *, with_readme: bool) -> dict[Path, str | pictures.Drawn]:
    """Path -> text or picture of each page and chart in the folder; with_readme: README and docs/images too."""
    by_machine: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: (is_cpu(entry.machine), machine_name(entry.machine))):
        by_machine.setdefault(machine_name(entry.machine), []).append(entry)
    files: dict[Path, str | pictures.Drawn] = {out / "report.md": index(by_machine, entries)}
    for name, measured in by_machine.items():
        chart = pictures.bars(measured)
        files[out / f"{slug(name)}.md"] = machine_page(name, measured, entries, charted=chart is not None)
        if chart is not None:
            files[out / f"{slug(name)}.png"] = chart
    if with_readme:
        files[readme.README] = readme.updated(readme.README.read_text(encoding="utf-8"), entries)
        files.update(pictures.pictures(entries))
    return files


def _is_stale(path: Path, content: str | pictures.Drawn) -> bool:
    if isinstance(content, str):
        return not path.is_file() or path.read_text(encoding="utf-8") != content
    return pictures.is_stale(path, *content)


def check() -> int:
    """Print the files that differ from the records; returns the exit status, 1 if there are any."""
    stale = [path for path, content in written(load(), OUT, with_readme=True).items() if _is_stale(path, content)]
    print("\n".join([f"{path} differs from the records" for path in stale] or ["all files match the records"]))
    return 1 if stale else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks report", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--results", type=Path, default=RESULTS, help="folder or file of records (default: %(default)s)")
    add("--out", type=Path, default=OUT, help="folder of the report (default: %(default)s)")
    add("--readme", action="store_true", help="write README's blocks and docs/images too")
    args = parser.parse_args(argv)
    entries = load(args.results)
    files = written(entries, args.out, with_readme=args.readme)
    command.writable(args.out)
    for path, content in files.items():
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            pictures.save(path, *content)
    print(f"{len(entries)} records: {', '.join(str(path) for path in files if path.suffix == '.md')}")
    return 0
