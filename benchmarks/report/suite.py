"""The report's sections of the suite's own rows: who is how fast at what, with every row that has no time and why."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.measure.providers import OURS
from benchmarks.measure.result_files import Entry, Loaded, grouped, machine_name, shape_text, short_dtype
from benchmarks.measure.schemas import GROUPS
from benchmarks.measure.text_table import duration, number
from benchmarks.report import plots
from benchmarks.report.document import Block, Cards, Figure, Heading, Notice, Section, Table
from benchmarks.report.headline import by_case
from benchmarks.report.plots import Axes, Bar, Point, Series

TITLES = {
    "kernels": "Kernels",
    "blocks": "Layers",
    "training_step": "Training step",
    "decoding": "Decoding",
    "padding": "Padding and packing",
    "end_to_end": "End to end, timed",
}
_LENGTHS, _BATCHES = ("L", "length"), ("batch", "B", "sentences")

Where = tuple[str, str, str]
"""Machine, dtype, threads."""


def where(entry: Entry) -> Where:
    threads = entry.record["threads"]
    return machine_name(entry.machine), entry.record["dtype"], f"{threads} thread{'s' * (threads != 1)}"


def where_text(setting: Where) -> str:
    machine, dtype, threads = setting
    return f"{machine}, {threads}, {dtype}" if machine.startswith("CPU") else f"{machine}, {dtype}"


def sections(files: Loaded) -> list[Section]:
    """One for every group that has rows."""
    result = []
    by_group = grouped(files.suite, lambda e: e.record["group"])
    for group in GROUPS:
        if group in by_group:
            section = Section(group, TITLES[group])
            for setting, entries in grouped(by_group[group], where).items():
                section.blocks += _machine_blocks(group, setting, entries)
            result.append(section)
    return result


def _machine_blocks(group: str, setting: Where, entries: Sequence[Entry]) -> list[Block]:
    slug = "".join(c if c.isalnum() else "-" for c in f"{group}-{setting[0]}-{setting[1]}".lower())
    blocks: list[Block] = [Heading(where_text(setting))]
    if any(entry.record["level"] == "smoke" for entry in entries):
        blocks.append(
            Notice("Some rows were run with `--smoke`, to see that everything runs: their times mean nothing.")
        )
    summary = _against_each(f"{slug}-summary", setting, entries)
    blocks += [summary] if summary else []
    for nth, (case, rows) in enumerate(grouped(entries, lambda e: e.record["case"]).items()):
        cards = [_case_card(f"{slug}-{nth}-{i}", setting, members) for i, members in enumerate(by_case(rows))]
        blocks.append(
            Cards(cards, folded=f"{case.replace('_', ' ')}: {_count(len(cards), 'case')}, bars with p20 to p80")
        )
    blocks += _scaling(slug, setting, entries)
    blocks += _scatter(slug, setting, entries)
    blocks.append(_rows_table(f"All {len(entries)} rows of {TITLES[group].lower()} on {setting[0]}", entries))
    return blocks


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def ratios(entries: Sequence[Entry]) -> dict[str, list[float]]:
    """For every other provider, its median time over ours in each case that both ran."""
    result: dict[str, list[float]] = {}
    for rows in by_case([entry for entry in entries if entry.timed]):
        times = {row.provider: row.p50 for row in rows}
        for provider, time in times.items():
            if OURS in times and provider != OURS:
                result.setdefault(provider, []).append(time / times[OURS])
    return result


def _against_each(name: str, setting: Where, entries: Sequence[Entry]) -> Figure | None:
    rows = []
    for provider, values in ratios(entries).items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        shown = f"{mean:.2f}x in {_count(len(values), 'case')}"
        rows.append(Bar(provider, mean, min(values), max(values), shown))
    if not rows:
        return None
    rows.sort(key=lambda row: (-(row.value or 0.0), row.label))
    title = "Time of each provider in units of fasttfm's"
    svg = plots.ratios(name, title, rows)
    note = f"{where_text(setting)}. Dot: geometric mean over the cases that both ran; whisker: least to most."
    return Figure(name, svg, title, note)


def _bar(entry: Entry, ours: float | None) -> Bar:
    record = entry.record
    label, is_ours = record["provider"], record["provider"].startswith(OURS)
    if not entry.timed:
        return Bar(
            label, None, shown=f"{record['status']}: {record['reason']}", ours=is_ours, bad=record["status"] == "wrong"
        )
    time = record["time_us"]
    shown = duration(time["p50"])
    if ours is not None and label != OURS:
        shown += f" · {time['p50'] / ours:.2f}x"
    return Bar(label, time["p50"], time["p20"], time["p80"], shown, is_ours)


def _case_card(name: str, setting: Where, rows: Sequence[Entry]) -> Figure:
    """One case: what each provider took, from the quickest on, then who did not run."""
    record = rows[0].record
    present = [row for row in rows if row.record["status"] != "absent"]
    ours = next((row.p50 for row in present if row.timed and row.provider == OURS), None)
    present.sort(key=lambda row: (not row.timed, row.p50 if row.timed else 0.0))
    bars = [_bar(row, ours) for row in present]
    absent = [row.provider for row in rows if row.record["status"] == "absent"]
    if absent:
        bars.append(Bar("absent", None, shown=", ".join(absent)))
    floors = [row.record["roofline"]["floor_us"] for row in present if row.record["roofline"]]
    limit = floors[0] if floors and floors[0] else None
    label = f"physical limit here {duration(limit)}" if limit else ""
    title = f"{record['case'].replace('_', ' ')}, {record['pass']}"
    svg = plots.bars(name, f"{title}, {shape_text(record['shape'])}", bars, mark=limit, mark_label=label)
    rates = {row.provider: row.record["throughput"] for row in present if row.record["throughput"]}
    unit = next((rate["unit"] for rate in rates.values()), "")
    done = ", ".join(f"{provider} {number(rate['value'])}" for provider, rate in rates.items())
    note = f"{shape_text(record['shape'])}; {where_text(setting)}" + (f". **{done} {unit}**" if done else "")
    return Figure(name, svg, title, note)


def _varying(entry: Entry, names: Sequence[str], beside: Sequence[str]) -> tuple[str, float] | None:
    """The first of the shape's names that is there, and its value; the key of everything else."""
    shape = entry.record["shape"]
    name = next((n for n in names if isinstance(shape.get(n), int)), None)
    if name is None:
        return None
    rest = {key: value for key, value in shape.items() if key != name and key not in beside}
    return json.dumps([entry.record["case"], entry.record["pass"], rest]), shape[name]


