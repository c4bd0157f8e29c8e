"""A small model for every exporter, and the command line that exports it."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_dirs import TEXT, write_model_dir

from fasttfm.config import RunConfig, sections_of
from fasttfm.config.training import TrainingConfig
from fasttfm.store.weights import model_weights
from fasttfm_pretraining.data.text_tokenizer import train_text_tokenizer
from fasttfm_pretraining.models.kinds import CLASSES
from fasttfm_pretraining.models.saved import write_run
from fasttfm_pretraining.training.finetuning import task_model

FORMATS = {"ctranslate2": ("ctranslate2",), "marian-hf": (), "onnx": ("onnx", "onnxscript"), "pretrained": ()}
"""--format of fasttfm export -> required packages."""
COMMANDS = {
    **dict.fromkeys(("gpt", "llama"), "lm"),
    **dict.fromkeys(("bert", "albert", "electra"), "mlm"),
    **dict.fromkeys(("squad", "choices", "classify"), "finetune"),
}
"""Kind of model -> command that exports it."""
SIZE = {"d_model": 16, "heads": 2, "d_ff": 24, "layers": 2, "max_length": 24}
LABELS = {"squad": [], "choices": ["0", "1", "2", "3"], "classify": ["no", "yes"]}


def exported_once(export: Callable[..., Any]) -> Callable[..., None]:
    """Wrap torch.onnx.export, which takes seconds: a graph that was written before is copied from memory."""
    cache: dict[str, bytes] = {}

    def call(module: torch.nn.Module, given: tuple, path: Path, **options: Any) -> None:
        buffers = [(name, each.numpy().tobytes()) for name, each in sorted(module.state_dict().items())]
        key = hashlib.sha256(repr((type(module), module.config, buffers)).encode()).hexdigest()
        if key not in cache:
            export(module, given, path, **options)
            cache[key] = path.read_bytes()
        path.write_bytes(cache[key])

    return call


def write_model(kind: str, folder: Path, seed: int = 1) -> None:
    """Write a valid model directory."""
    if kind in FORMATS:
        for name in FORMATS[kind]:
            pytest.importorskip(name)
        fields = {"norm_first": False, "final_norm": False, "encoder_layers": 1, "decoder_layers": 1}
        write_model_dir(folder, trained=False, **fields)
        return
    tokenizer = train_text_tokenizer(TEXT, 340)
    more: dict[str, Any] = {"embedding_size": 8} if kind in ("albert", "electra") else {}
    if kind in LABELS:
        more |= {"pooler": kind != "squad", "sentence_head": False}
        more |= {"labels": 1 if kind == "choices" else 2} if kind != "squad" else {}
    config = sections_of(kind)["model"](vocab_size=len(tokenizer), **SIZE, **more)
    torch.manual_seed(seed)
    model = task_model(kind, config) if kind in LABELS else CLASSES[kind](config)
    run = RunConfig(kind=kind, model=config, data=sections_of(kind)["data"](), training=TrainingConfig())
    description = {"labels": LABELS[kind], "columns": [], "abstains": False} if kind in LABELS else None
    write_run(folder, run, model_weights(model), tokenizer, description)


def export_words(kind: str, model: Path, out: Path) -> list[str]:
    """Return the command line that exports the model."""
    if kind in FORMATS:
        return ["export", str(model), "--format", kind, "--no-check", "--out", str(out)]
    return [COMMANDS[kind], "export", str(model), "--no-check", "--out", str(out)]
