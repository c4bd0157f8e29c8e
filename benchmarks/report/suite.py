"""The report's sections of the suite's own rows: who is how fast at what, with every row that has no time and why."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.measure.load import noisy
from benchmarks.measure.machine import machine_name
from benchmarks.measure.providers import OURS
from benchmarks.measure.result_files import Entry, Loaded, grouped, shape_text, short_dtype
from benchmarks.measure.schemas import GROUPS
from benchmarks.measure.text_table import duration, number
from benchmarks.report.document import Block, Section, Table
from benchmarks.report.headline import by_case

TITLES = {
    "kernels": "Kernels",
    "blocks": "Layers",
    "training_step": "Training step",
    "decoding": "Decoding",
    "padding": "Padding and packing",
}
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
            section = Section(TITLES[group])
            for setting, entries in grouped(by_group[group], where).items():
                section.blocks += _machine_blocks(group, setting, entries)
            result.append(section)
    return result


def _machine_blocks(group: str, setting: Where, entries: Sequence[Entry]) -> list[Block]:
    blocks: list[Block] = [f"### {where_text(setting)}"]
    if any(entry.record["level"] == "smoke" for entry in entries):
        blocks.append("> **Some rows were run with `--smoke`, to see that everything runs: their times mean nothing.**")
    blocks += _against_each(entries)
    blocks.append(_rows_table(f"All {len(entries)} rows of {TITLES[group].lower()} on {setting[0]}", entries))
    return blocks


def ratios(entries: Sequence[Entry]) -> dict[str, list[float]]:
    """For every other provider, its median time over ours in each case that both ran."""
    result: dict[str, list[float]] = {}
    for rows in by_case([entry for entry in entries if entry.timed]):
        times = {row.provider: row.p50 for row in rows}
        for provider, time in times.items():
            if OURS in times and provider != OURS:
                result.setdefault(provider, []).append(time / times[OURS])
    return result


def _against_each(entries: Sequence[Entry]) -> list[Block]:
    """Time of each provider in units of fasttfm's."""
    rows = []
    for provider, values in sorted(ratios(entries).items(), key=lambda item: -statistics.geometric_mean(item[1])):
        shown = (statistics.geometric_mean(values), min(values), max(values))
        rows.append([provider, *(f"{value:.2f}x" for value in shown), str(len(values))])
    head = ("time in units of fasttfm's", "geometric mean", "least", "most", "cases that both ran")
    return [Table(head, rows)] if rows else []


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
                f"{error['value']:.1e}" if error else "",
                f"{error['allowed']:.1e}" if error else "",
                entry.location,
            )
        )
    dtype = short_dtype(entries[0].record["dtype"])
    return Table(_HEAD, rows, names=5, title=f"{title}, {dtype}")
