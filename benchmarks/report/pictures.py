"""The pictures of README and docs, drawn from the records by `python -m benchmarks report --readme`.

Each holds the numbers that it was drawn from as text in the file, so that `stale()` can tell when a record has changed
without comparing pixels, which differ between versions of Matplotlib.
"""

import json
import subprocess
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from PIL import Image

from benchmarks.measure.machine import ROOT, machine_name
from benchmarks.measure.records import Entry
from benchmarks.report.rows import duels, suite
from fasttfm.parsing import parse_json

matplotlib.use("Agg")
from matplotlib import pyplot as plt

OUT = ROOT / "docs" / "images"
FASTER, SLOWER, OTHER = "#2a6fbb", "#c0392b", "#8a8f98"
_TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32)


def _kernel(row: pd.Series) -> str:
    """The bar that a shape of a kernel belongs to."""
    shape = row["shape"]
    if row.case == "attention":
        kind = "dropout" if shape.get("dropout") else {"bool": "a mask", "additive": "a mask"}.get(shape["mask"])
        return f"attention, {kind or {'causal': 'long, causal', 'none': 'no mask'}.get(shape['mask'], 'padded')}"
    if row.case == "scored attention":
        return f"attention, {shape['form']}"
    return str(row.case)


def kernel_bars(entries: Sequence[Entry]) -> tuple[Any, plt.Figure]:
    """A bar a kernel on the newest GPU: the fastest other's time over ours, geometric mean, worst shape."""
    rows = suite(entries)
    rows = rows[rows.usable & ~rows.cpu & (rows.group == "kernels")].sort_values("time", kind="stable")
    machine = rows.machine.iloc[-1]
    both = duels(rows[rows.machine == machine]).dropna(subset="ratio")
    both = both[~both.noisy]
    bars = both.groupby([_kernel(row) for _, row in both.iterrows()]).ratio.agg(
        mean=lambda ratio: np.exp(np.log(ratio).mean()), worst="min", shapes="count"
    )
    bars = bars.sort_values("mean")
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.21 * len(bars)), layout="constrained")
    places = range(len(bars))
    axes.barh(places, bars["mean"] - 1, left=1, color=np.where(bars["mean"] < 1, SLOWER, FASTER), height=0.7)
    axes.scatter(bars.worst, places, color="black", marker="|", s=40, zorder=3, label="worst shape")
    axes.axvline(1, color="black", linewidth=1)
    for place, mean in zip(places, bars["mean"]):
        axes.annotate(f"{mean:.2f}x", (max(mean, 1), place), (4, 0), textcoords="offset points", va="center", size=7)
    axes.set(xscale="log", xlim=(0.8 * min(0.5, bars.worst.min()), 1.5 * bars["mean"].max()), ylim=(-0.7, len(bars)))
    axes.set_yticks(places, [f"{name} ({count})" for name, count in bars.shapes.items()], fontsize=8)
    ticks = [tick for tick in _TICKS if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_xticks([], minor=True)
    slower, shapes = (both.ratio < 1).sum(), len(both)
    axes.set_title(f"Kernels beside the fastest other, {machine}, bf16: slower in {slower} of {shapes}", fontsize=10)
    axes.set_xlabel("times as fast, mean of both passes of so many shapes; red: slower", fontsize=8)
    axes.legend(loc="lower right", fontsize=8)
    return bars.reset_index().round(4).values.tolist(), figure


def roofline(entries: Sequence[Entry]) -> tuple[Any, plt.Figure]:
    """Measured time beside the least that the device allows, ours and the fastest other, a dot a shape."""
    rows = suite(entries)
    rows = rows[rows.usable & ~rows.cpu & (rows.group == "kernels")].sort_values("time", kind="stable")
    both = duels(rows[rows.machine == rows.machine.iloc[-1]])
    both = both[~both.noisy & both.share.notna()]
    floor = both.share * both.p50
    figure, axes = plt.subplots(figsize=(9, 5.2), layout="constrained")
    ends = floor.min() / 1.5, both.p50_other.max() * 1.5
    axes.plot(ends, ends, color="black", linewidth=1, label="the device's limit")
    axes.scatter(floor, both.p50_other, s=22, facecolors="none", edgecolors=OTHER, label="the fastest other")
    for kernel, color in zip(dict.fromkeys(both.case), plt.get_cmap("tab10").colors):
        some = both.case == kernel
        axes.scatter(floor[some], both.p50[some], s=22, color=color, label=kernel)
    axes.set(xscale="log", yscale="log", xlim=(ends[0], floor.max() * 1.5), ylim=ends)
    axes.set(xlabel="least time that bandwidth and products allow, µs", ylabel="measured, µs")
    axes.set_title(f"Kernels beside the device's limit, {rows.machine.iloc[-1]}, bf16", fontsize=10)
    figure.legend(fontsize=8, loc="outside right center")
    axes.grid(alpha=0.25)
    return [floor.round(3).tolist(), both.p50.tolist(), both.p50_other.fillna(0).tolist()], figure


def training(entries: Sequence[Entry]) -> tuple[Any, plt.Figure]:
    """Loss and validation BLEU of the newest run of Multi30k."""
    run = [entry for entry in entries if entry.kind == "end_to_end" and entry.record["corpus"] == "multi30k"][-1]
    valid = run.record["validation_curve"]
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.plot(*zip(*run.record["training_curve"]), color=FASTER, label="training loss")
    axes.set(xlabel="updates", ylabel="loss", ylim=(0, None))
    beside = axes.twinx()
    beside.plot([v["step"] for v in valid], [v["bleu"] for v in valid], color=SLOWER, marker="o", ms=3, label="BLEU")
    beside.set(ylabel="validation BLEU", ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    minutes = run.record["training_minutes"]
    axes.set_title(f"Multi30k English-German, {minutes:.0f} minutes on {machine_name(run.machine)}", fontsize=10)
    return [run.record["training_curve"], valid], figure


def host_time(entries: Sequence[Entry]) -> tuple[Any, plt.Figure]:
    """Host time of a call before and after operators were planned, and the peer's: the first record and the newest.

    The first record stands in git's history: a run of `python -m benchmarks host` replaces the file.
    """
    newest = [entry for entry in entries if entry.kind == "host"][-1]
    name = f"benchmarks/results/{newest.file}"
    log = ["git", "log", "--reverse", "--format=%H", "--", name]
    first = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()[0]
    shown = subprocess.run(["git", "show", f"{first}:{name}"], cwd=ROOT, capture_output=True, text=True, check=True)
    before = {row["what"]: row for row in parse_json(shown.stdout.splitlines()[-1])["measured"]}
    rows = [
        (row["what"].removesuffix(", forward + backward"), before[row["what"]]["us"], row["us"], row["peer_us"])
        for row in newest.record["measured"]
        if "peer_us" in row and "us" in before.get(row["what"], {}) and row["peer"] != "Triton"
    ]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.42 * len(rows)), layout="constrained")
    for place, (label, color) in enumerate((("before (first record)", OTHER), ("after", FASTER), ("PyTorch", SLOWER))):
        heights = np.arange(len(rows))[::-1] + 0.26 * (1 - place)
        axes.barh(heights, [row[1 + place] for row in rows], height=0.26, color=color, label=label)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows][::-1], fontsize=8)
    axes.set(xscale="log", xlabel="µs on the host, no kernel started (a CPU stands in; not run on a GPU)")
    axes.set_title(f"Host time of a call, {machine_name(newest.machine)}", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.25, axis="x")
    return rows, figure


PICTURES = {
    "kernels.png": kernel_bars,
    "roofline.png": roofline,
    "training.png": training,
    "host-time.png": host_time,
}


def _digest(numbers: Any) -> str:
    return sha256(json.dumps(numbers, default=float).encode()).hexdigest()


def draw(entries: Sequence[Entry], out: Path = OUT) -> None:
    """Draws every picture."""
    for name, drawn in PICTURES.items():
        numbers, figure = drawn(entries)
        figure.savefig(out / name, dpi=130, metadata={"Software": None, "Description": _digest(numbers)})
        plt.close(figure)


def stale(entries: Sequence[Entry], out: Path = OUT) -> list[str]:
    """The pictures that were drawn from other numbers than the records have."""
    found = []
    for name, drawn in PICTURES.items():
        numbers, figure = drawn(entries)
        plt.close(figure)
        with Image.open(out / name) as picture:
            if picture.info.get("Description") != _digest(numbers):
                found.append(name)
    return found
