"""A checkpoint in parts as a model directory with a whole one."""

from __future__ import annotations

from pathlib import Path

from fasttfm.checkpoints.checkpoint import TrainingState, read_meta, read_state, read_weights, save_checkpoint
from fasttfm.checkpoints.model_dir import CONFIG_FILE, DATA_FILE, read_config, read_kind, refuse_strangers
from fasttfm.checkpoints.shards import is_sharded
from fasttfm.checkpoints.steps import resolve_checkpoint, step_folder
from fasttfm.checkpoints.vocabulary import VOCABULARY_FILES
from fasttfm.errors import UserError
from fasttfm.files import replace_file


def consolidate(model_dir: Path, which: str, out: Path) -> Path:
    """Write the checkpoint `which` of `model_dir` in one piece, with its training state, into the new directory `out`.

    Returns where it lies. Raises UserError for a checkpoint that is not in parts, and for an `out` that is not empty.
    """
    read_config(model_dir, read_kind(model_dir))
    checkpoint = resolve_checkpoint(model_dir, which)
    if not is_sharded(checkpoint):
        raise UserError(f"{checkpoint}: is in one piece already")
    refuse_strangers(out)
    if (out / CONFIG_FILE).exists():
        raise UserError(f"{out}: is not empty; give --out a new or empty directory")
    weights, meta = read_weights(checkpoint), read_meta(checkpoint)
    state: TrainingState = read_state(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    for file in [model_dir / CONFIG_FILE, model_dir / DATA_FILE, *(model_dir / name for name in VOCABULARY_FILES)]:
        if file.exists():
            replace_file(out / file.name, file.read_bytes())
    target = step_folder(out, meta["step"])
    save_checkpoint(target, weights, {**meta, "previous_step": None}, state)
    return target
