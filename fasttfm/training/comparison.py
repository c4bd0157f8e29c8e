"""Several runs in one picture, from their logs: losses and BLEU over updates, minutes or target tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fasttfm.drawing import drawing, plain_text
from fasttfm.errors import UserError
from fasttfm.training.log import LOG_FILE, read_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Axis = Literal["updates", "minutes"]
_MOST_RUNS = 10
"""Colours that can be told apart."""


def plot_runs(runs: Sequence[str | Path], target: str | Path, over: Axis = "updates") -> None:
    """Draw training loss, validation loss and BLEU of the logs of several model directories, a colour each.

    target: .png or .svg. over: the number of the update, or the minutes since the run began, validation and earlier
    sessions included. Raises UserError for another ending, for a run without records and for more than 10 runs.
    """
    target = Path(target)
    kind = target.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise UserError(f"--out {target}: give a name that ends in .png or .svg")
    if len(runs) > _MOST_RUNS:
        raise UserError(f"{len(runs)} runs were given: at most {_MOST_RUNS} can be told apart in one picture")
    logs = [(_name(Path(run)), _records(Path(run))) for run in runs]
    with drawing(figsize=(8, 6.4), dpi=150, layout="constrained") as figure:
        _draw(figure, logs, over)
        try:
            figure.savefig(target, format=kind)
        except OSError as error:
            raise UserError(f"{target}: cannot be written: {error.strerror}") from error


def _records(model_dir: Path) -> list[dict[str, Any]]:
    records = [record for record in read_log(model_dir) if record["kind"] in ("train", "valid") and "seconds" in record]
    if not records:
        raise UserError(f"{model_dir / LOG_FILE}: holds no record of training: give directories of fasttfm train --out")
    return records


def _name(model_dir: Path) -> str:
    return plain_text(Path(model_dir.resolve().name))


def _draw(figure: Figure, logs: list[tuple[str, list[dict[str, Any]]]], over: Axis) -> None:
    has_bleu = any(record.get("bleu") is not None for _, records in logs for record in records)
    panels = figure.subplots(2 if has_bleu else 1, 1, sharex=True, squeeze=False)[:, 0]
    lines = []
    for number, (_, records) in enumerate(logs):
        color = f"C{number}"
        training = [record for record in records if record["kind"] == "train" and record["nll"] is not None]
        validation = [record for record in records if record["kind"] == "valid" and record["nll"] is not None]
        panels[0].plot(*_points(training, "nll", over), color=color, alpha=0.35, lw=1)
        lines += panels[0].plot(*_points(validation, "nll", over), "o-", color=color, ms=3)
        if has_bleu:
            scored = [record for record in validation if record.get("bleu") is not None]
            panels[1].plot(*_points(scored, "bleu", over), "o-", color=color, ms=3)
    panels[0].set(ylabel="cross entropy per target token (nats)\npale: training, dots: validation")
    if has_bleu:
        panels[1].set(ylabel="validation BLEU")
    panels[-1].set(xlabel=over)
    for panel in panels:
        panel.grid(alpha=0.3)
    legend = figure.legend(lines, [name for name, _ in logs], loc="outside lower center", ncols=3, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _points(records: list[dict[str, Any]], key: str, over: Axis) -> tuple[list[float], list[float]]:
    positions = [record["step"] if over == "updates" else record["seconds"] / 60 for record in records]
    return positions, [record[key] for record in records]
