"""The report's sections of whole runs: BLEU against minutes, and how rows changed from commit to commit."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

from benchmarks.measure import records
from benchmarks.measure.machine import git
from benchmarks.measure.providers import OURS
from benchmarks.measure.result_files import ENDINGS, Entry, Loaded, grouped, machine_name
from benchmarks.measure.text_table import number
from benchmarks.report import plots
from benchmarks.report.document import Block, Cards, Figure, Section, Table, Text
from benchmarks.report.headline import corpus_and_peer
from benchmarks.report.plots import Axes, Point, Series


def end_to_end(files: Loaded) -> Section | None:
    """Validation curves and final scores; None without such records."""
    entries = files.of_kind("end_to_end")
    if not entries:
        return None
    figures = []
    by_corpus = grouped(entries, lambda e: (corpus_and_peer(e.record["corpus"])[0], machine_name(e.machine)))
    for index, ((corpus, machine), runs) in enumerate(by_corpus.items()):
        name, finals = f"bleu-{index}", []
        series: list[Series] = []
        for entry in runs:
            label = corpus_and_peer(entry.record["corpus"])[1] or OURS
            curve = entry.record["validation_curve"]
            points = [Point(v["seconds"] / 60, v["bleu"]) for v in curve if {"seconds", "bleu"} <= v.keys()]
            if points:
                series.append(Series(label, points, plots.OURS if label == OURS else 1 + len(series) % plots.SERIES))
            finals.append(f"{label} {entry.record['bleu']:.2f} ({entry.location})")
        if series:
            axes = Axes("minutes of training", "BLEU of the validation set", width=420, height=270)
            svg = plots.lines(name, f"BLEU against minutes, {corpus}", series, axes)
            note = f"{machine}; test {', '.join(finals)}"
            figures.append(Figure(name, svg, f"{corpus}: BLEU against minutes", note))
    rows = [
        (
            e.record["corpus"],
            machine_name(e.machine),
            f"`{e.record['train_command']}`",
            e.record.get("note", ""),
            f"{e.record['bleu']:.2f}",
            f"{e.record['training_minutes']:.1f}",
            f"{e.record['updates']:,}",
            f"{e.record['target_tokens_per_second']:,}",
            f"{e.record['padding']:.1%}",
            f"{e.record['translate_seconds']:.1f}",
            f"{e.record['chrf']:.1f}",
            e.location,
        )
        for e in entries
    ]
    head = (
        *("corpus", "machine", "command", "note", "test BLEU", "minutes", "updates", "target tokens/s", "padding"),
        *("translate s", "chrF", "record"),
    )
    blocks: list[Block] = [
        Text(
            "From raw text to a scored translation with the commands that a user types. The curve is of the "
            "validation set."
        ),
        Cards(figures),
        Table(head, rows, names=4),
    ]
    return Section("runs", "From text to BLEU", blocks)


def history(files: Loaded) -> list[Entry]:
    """Every record that git or the folder holds of these files, each once, the oldest measurement first.

    A committed record and the same one in the folder are one, so that committing changes nothing. Lines that are no
    records of today's schema are left out.
    """
    folder = files.folder if files.folder.is_dir() else files.folder.parent
    result: dict[str, Entry] = {}
    in_folder = partial(git, folder=folder)
    for version in (in_folder("log", "--format=%H", "--", ".") or "").split():
        changed = in_folder("diff-tree", "--root", "--no-commit-id", "--name-only", "--relative", "-r", version) or ""
        for name in changed.splitlines():
            if name.endswith(ENDINGS) and "/" not in name:
                for line, record in _readable(in_folder("show", f"{version}:./{name}") or ""):
                    result.setdefault(json.dumps(record, sort_keys=True), Entry(name, line, record))
    for entry in files.entries:
        result.setdefault(json.dumps(entry.record, sort_keys=True), entry)
    return sorted(result.values(), key=lambda e: (str(e.machine["time"]), e.file, json.dumps(e.record, sort_keys=True)))


def _readable(text: str) -> Iterable[tuple[int, records.Record]]:
    for line_number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            records.validate(record)
        except (ValueError, TypeError, AttributeError):
            continue
        yield line_number, record


def time_line(files: Loaded) -> Section:
    """How fasttfm's own rows and the end-to-end scores changed over the commits that they were measured at."""
    entries = history(files)
    section = Section("time-line", "Time line of commits")
    section.blocks.append(
        Text(
            "The same row measured at several commits, from the records' history in git. A point is the geometric mean "
            "of fasttfm's times relative to each row's first measurement: below 1 is faster than it was."
        )
    )
    figures = [*_speed_figures(entries), *_score_figures(entries)]
    if figures:
        section.blocks.append(Cards(figures))
    else:
        section.blocks.append(Text("Every row has one measurement so far: a line needs two."))
    rows = _rows(entries)
    if rows:
        head = ("what", "machine", "commit", "measured at", "rows")
        section.blocks.append(Table(head, rows, names=4, folded=f"{len(rows)} measurements"))
    return section


