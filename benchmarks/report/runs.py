"""The report's section of whole runs: from text to BLEU."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Drawing

from benchmarks.measure.machine import machine_name
from benchmarks.measure.providers import OURS
from benchmarks.measure.result_files import Loaded, grouped
from benchmarks.report.document import Block, Figure, Section, Table
from benchmarks.report.headline import corpus_and_peer

_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "fasttfm", "font.family": "sans-serif", "font.size": 9}
"""The same records give the same bytes, and text stays text."""


def draw(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """(minutes, BLEU) of each trainer as SVG."""
    with matplotlib.rc_context(_STYLE):
        drawing = Drawing(figsize=(4.4, 2.8), layout="constrained")
        axes = drawing.add_subplot()
        for label, points in curves.items():
            axes.plot(*zip(*points), "-o", label=label, markersize=4)
        axes.set(xlabel="minutes of training", ylabel="BLEU of the validation set", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def end_to_end(files: Loaded) -> Section | None:
    """Validation curves and final scores; None without such records."""
    entries = files.of_kind("end_to_end")
    if not entries:
        return None
    figures = []
    by_corpus = grouped(entries, lambda e: (corpus_and_peer(e.record["corpus"])[0], machine_name(e.machine)))
    for index, ((corpus, machine), runs) in enumerate(by_corpus.items()):
        curves, finals = {}, []
        for entry in runs:
            label = corpus_and_peer(entry.record["corpus"])[1] or OURS
            curve = entry.record["validation_curve"]
            points = [(v["seconds"] / 60, v["bleu"]) for v in curve if {"seconds", "bleu"} <= v.keys()]
            if points:
                curves[label] = points
            finals.append(f"{label} {entry.record['bleu']:.2f} ({entry.location})")
        if curves:
            note = f"{machine}; test {', '.join(finals)}"
            figures.append(Figure(f"bleu-{index}", draw(curves), f"{corpus}: BLEU against minutes", note))
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
        "From raw text to a scored translation with the commands that a user types. The curve is of the "
        "validation set.",
        *figures,
        Table(head, rows, names=4),
    ]
    return Section("From text to BLEU", blocks)
