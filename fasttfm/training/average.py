"""The mean of the last checkpoints' weights (Vaswani et al. 2017, section 6.1: the last 5; big model the last 20)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fasttfm.errors import UserError
from fasttfm.training.checkpoint import (
    checkpoints_folder,
    read_meta,
    read_weights,
    save_checkpoint,
    saved_steps,
    step_folder,
)


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


def average_last(model_dir: str | Path, last: int) -> tuple[Path, list[int]]:
    """Average the `last` newest checkpoints of a model directory into its checkpoint `average`.

    Returns where it was written and the steps it is made of. Raises UserError when there are fewer.
    """
    steps = saved_steps(model_dir)
    if last < 1:
        raise UserError(f"--last {last}: give how many checkpoints to average, at least 1")
    if not steps:
        raise UserError(f"{model_dir}: has no checkpoints; give a model directory that fasttfm train --out made")
    if len(steps) < last:
        raise UserError(
            f"{model_dir}: has {len(steps)} checkpoints, {last} were to be averaged: give --last {len(steps)}, "
            "or train with a smaller --save-interval-updates or a larger --keep-interval-updates"
        )
    chosen = steps[-last:]
    target = checkpoints_folder(model_dir) / "average"
    meta = {"average_of": chosen, "vocabulary": read_meta(step_folder(model_dir, chosen[-1])).get("vocabulary")}
    save_checkpoint(target, average_weights([step_folder(model_dir, step) for step in chosen]), meta)
    return target, chosen