def _curves(
    entries: Sequence[Entry],
    names: Sequence[str],
    beside: Sequence[str],
    value: Callable[[Entry], tuple[float, float, float] | None],
) -> list[tuple[str, list[Series]]]:
    """Series by provider for every set of rows that differ in one size alone and have two values of it."""
    result = []
    groups: dict[str, list[tuple[Entry, float]]] = {}
    for entry in entries:
        if entry.timed and (key := _varying(entry, names, beside)):
            groups.setdefault(key[0], []).append((entry, key[1]))
    pieces = [(together, *part) for together, whole in groups.items() for part in _by_other_sizes(whole, beside)]
    for together, more, members in pieces:
        if len({x for _, x in members}) < 2:
            continue
        series = []
        providers = list(dict.fromkeys(entry.provider for entry, _ in members))
        for provider in sorted(providers, key=lambda p: p != OURS):
            points = []
            for entry, x in sorted(members, key=lambda m: m[1]):
                y = value(entry) if entry.provider == provider else None
                if y is not None:
                    points.append(Point(x, *y))
            if points:
                series.append(Series(provider, points, _colour(provider, providers)))
        case, passes, rest = json.loads(together)
        if series:
            result.append((f"{case.replace('_', ' ')}, {passes}; {shape_text(more | rest)}".removesuffix("; "), series))
    return result


def _by_other_sizes(
    members: Sequence[tuple[Entry, float]], beside: Sequence[str]
) -> list[tuple[dict[str, Any], list[tuple[Entry, float]]]]:
    """All of them, where a provider has each size once; else by the sizes beside it, which then vary on their own."""
    keys = [(entry.provider, x) for entry, x in members]
    if len(set(keys)) == len(keys):
        return [({}, list(members))]
    parts: dict[str, tuple[dict[str, Any], list[tuple[Entry, float]]]] = {}
    for entry, x in members:
        sizes = {key: value for key, value in entry.record["shape"].items() if key in beside}
        parts.setdefault(json.dumps(sizes), (sizes, []))[1].append((entry, x))
    return list(parts.values())


def _colour(provider: str, providers: Sequence[str]) -> int:
    if provider == OURS:
        return plots.OURS
    others = [p for p in providers if p != OURS]
    return 1 + others.index(provider) % plots.SERIES


def _per_token(entry: Entry) -> tuple[float, float, float] | None:
    shape, time = entry.record["shape"], entry.record["time_us"]
    batch = next((shape[n] for n in _BATCHES if isinstance(shape.get(n), int)), 1)
    tokens = batch * next(shape[n] for n in _LENGTHS if n in shape)
    return time["p50"] / tokens, time["p20"] / tokens, time["p80"] / tokens


