"""The mean of the last checkpoints' weights (Vaswani et al. 2017, section 6.1: the last 5; big model the last 20)."""

from pathlib import Path

import torch
from torch import Tensor

from fasttfm.errors import UserError
from fasttfm.store.checkpoint import read_weights, save_checkpoint
from fasttfm.store.steps import checkpoints_folder, consecutive_steps, saved_steps, step_folder
from fasttfm.store.vocabulary import checkpoint_vocabulary
from fasttfm.system.wording import counted


def average_weights(checkpoints: list[Path]) -> dict[str, Tensor]:
    """Mean of the weights of several checkpoints, summed in float64, in the first one's dtypes.

    Raises UserError when they are not all of one model.
    """
    if not checkpoints:
        raise ValueError("no checkpoints were given to average")
    sums: dict[str, Tensor] = {}
    kinds: dict[str, torch.dtype] = {}
    for path in checkpoints:
        weights = read_weights(path)
        if not sums:
            kinds = {name: tensor.dtype for name, tensor in weights.items()}
            sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in weights.items()}
        if {name: tensor.shape for name, tensor in weights.items()} != {
            name: tensor.shape for name, tensor in sums.items()
        }:
            raise UserError(f"{path}: is of another model than {checkpoints[0]}; average checkpoints of one run")
        for name, tensor in weights.items():
            sums[name] += tensor
    return {name: (total / len(checkpoints)).to(kinds[name]) for name, total in sums.items()}


def average_last(model_dir: str | Path, last: int | None) -> tuple[Path, list[int]]:
    """Average the `last` newest checkpoints of a model directory into its checkpoint `average`.

    None takes five, or all where there are fewer. Only checkpoints that were saved one after the other count: one that
    was kept for its score alone may be far older.
    Returns where it was written and the steps it is made of. Raises UserError when there are fewer.
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
    save_checkpoint(target, average_weights(folders), {"average_of": chosen, "vocabulary": _shared_vocabulary(folders)})
    return target, chosen


def _shared_vocabulary(checkpoints: list[Path]) -> str | None:
    """The digest of the vocabulary of all of the checkpoints that name one; UserError when these differ."""
    digests = {path: digest for path in checkpoints if (digest := checkpoint_vocabulary(path)) is not None}
    shared = next(iter(digests.values()), None)
    for path, digest in digests.items():
        if digest != shared:
            raise UserError(
                f"{path}: was trained with another vocabulary than {next(iter(digests))}; average checkpoints of one "
                "run (a smaller --last takes newer ones alone)"
            )
    return shared
