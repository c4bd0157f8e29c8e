"""Pictures of README, the report and docs, drawn from the records by `python -m benchmarks report --readme`.

Each file has a digest of its numbers in its metadata, from which is_stale() sees changed records; pixels differ between
versions of Matplotlib. Each function returns the numbers and the figure.
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from PIL import Image

from benchmarks.measure.machine import ROOT, git, machine_name
from benchmarks.measure.records import Entry
from benchmarks.measure.text_table import short_dtype
from benchmarks.report.rows import TITLES, duels, mean, quiet, suite
from fasttfm.errors import UserError
from fasttfm.system.parsing import parse_json

matplotlib.use("Agg")
from matplotlib import pyplot as plt

OUT = ROOT / "docs" / "images"
FASTER, SLOWER, OTHER = "#2a6fbb", "#c0392b", "#8a8f98"
_FEWEST = 4


Drawn = tuple[Any, plt.Figure]
"""(numbers, figure)."""


def _bar(row: pd.Series) -> str:
    if row.group != "kernels":
        return f"{TITLES[row.group].lower()}: {row.case}, {short_dtype(row['dtype'])}"
    shape = row["shape"]
    if row.case == "attention" and "mask" in shape:
        kind = "dropout" if shape.get("dropout") else {"bool": "a mask", "additive": "a mask"}.get(shape["mask"])
        return f"attention, {kind or {'causal': 'long, causal', 'none': 'no mask'}.get(shape['mask'], 'padded')}"
    if row.case == "scored attention":
        return f"attention, {shape['form']}"
    return str(row.case)


def bars(entries: Sequence[Entry]) -> Drawn | None:
    """Bars of one machine, by kernel or group: the fastest other's time over ours, geometric mean and worst case.

    None if there are fewer than four cases.
    """
    both = quiet(suite(entries))
    if len(both) < _FEWEST:
        return None
    ratios = both.groupby([_bar(row) for _, row in both.iterrows()]).ratio
    table = ratios.agg(mean=mean, worst="min", cases="count").sort_values("mean")
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.21 * len(table)), layout="constrained")
    places = range(len(table))
    axes.barh(places, table["mean"] - 1, left=1, color=np.where(table["mean"] < 1, SLOWER, FASTER), height=0.7)
    axes.scatter(table.worst, places, color="black", marker="|", s=40, zorder=3, label="worst case")
    axes.axvline(1, color="black", linewidth=1)
    for place, ratio in zip(places, table["mean"]):
        axes.annotate(f"{ratio:.2f}x", (max(ratio, 1), place), (4, 0), textcoords="offset points", va="center", size=7)
    axes.set(xscale="log", xlim=(0.8 * min(0.5, table.worst.min()), 1.5 * max(1, table["mean"].max())))
    axes.set_yticks(places, [f"{name} ({count})" for name, count in table.cases.items()], fontsize=8)
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_title(
        f"{both.machine.iloc[0]}: slower than the fastest other in {(both.ratio < 1).sum()} of {len(both)}", fontsize=10
    )
    axes.set_xlabel("times as fast as the fastest other, mean of so many cases; red: slower", fontsize=8)
    axes.legend(loc="lower right", fontsize=8)
    return table.reset_index().round(4).values.tolist(), figure


def roofline(entries: Sequence[Entry]) -> Drawn:
    """Measured time over the device's minimum, ours and the fastest other, a dot per shape."""
    rows = suite(entries)
    rows = rows[rows.usable & ~rows.cpu & (rows.group == "kernels")].sort_values("time", kind="stable")
    both = duels(rows[rows.machine == rows.machine.iloc[-1]])
    both = both[~both.noisy & both.share.notna()]
    floor = both.share * both.p50
    figure, axes = plt.subplots(figsize=(9, 5.2), layout="constrained")
    ends = floor.min() / 1.5, both.p50_other.max() * 1.5
    axes.plot(ends, ends, color="black", linewidth=1, label="the device's limit")
    axes.scatter(floor, both.p50_other, s=22, facecolors="none", edgecolors=OTHER, label="the fastest other")
    for number, kernel in enumerate(dict.fromkeys(both.case)):
        some = both.case == kernel
        marker = "os"[number // 10 % 2]  # Matplotlib has ten colours
        axes.scatter(floor[some], both.p50[some], s=22, marker=marker, color=f"C{number % 10}", label=kernel)
    axes.set(xscale="log", yscale="log", xlim=(ends[0], floor.max() * 1.5), ylim=ends)
    axes.set(xlabel="least time that bandwidth and products allow, µs", ylabel="measured, µs")
    axes.set_title(f"Kernels beside the device's limit, {rows.machine.iloc[-1]}, bf16", fontsize=10)
    figure.legend(fontsize=8, loc="outside right center")
    axes.grid(alpha=0.25)
    return [floor.round(3).tolist(), both.p50.tolist(), both.p50_other.fillna(0).tolist()], figure


def training(entries: Sequence[Entry]) -> Drawn:
    """Training loss and validation BLEU of the newest Multi30k run."""
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


def host_time(entries: Sequence[Entry]) -> Drawn:
    """Host time of calls: in the first record, in the newest, and of the peer.

    The first record comes from git's history, because `python -m benchmarks host` replaces it in the file.
    """
    newest = [entry for entry in entries if entry.kind == "host"][-1]
    name = f"benchmarks/results/{newest.file}"
    versions = (git("log", "--reverse", "--format=%H", "--", name) or "").split()
    first = git("show", f"{versions[0]}:{name}") if versions else None
    if first is None:
        raise UserError("the picture of host time needs git's whole history: git fetch --unshallow")
    before = {row["what"]: row for row in parse_json(first.splitlines()[-1])["measured"]}
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


def pictures(entries: Sequence[Entry]) -> dict[Path, Drawn]:
    """Path -> picture in docs/images."""
    draw = {"roofline": roofline, "training": training, "host-time": host_time}
    return {OUT / f"{name}.png": function(entries) for name, function in draw.items()}


def save(path: Path, numbers: Any, figure: plt.Figure) -> None:
    figure.savefig(path, dpi=130, metadata={"Software": None, "Description": _digest(numbers)})
    plt.close(figure)


def is_stale(path: Path, numbers: Any, figure: plt.Figure) -> bool:
    """Return whether the file is missing or shows other numbers."""
    plt.close(figure)
    if not path.is_file():
        return True
    with Image.open(path) as picture:
        return picture.info.get("Description") != _digest(numbers)


def _digest(numbers: Any) -> str:
    return sha256(json.dumps(numbers, default=float).encode()).hexdigest()
