"""Checkpoint averaging (Vaswani et al. 2017, section 6.1: the last 5, or 20 for the big model)."""

from pathlib import Path

from torch import Tensor

from fasttfm.errors import UserError
from fasttfm.store.checkpoint import read_weights, save_checkpoint
from fasttfm.store.steps import checkpoints_folder, consecutive_steps, saved_steps, step_folder
from fasttfm.store.vocabulary import check_vocabulary, vocabulary_digest
from fasttfm.system.wording import counted


def average_weights(checkpoints: list[Path]) -> dict[str, Tensor]:
    """Mean weights of checkpoints, summed in float64, in the first one's dtypes. Raises UserError for other shapes."""
    first = read_weights(checkpoints[0])
    sums = {name: tensor.double() for name, tensor in first.items()}
    for path in checkpoints[1:]:
        weights = read_weights(path)
        if {name: tensor.shape for name, tensor in weights.items()} != {name: sums[name].shape for name in sums}:
            raise UserError(f"{path}: is of another model than {checkpoints[0]}; average checkpoints of one run")
        for name, tensor in weights.items():
            sums[name] += tensor
    return {name: (total / len(checkpoints)).to(first[name].dtype) for name, total in sums.items()}


def average_last(model_dir: str | Path, last: int | None) -> tuple[Path, list[int]]:
    """Average the `last` newest checkpoints of a model directory into its checkpoint `average`.

    last: None: five, or all if fewer. Only consecutive checkpoints count: one kept for its score may be much older.
    Returns the path and the steps averaged. Raises UserError if there are too few.
    """
    model_dir = Path(model_dir)
    steps = consecutive_steps(model_dir)
    if last is None:
        last = min(5, max(len(steps), 1))
    if last < 1:
        raise UserError(f"--last {last}: give how many checkpoints to average, at least 1")
    if not model_dir.exists():
        raise UserError(f"{model_dir}: does not exist: give the model directory that fasttfm train --out made")
    if not steps:
        raise UserError(f"{model_dir}: has no checkpoints; give a model directory that fasttfm train --out made")
    if len(steps) < last:
        older = [step for step in saved_steps(model_dir) if step not in steps]
        kept = f" in a row (that of update {older[-1]:,} is older and was kept for its score)" if older else ""
        raise UserError(
            f"{model_dir}: has {counted(len(steps), 'checkpoint')}{kept}, fewer than --last {last}: "
            f"give --last {len(steps)}, or run fasttfm train with a smaller "
            "--save-interval-updates or a larger --keep-interval-updates"
        )
    chosen = steps[-last:]
    folders = [step_folder(model_dir, step) for step in chosen]
    target = checkpoints_folder(model_dir) / "average"
    for folder in folders:
        check_vocabulary(folder, model_dir)
    vocabulary = vocabulary_digest(model_dir)
    save_checkpoint(target, average_weights(folders), {"average_of": chosen, "vocabulary": vocabulary})
    return target, chosen
