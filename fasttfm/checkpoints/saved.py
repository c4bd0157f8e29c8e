"""A model directory of any kind, read: its configuration and the weights of one of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from fasttfm.checkpoints.checkpoint import read_weights
from fasttfm.checkpoints.model_dir import read_config
from fasttfm.checkpoints.steps import resolve_checkpoint
from fasttfm.checkpoints.vocabulary import check_vocabulary
from fasttfm.config import RunConfig, build_run


def read_run(folder: Path, kind: str, checkpoint: str = "best") -> tuple[RunConfig, dict[str, Tensor], Path]:
    """Configuration, weights, and the checkpoint that these are of: best, last, average, an update's number, or a path.

    Raises UserError naming what is missing, damaged, or of another kind of model.
    """
    config = build_run(read_config(folder, kind))
    saved = resolve_checkpoint(folder, checkpoint)
    check_vocabulary(saved, folder)
    return config, read_weights(saved), saved
