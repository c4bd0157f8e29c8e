"""From a model directory to a new one with a checkpoint in another form: parts made whole, or matrices in int8."""

from __future__ import annotations

from pathlib import Path

from fasttfm.checkpoints import quantized
from fasttfm.checkpoints.checkpoint import META_FILE, MODEL_FILE, read_meta, read_state, read_weights, save_checkpoint
from fasttfm.checkpoints.model_dir import CONFIG_FILE, DATA_FILE, read_config, read_kind, refuse_strangers
from fasttfm.checkpoints.shards import is_sharded
from fasttfm.checkpoints.steps import resolve_checkpoint, step_folder
from fasttfm.checkpoints.vocabulary import VOCABULARY_FILES, check_vocabulary
from fasttfm.errors import UserError
from fasttfm.files import entries, replace_file


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
    weights, meta, state = read_weights(checkpoint), read_meta(checkpoint), read_state(checkpoint)
    _copy_description(model_dir, out)
    target = step_folder(out, meta["step"])
    save_checkpoint(target, weights, {**meta, "previous_step": None}, state)
    return target


def quantize_model(model_dir: Path, checkpoint: str, out: Path) -> tuple[int, int]:
    """Write the model directory `out` with one checkpoint of model_dir in int8; bytes of its weights before and after.

    Raises UserError for what cannot be read, and for an `out` that holds anything.
    """
    read_config(model_dir)
    if (out.exists() and not out.is_dir()) or entries(out):
        raise UserError(f"{out}: is there already: give --out a new or empty directory")
    saved = resolve_checkpoint(model_dir, checkpoint)
    check_vocabulary(saved, model_dir)
    weights = read_weights(saved)
    meta = read_meta(saved) if (saved / META_FILE).is_file() else {}
    step = meta.get("step") or max(meta.get("average_of") or [0])
    _copy_description(model_dir, out)
    target = step_folder(out, step)
    meta = {"step": step, "best_step": step, "vocabulary": meta.get("vocabulary"), "precision": "int8"}
    save_checkpoint(target, quantized.stored(weights), meta)
    before = sum(each.numel() * each.element_size() for each in weights.values())
    return before, (target / MODEL_FILE).stat().st_size


def _copy_description(model_dir: Path, out: Path) -> None:
    """Copy the configuration, what the data were, and the vocabulary."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG_FILE, DATA_FILE, *VOCABULARY_FILES):
        if (model_dir / name).is_file():
            replace_file(out / name, (model_dir / name).read_bytes())
