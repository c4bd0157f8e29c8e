"""Model directories from Hugging Face folders, and writing of language model folders."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.config import RunConfig
from fasttfm.config.training import TrainingConfig
from fasttfm.convert.exchange import exporting
from fasttfm.errors import UserError
from fasttfm.models.pretrained import write_files
from fasttfm.store.weights import model_weights, with_weights
from fasttfm.system.wording import counted
from fasttfm_pretraining.data.text_tokenizer import TextTokenizer
from fasttfm_pretraining.interop.tokenizer_files import write_text_tokenizer
from fasttfm_pretraining.models.saved import write_run

Compare = Callable[[Path], list[str]]
"""Compares a model with a folder; returns lines for the user or raises UserError."""


def write_causal(
    folder: Path,
    fields: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    tokenizer: TextTokenizer | None,
    compare: Compare | None = None,
) -> list[str]:
    """Write a folder for AutoModelForCausalLM and AutoTokenizer. Returns lines for the user.

    fields: config.json, without special-token ids. Raises UserError if the folder holds other files or cannot be
    written.
    """
    begin, end = (None, None) if tokenizer is None else (tokenizer.begin, tokenizer.end)
    with exporting(folder) as (fresh, told):
        write_files(fresh, {**fields, "bos_token_id": begin, "eos_token_id": end}, weights)
        told += [] if tokenizer is None else write_text_tokenizer(tokenizer, fresh)
        told += [] if compare is None else compare(fresh)
    return told


def write_imported(
    folder: Path,
    out: Path,
    kind: str,
    model: Any,
    data: Any,
    tokenizer: TextTokenizer,
    told: Sequence[str],
    description: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write a directory of `fasttfm lm`, `mlm` or `finetune` from a model read from a folder.

    data: its `data` section. told: notes on omissions and assumptions, for the model card. description: of a task's
    data, as fine-tuning writes it.

    Vocabulary rows after the tokenizer's last token (GPT-2's 50,257 tokens padded to 50,304) have no text and are
    dropped. Returns notes on all omissions. Raises UserError if the tokenizer has more tokens than the model.
    """
    told = list(told)
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"{folder}: its tokenizer has {len(tokenizer):,} tokens, but its model {model.config.vocab_size:,}"
        )
    if len(tokenizer) < model.config.vocab_size:
        rows = counted(model.config.vocab_size - len(tokenizer), "row")
        told.append(f"{folder}: left out {rows} of the vocabulary behind the tokenizer's {len(tokenizer):,} tokens")
        model = cut_vocabulary(model, len(tokenizer), folder)
    config = RunConfig(kind=kind, model=model.config, data=data, training=TrainingConfig())
    origin = [f"imported from {folder.resolve().name} (Hugging Face)", *told]
    card = "\n".join([f"# Model of kind {kind}", "", "## Origin", "", *(f"- {line}" for line in origin), ""])
    write_run(out, config, model_weights(model), tokenizer, description, card)
    return told


def cut_vocabulary(model: Any, size: int, source: Path) -> Any:
    """A copy of a model with the first `size` rows of its vocabulary."""
    config = dataclasses.replace(model.config, vocab_size=size)
    with torch.device("meta"):
        wanted = model_weights(type(model)(config))
    weights = {name: each[: len(wanted[name])] if each.dim() else each for name, each in model_weights(model).items()}
    return with_weights(lambda: type(model)(config), weights, source).eval()
