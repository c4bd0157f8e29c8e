"""The loss curve of a run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttfm.drawing import drawing, plain_text
from fasttfm.errors import UserError
from fasttfm.training.log import LOG_FILE, read_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = "curve.png"


def plot_curve(model_dir: str | Path, target: str | Path | None = None) -> Path:
    """Draw training and validation loss, and BLEU, over the updates of a model directory.

    Writes PNG to target (MODEL/curve.png when None) and returns where. Raises UserError when nothing was logged yet.
    """
    model_dir = Path(model_dir)
    target = Path(target) if target else model_dir / PICTURE
    records = read_log(model_dir)
    training = [record for record in records if record["kind"] == "train"]
    validation = [record for record in records if record["kind"] == "valid"]
    if not training and not validation:
        raise UserError(f"{model_dir / LOG_FILE}: holds no record of training yet, so there is no curve to draw")
    with drawing(figsize=(7, 4.2), dpi=150, layout="constrained") as figure:
        _draw(figure, training, validation, plain_text(Path(model_dir.resolve().name)))
        try:
            with target.open("wb") as file:
                figure.savefig(file, format="png")
        except OSError as error:
            raise UserError(
                f"{target}: cannot be written: {error.strerror}; make room, the model itself is saved"
            ) from error
    return target


def _draw(figure: Figure, training: list[dict[str, Any]], validation: list[dict[str, Any]], title: str) -> None:
    losses = figure.subplots()
    losses.plot([r["step"] for r in training], [r["nll"] for r in training], color="0.6", label="training")
    losses.plot(
        [r["step"] for r in validation], [r["nll"] for r in validation], "o-", color="C0", ms=3, label="validation"
    )
    losses.set(xlabel="updates", ylabel="cross entropy per target token (nats)")
    losses.set_title(title, parse_math=False)
    losses.set_ylim(bottom=0)
    losses.grid(alpha=0.3)
    scored = [record for record in validation if record.get("bleu") is not None]
    if scored:
        bleu = losses.twinx()
        bleu.plot([r["step"] for r in scored], [r["bleu"] for r in scored], "s--", color="C1", ms=3, label="BLEU")
        bleu.set_ylabel("validation BLEU")
        bleu.set_ylim(0, 100 if max(r["bleu"] for r in scored) > 60 else 60)
        best = max(scored, key=lambda record: record["bleu"])
        bleu.annotate(
            f"{best['bleu']:.1f}", (best["step"], best["bleu"]), xytext=(0, 5), textcoords="offset points", ha="center"
        )
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
