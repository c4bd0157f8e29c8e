"""Quantization of a model directory to int8."""

from pathlib import Path

from fasttfm.errors import UserError
from fasttfm.models.pretrained import PRETRAINED_FILE, read_pretrained
from fasttfm.models.transformer import Transformer
from fasttfm.store import quantized
from fasttfm.store.checkpoint import META_FILE, MODEL_FILE, is_quantized, read_meta, write_tensors
from fasttfm.store.model_dir import CONFIG_FILE, DATA_FILE
from fasttfm.store.ownership import describe
from fasttfm.store.steps import step_folder
from fasttfm.store.weights import refuse_others
from fasttfm.system.files import write_file
from fasttfm.system.folders import VOCABULARY_FILES, reading, replacing


def quantize_model(model_dir: Path, checkpoint: str, out: Path) -> tuple[int, int]:
    """Write a checkpoint of model_dir in int8 to the model directory `out`, atomically; returns bytes before and after.

    Raises UserError for unreadable files, weights of another model or already in int8, and an `out` with other files.
    """
    with reading(model_dir):
        shape, weights, saved = read_pretrained(model_dir, checkpoint)
        if is_quantized(saved):
            raise UserError(f"{saved}: is already int8")
        refuse_others(lambda: Transformer(shape), weights, saved)
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
    """Name -> content of the configuration, the data description and the vocabulary."""
    names = (CONFIG_FILE, PRETRAINED_FILE, DATA_FILE, *VOCABULARY_FILES)
    return {name: (model_dir / name).read_bytes() for name in names if (model_dir / name).is_file()}
