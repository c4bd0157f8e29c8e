"""From a model directory to a new one with a checkpoint in another form: parts made whole, or matrices in int8."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.checkpoints import quantized
from fasttfm.checkpoints.checkpoint import (
    META_FILE,
    MODEL_FILE,
    is_quantized,
    read_meta,
    read_state,
    read_weights,
    save_checkpoint,
    write_tensors,
)
from fasttfm.checkpoints.model_dir import CONFIG_FILE, DATA_FILE, read_config, read_kind
from fasttfm.checkpoints.ownership import describe
from fasttfm.checkpoints.shards import is_sharded
from fasttfm.checkpoints.steps import checkpoints_folder, resolve_checkpoint, step_folder
from fasttfm.checkpoints.vocabulary import check_vocabulary
from fasttfm.checkpoints.weights import refuse_others
from fasttfm.config import build
from fasttfm.errors import UserError
from fasttfm.files import entries, refuse_dangling_link, replace_file, unfinished, write_file
from fasttfm.folders import VOCABULARY_FILES, reading, replacing
from fasttfm.locks import LOCK_FILE, locked


def consolidate(model_dir: Path, which: str, out: Path) -> Path:
    """Write the checkpoint `which` of `model_dir` in one piece, with its training state, into the new directory `out`.

    A kill or a full disk leaves a directory without a checkpoint, with which the same command goes on. Returns where
    the checkpoint lies. Raises UserError for a checkpoint that is not in parts, and for an `out` that holds more.
    """
    read_config(model_dir, read_kind(model_dir))
    checkpoint = resolve_checkpoint(model_dir, which)
    if not is_sharded(checkpoint):
        raise UserError(f"{checkpoint}: is in one piece already")
    weights, meta, state = read_weights(checkpoint), read_meta(checkpoint), read_state(checkpoint)
    description, target = _description(model_dir), step_folder(out, meta["step"])
    _refuse_others(out, description, target)
    with locked(out, "writing a model into it"):
        if target.is_dir():
            _refuse_other_weights(target, weights)
        for name, content in description.items():  # config.yaml first, which tells that it is a model directory
            replace_file(out / name, content)
        save_checkpoint(target, weights, {**meta, "previous_step": None}, state)
    return target


def quantize_model(
    model_dir: Path, checkpoint: str, out: Path, make: Callable[[Any], torch.nn.Module]
) -> tuple[int, int]:
    """Write the model directory `out` with one checkpoint of model_dir in int8; bytes of its weights before and after.

    make: the model of a configuration, which the weights must fit.
    All of it is written or nothing. Raises UserError for what cannot be read, is of another model or in int8 already,
    and for an `out` that holds other files.
    """
    with reading(model_dir):
        shape = build(read_config(model_dir)).model
        saved = resolve_checkpoint(model_dir, checkpoint)
        check_vocabulary(saved, model_dir)
        weights = read_weights(saved)
        if is_quantized(saved):
            raise UserError(f"{saved}: is in int8 already")
        refuse_others(lambda: make(shape), weights, saved)
        meta = read_meta(saved) if (saved / META_FILE).is_file() else {}
        description = _description(model_dir)
    step = meta.get("step") or max(meta.get("average_of") or [0])
    meta = {"step": step, "best_step": step, "vocabulary": meta.get("vocabulary"), "precision": "int8"}
    with replacing(out, "writing a model into it", "8-bit model") as fresh:
        for name, content in description.items():
            write_file(fresh.path / name, content)
        target = step_folder(fresh.path, step)
        target.mkdir(parents=True)
        describe(target, {MODEL_FILE: write_tensors(target / MODEL_FILE, quantized.stored(weights))}, meta)
    before = sum(each.numel() * each.element_size() for each in weights.values())
    return before, (step_folder(out, step) / MODEL_FILE).stat().st_size


def _description(model_dir: Path) -> dict[str, bytes]:
    """Name -> content of the configuration, of what the data were, and of the vocabulary."""
    names = [name for name in (CONFIG_FILE, DATA_FILE, *VOCABULARY_FILES) if (model_dir / name).is_file()]
    return {name: (model_dir / name).read_bytes() for name in names}


def _refuse_others(out: Path, description: Mapping[str, bytes], target: Path) -> None:
    """Raise UserError for a directory that holds anything but what a consolidation that was stopped has left."""
    refuse_dangling_link(out)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; give --out the name of a directory")
    helpers = {LOCK_FILE, *(unfinished(Path(name)).name for name in description)}
    for name in sorted(set(entries(out)) - helpers):
        if name == checkpoints_folder(out).name:
            theirs = [each for each in entries(out / name) if not each.startswith(".") and each != target.name]
            if not theirs:
                continue
        elif (out / name).is_file() and description.get(name) == (out / name).read_bytes():
            continue
        raise UserError(f"{out}: is not empty ({name}); give --out a new or empty directory")


def _refuse_other_weights(target: Path, weights: Mapping[str, Tensor]) -> None:
    theirs = read_weights(target)
    if theirs.keys() != weights.keys() or not all(torch.equal(each, weights[name]) for name, each in theirs.items()):
        raise UserError(f"{target}: holds other weights; give --out a new or empty directory")
