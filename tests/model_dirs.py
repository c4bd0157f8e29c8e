"""Small model directories with random weights, made in a second, whose outputs differ from line to line."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from fasttfm.checkpoints.checkpoint import save_checkpoint
from fasttfm.checkpoints.steps import step_folder
from fasttfm.checkpoints.weights import model_weights
from fasttfm.config import resolve
from fasttfm.data.tokenizer import EOS, Tokenizer, train_tokenizer
from fasttfm.models import Transformer

TEXT = [
    "a dog runs over the green grass",
    "two men sit in a small boat",
    "ein Hund läuft über die grüne Wiese",
    "zwei Männer sitzen in einem kleinen Boot",
]
LINES = ["a dog", "two men sit in a boat", "the green grass", "small", "eine grüne Wiese — über!", "a boat runs"]
SIZE = {"d_model": 32, "heads": 2, "d_ff": 64, "encoder_layers": 2, "decoder_layers": 2, "max_length": 128}
DECODING = {"beam": 4, "max_len_a": 0.0, "max_len_b": 12, "length_penalty": "power", "alpha": 0.0, "min_len": 1}


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXT, vocab_size=340)


def write_model_dir(path: Path, **fields: Any) -> Path:
    """A model directory as `fasttfm train` leaves it; fields of its configuration that are to differ."""
    path.mkdir(parents=True)
    tokenizer().save(path / "spm.model")
    config = resolve(overrides={**SIZE, **DECODING, **fields}, from_data={"vocab_size": len(tokenizer())})
    (path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    torch.manual_seed(1)
    model = Transformer(config.model)
    sharpen(model)
    save_checkpoint(step_folder(path, 1), model_weights(model), {"step": 1, "best_step": 1})
    return path


@torch.no_grad()
def sharpen(model: Transformer) -> None:
    """Make outputs depend on the source, and end-of-sentence about as likely as it is in a trained model."""
    for layer in model.decoder.layers:
        layer.multihead_attn.out_proj.weight.mul_(4.0)
    for name, weight in model.named_parameters():
        if "bias" in name and name != "output.bias":
            weight.normal_(std=0.1)
    last = model.decoder.layers[-1].norm3 if model.decoder.norm is None else model.decoder.norm
    last.weight.normal_(std=4.0)
    last.bias.normal_()
    model.output.weight[EOS] = 3.0 * last.bias / last.bias.square().sum()