def _commit(entry: Entry) -> str:
    return str(entry.machine["commit"] or "none")[:7] + ("+" if entry.machine["uncommitted_changes"] else "")


def _what(entry: Entry) -> str:
    return str(entry.record.get("group") or entry.record.get("corpus") or entry.record.get("example") or entry.kind)


def _rows(entries: Sequence[Entry]) -> list[tuple[str, ...]]:
    result = Counter(
        (_what(entry), machine_name(entry.machine), f"`{_commit(entry)}`", str(entry.machine["time"])[:16])
        for entry in entries
    )
    return [(*key, str(count)) for key, count in result.items()]


def _speed_figures(entries: Sequence[Entry]) -> list[Figure]:
    groups: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for entry in entries:
        if entry.kind == "benchmark" and entry.timed and entry.provider == OURS:
            group_key = (entry.record["group"], machine_name(entry.machine))
            key = records.key(entry.record) + entry.record["level"]
            groups.setdefault(group_key, {}).setdefault(key, {})[_commit(entry)] = entry.p50
    figures = []
    for nth, ((group, machine), rows) in enumerate(groups.items()):
        commits = list(dict.fromkeys(commit for times in rows.values() for commit in times))
        means = []
        for position, commit in enumerate(commits):
            logs = [math.log(t[commit] / next(iter(t.values()))) for t in rows.values() if commit in t and len(t) > 1]
            if logs:
                means.append(Point(position, math.exp(sum(logs) / len(logs))))
        if len(means) > 1:
            name = f"time-line-{nth}"
            axes = Axes("commit", "time relative to the first", width=420, height=250, x_names=commits)
            svg = plots.lines(name, f"{group} over commits", [Series(OURS, means)], axes, level=1.0)
            figures.append(Figure(name, svg, f"{group.replace('_', ' ')}: fasttfm's time", machine))
    return figures


def _score_figures(entries: Sequence[Entry]) -> list[Figure]:
    whole = (entry for entry in entries if entry.kind == "end_to_end")
    runs = grouped(whole, lambda entry: (entry.record["corpus"], machine_name(entry.machine)))
    figures = []
    for nth, ((corpus, machine), members) in enumerate(runs.items()):
        if len(members) < 2:
            continue
        name = f"time-line-bleu-{nth}"
        points = [Point(position, e.record["bleu"]) for position, e in enumerate(members)]
        axes = Axes("commit", "test BLEU", width=420, height=250, x_names=[_commit(e) for e in members])
        svg = plots.lines(name, f"{corpus} over commits", [Series(corpus, points)], axes)
        speed = ", ".join(f"{number(e.record['target_tokens_per_second'])}" for e in members)
        figures.append(Figure(name, svg, f"{corpus}: BLEU by commit", f"{machine}; target tokens/s {speed}"))
    return figures
