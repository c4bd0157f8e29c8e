"""RoBERTa and DistilBERT read as BERTs: other parameter names, fewer embeddings, no sentence-pair head.

RoBERTa's positions start after the padding token's id, and it has one segment type; DistilBERT has none. Here both have
two equal segment types, so pairs work unchanged and fine-tuning may separate them.
Source: Liu et al. 2019 (RoBERTa), Sanh et al. 2019 (DistilBERT).
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fasttfm.convert.names import renamed
from fasttfm.errors import UserError
from fasttfm.system.parsing import field

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
    """Convert config.json and weights of one of RELATIVES to those of an equivalent BERT.

    Raises UserError for missing fields, or sizes that differ from the weights.
    """
    convert: Callable[..., tuple[dict[str, Any], dict]]
    convert = _from_roberta if given["model_type"] == "roberta" else _from_distilbert
    config, ours = convert(given, weights, path)
    return config | {"model_type": "bert", "type_vocab_size": 2}, ours


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
    ours = _renamed(weights, _ROBERTA, path)
    for name, tensor in ours.items():
        if tensor.dim() != 2:  # refused later, as of another shape
            continue
        if name.endswith(_POSITIONS):
            ours[name] = tensor[first:]
        elif name.endswith(_TABLE) and len(tensor) == 1:
            ours[name] = tensor.repeat(2, 1)
        elif name.endswith(_TABLE):
            raise UserError(f"{path.parent}: {name} has {len(tensor)} rows: RoBERTa has one kind of segment")
    return {**given, "max_position_embeddings": positions, "pad_token_id": first - 1}, ours


def _from_distilbert(
    given: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path
) -> tuple[dict[str, Any], dict]:
    others = {ours for theirs, ours in _DISTILBERT_FIELDS.items() if theirs != ours} | {"layer_norm_eps"}
    if wrong := sorted(others & given.keys()):
        raise UserError(f"{path}: {wrong[0]} is not a field of DistilBERT: it is of another model")
    ours = _renamed(weights, _DISTILBERT, path)
    for name in [name for name in ours if name.endswith(_POSITIONS)]:
        segments = name.removesuffix(_POSITIONS) + _TABLE
        if segments in ours:
            raise UserError(f"{path.parent}: has {segments}, and DistilBERT has no segments: it is of another model")
        ours[segments] = ours[name].new_zeros(2, *ours[name].shape[1:])
    return {_DISTILBERT_FIELDS.get(name, name): value for name, value in given.items()}, ours


def _renamed(weights: Mapping[str, Tensor], names: Mapping[str, str], path: Path) -> dict[str, Tensor]:
    def our_name(name: str) -> str:
        for pattern, ours in names.items():
            name = re.sub(pattern, ours, name)
        return name

    return renamed(weights, our_name, path.parent)
