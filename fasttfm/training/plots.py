"""Plots of training logs: the curves of one run, or of several over updates or minutes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fasttfm.errors import UserError
from fasttfm.store.run_log import LOG_FILE, read_log
from fasttfm.system.drawing import drawing, save
from fasttfm.system.wording import plain_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = "curve.png"
Axis = Literal["updates", "minutes"]
Records = list[dict[str, Any]]
_MOST_RUNS = 10
"""Number of distinguishable colors."""


def plot_curve(model_dir: str | Path) -> Path:
    """Plot a run into MODEL/curve.png, as plot_runs() does, and return the path."""
    target = Path(model_dir) / PICTURE
    plot_runs([model_dir], target)
    return target


def plot_runs(runs: Sequence[str | Path], target: str | Path, over: Axis = "updates") -> None:
    """Plot training loss, validation loss and BLEU of several runs, one color each.

    target: .png or .svg. over: updates, or minutes since the run began, including validation and earlier sessions.
    Raises UserError for another suffix, a run without records or more than 10 runs.
    """
    target = Path(target)
    kind = target.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise UserError(f"--out {target}: give a name that ends in .png or .svg")
    if len(runs) > _MOST_RUNS:
        raise UserError(f"{len(runs)} runs are too many for one plot: give at most {_MOST_RUNS}")
    logs = [(plain_text(os.path.basename(os.path.realpath(run))), _timed_records(Path(run))) for run in runs]
    with drawing(dpi=150, layout="constrained") as figure:
        _draw_runs(figure, logs, over)
        save(figure, target, kind)


def _draw_runs(figure: Figure, logs: list[tuple[str, Records]], over: Axis) -> None:
    has_bleu = any(_with(records, "bleu") for _, records in logs)
    figure.set_size_inches(8, 6.4 if has_bleu else 4.2)
    panels = figure.subplots(2 if has_bleu else 1, 1, sharex=True, squeeze=False)[:, 0]
    lines = []
    for number, (_, records) in enumerate(logs):
        color = f"C{number}"
        scored = _with(records, "nll")
        training, validation = ([each for each in scored if each["kind"] == kind] for kind in ("train", "valid"))
        panels[0].plot(*_points(training, "nll", over), color=color, alpha=0.35, lw=1)
        lines += panels[0].plot(*_points(validation, "nll", over), "o-", color=color, ms=3)
        if has_bleu:
            panels[1].plot(*_points(_with(validation, "bleu"), "bleu", over), "o-", color=color, ms=3)
    panels[0].set(ylabel="cross entropy per target token (nats)\npale: training, dots: validation")
    if has_bleu:
        panels[1].set(ylabel="validation BLEU")
    panels[-1].set(xlabel=over)
    for panel in panels:
        panel.grid(alpha=0.3)
    legend = figure.legend(lines, [name for name, _ in logs], loc="outside lower center", ncols=3, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _timed_records(model_dir: Path) -> Records:
    records = [record for record in _with(read_log(model_dir), "seconds") if record["kind"] in ("train", "valid")]
    if not records:
        raise UserError(f"{model_dir / LOG_FILE}: has no record of training: give directories that training made")
    return records


def _with(records: Records, key: str) -> Records:
    """Records with a number under key."""
    return [record for record in records if isinstance(record.get(key), int | float)]


def _points(records: Records, key: str, over: Axis) -> tuple[list[float], list[float]]:
    positions = [record["step"] if over == "updates" else record["seconds"] / 60 for record in records]
    return positions, [record[key] for record in records]
