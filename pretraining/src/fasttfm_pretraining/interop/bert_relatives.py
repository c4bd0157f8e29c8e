"""RoBERTa and DistilBERT as what they are: BERTs with other names, fewer embeddings and no sentence pairs.

RoBERTa counts positions from the padding token's number on, and has one kind of segment; DistilBERT has none. Here both
have two kinds that are equal, so that pairs cost nothing and fine-tuning may part them.
Source: Liu et al. 2019 (RoBERTa), Sanh et al. 2019 (DistilBERT).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.errors import UserError
from fasttfm.parsing import field

RELATIVES = ("roberta", "distilbert")
"""Values of model_type."""
_TABLE = "embeddings.token_type_embeddings.weight"
_POSITIONS = "embeddings.position_embeddings.weight"
_ROBERTA = {
    r"^roberta\.": "bert.",
    r"^lm_head\.dense\.": "cls.predictions.transform.dense.",
    r"^lm_head\.layer_norm\.": "cls.predictions.transform.LayerNorm.",
    r"^lm_head\.": "cls.predictions.",
    r"^classifier\.dense\.": "bert.pooler.dense.",  # with tanh, as a pooler
    r"^classifier\.out_proj\.": "classifier.",
}
_DISTILBERT = {
    r"^distilbert\.": "bert.",
    r"(^|\.)transformer\.layer\.": r"\1encoder.layer.",
    r"\.attention\.q_lin\.": ".attention.self.query.",
    r"\.attention\.k_lin\.": ".attention.self.key.",
    r"\.attention\.v_lin\.": ".attention.self.value.",
    r"\.attention\.out_lin\.": ".attention.output.dense.",
    r"\.sa_layer_norm\.": ".attention.output.LayerNorm.",
    r"\.ffn\.lin1\.": ".intermediate.dense.",
    r"\.ffn\.lin2\.": ".output.dense.",
    r"\.output_layer_norm\.": ".output.LayerNorm.",
    r"^vocab_transform\.": "cls.predictions.transform.dense.",
    r"^vocab_layer_norm\.": "cls.predictions.transform.LayerNorm.",
    r"^vocab_projector\.bias": "cls.predictions.bias",
    r"^vocab_projector\.": "cls.predictions.decoder.",
}
_DISTILBERT_FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}


def as_bert(given: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path) -> tuple[dict[str, Any], dict]:
    """config.json and weights of one of RELATIVES as those of the BERT that computes the same.

    Raises UserError for fields that are missing or of another size than the weights.
    """
    convert: Callable[..., tuple[dict[str, Any], dict]]
    convert = _from_roberta if given["model_type"] == "roberta" else _from_distilbert
    config, renamed = convert(given, weights, path)
    return config | {"model_type": "bert", "type_vocab_size": 2}, renamed


def _from_roberta(given: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path) -> tuple[dict[str, Any], dict]:
    first = field(given, "pad_token_id", int, str(path), 1) + 1
    positions = field(given, "max_position_embeddings", int, str(path)) - first
    if positions < 1:
        raise UserError(
            f"{path}: max_position_embeddings {positions + first} leaves no position: {first} are padding's"
        )
    kinds = field(given, "type_vocab_size", int, str(path), 1)
    if kinds != 1:
        raise UserError(f"{path}: type_vocab_size {kinds} is not supported: RoBERTa has 1")
    renamed = _renamed(weights, _ROBERTA)
    for name, tensor in renamed.items():
        if tensor.dim() != 2:  # refused later, as of another shape
            continue
        if name.endswith(_POSITIONS):
            renamed[name] = tensor[first:]
        elif name.endswith(_TABLE):
            renamed[name] = tensor[:1].repeat(2, 1)
    return {**given, "max_position_embeddings": positions, "pad_token_id": first - 1}, renamed


def _from_distilbert(
    given: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path
) -> tuple[dict[str, Any], dict]:
    renamed = _renamed(weights, _DISTILBERT)
    for name in [name for name in renamed if name.endswith(_POSITIONS)]:
        renamed[name.removesuffix(_POSITIONS) + _TABLE] = torch.zeros(2, *renamed[name].shape[1:])
    return {_DISTILBERT_FIELDS.get(name, name): value for name, value in given.items()}, renamed


def _renamed(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    result = {}
    for name, tensor in weights.items():
        renamed = name
        for pattern, ours in names.items():
            renamed = re.sub(pattern, ours, renamed)
        result[renamed] = tensor
    return result