def _throughput(entry: Entry) -> tuple[float, float, float] | None:
    result, time = entry.record["throughput"], entry.record["time_us"]
    if not result:
        return None
    done = result["value"] * time["p50"]
    return result["value"], done / time["p80"], done / time["p20"]


def _scaling(slug: str, setting: Where, entries: Sequence[Entry]) -> list[Block]:
    blocks: list[Block] = []
    dependent = (*_BATCHES, "S")  # a batch is made of about as many tokens whatever the length
    units = [e.record["throughput"]["unit"] for e in entries if e.timed and e.record["throughput"]]
    by_length = _curves(entries, _LENGTHS, dependent, _per_token)
    by_batch = _curves(entries, _BATCHES, (), _throughput)
    for kind, curves, x_label, y_label in (
        ("length", by_length, "tokens in a sentence", "µs a token"),
        ("batch", by_batch, "sentences in a batch", next(iter(units), "")),
    ):
        title, figures = f"Scaling with {kind}", []
        for i, (label, series) in enumerate(curves):
            name = f"{slug}-{kind}-{i}"
            axes = Axes(x_label, y_label, x_log=True, y_log=True, width=420, height=270)
            svg = plots.lines(name, f"{title}: {label}", series, axes)
            figures.append(Figure(name, svg, label, where_text(setting)))
        if figures:
            blocks += [Heading(f"{title}, bands p20 to p80"), Cards(figures)]
    return blocks


def _scatter(slug: str, setting: Where, entries: Sequence[Entry]) -> list[Block]:
    timed = [
        e for e in entries if e.timed and e.record["tflop_per_s"] and e.record["gb_per_s"] and e.record["roofline"]
    ]
    if not timed:
        return []
    by_provider = grouped(timed, lambda e: e.provider)
    series = []
    for provider in sorted(by_provider, key=lambda p: p != OURS):
        done = [(e.record["tflop_per_s"], e.record["gb_per_s"]) for e in by_provider[provider]]
        points = [Point(1e3 * tflop_per_s / gb_per_s, tflop_per_s) for tflop_per_s, gb_per_s in done]
        series.append(Series(provider, points, _colour(provider, list(by_provider)), joined=False))
    # ceilings are measured case by case: the best that was seen is what the device can do
    rates = [e.record["roofline"]["ceilings"] for e in timed]
    name = f"{slug}-roofline"
    svg = plots.roofline(
        name,
        "Roofline",
        series,
        gb_per_s=max(r["gb_per_s"] for r in rates),
        tflop_per_s=max(r["tflop_per_s"] for r in rates),
    )
    note = (
        f"{where_text(setting)}. A dot a row; bytes and FLOPs are those that the work needs, not those that were moved."
    )
    return [Figure(name, svg, "Roofline", note)]


_HEAD = (
    *("case", "shape", "pass", "provider", "status"),
    *("p20", "p50", "p80", "runs", "throughput", "TFLOP/s", "GB/s", "of limit", "peak MiB", "launches", "first call s"),
    *("error", "allowed", "record"),
)


def _rows_table(title: str, entries: Sequence[Entry]) -> Table:
    def shown(value: float | None) -> str:
        return "" if value is None else number(value)

    rows = []
    for entry in entries:
        r = entry.record
        time, error, roof, rate = r["time_us"] or {}, r["error"] or {}, r["roofline"] or {}, r["throughput"] or {}
        rows.append(
            (
                r["case"].replace("_", " "),
                shape_text(r["shape"]),
                r["pass"],
                r["provider"],
                f"{r['status']}: {r['reason']}" if r["reason"] else r["status"],
                *(duration(time[q]) if time else "" for q in ("p20", "p50", "p80")),
                str(time.get("runs", "")),
                f"{number(rate['value'])} {rate['unit']}" if rate else "",
                shown(r["tflop_per_s"]),
                shown(r["gb_per_s"]),
                f"{roof['share']:.0%}" if roof else "",
                shown(r["peak_bytes"] / 2**20) if r["peak_bytes"] is not None else "",
                "" if r["launches"] is None else str(r["launches"]),
                shown(r["compile_s"]),
                f"{error['value']:.1e}" if error else "",
                f"{error['allowed']:.1e}" if error else "",
                entry.location,
            )
        )
    return Table(_HEAD, rows, names=5, folded=f"{title}, {short_dtype(entries[0].record['dtype'])}")
