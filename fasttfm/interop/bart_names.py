"""The names that weights have in Hugging Face's BART and its relatives, Marian and M2M-100, and ours for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fasttfm.config.model import TransformerConfig
from fasttfm.errors import UserError

_NORMS = {
    "encoder": {"norm1": "self_attn_layer_norm", "norm2": "final_layer_norm"},
    "decoder": {"norm1": "self_attn_layer_norm", "norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"},
}
_ATTENTIONS = {
    "encoder": {"self_attn": "self_attn"},
    "decoder": {"self_attn": "self_attn", "multihead_attn": "encoder_attn"},
}
_LINEARS = {"linear1": "fc1", "linear2": "fc2"}


def to_bart(weights: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """The weights of the layers under BART's names, `model.` before them; embeddings, positions and output are left."""
    result = {}
    for ours, theirs in _layer_names(config):
        result[theirs] = weights[ours]
    for ours, theirs in _attention_names(config):
        for kind in ("weight", "bias"):
            for letter, part in zip("qkv", weights[f"{ours}.in_proj_{kind}"].chunk(3)):
                result[f"{theirs}.{letter}_proj.{kind}"] = part
    return result


def from_bart(weights: Mapping[str, Tensor], config: TransformerConfig, path: Path) -> dict[str, Tensor]:
    """Our names for the layers' weights; UserError naming path and the first that is missing or of another shape."""
    result = {ours: _get(weights, theirs, path) for ours, theirs in _layer_names(config)}
    for ours, theirs in _attention_names(config):
        for kind in ("weight", "bias"):
            parts = [_get(weights, f"{theirs}.{letter}_proj.{kind}", path) for letter in "qkv"]
            result[f"{ours}.in_proj_{kind}"] = torch.cat(parts)
    for name, tensor in result.items():
        if name.endswith("in_proj_weight") and tensor.shape != (3 * config.d_model, config.d_model):
            raise UserError(f"{path}: {name} is {tuple(tensor.shape)}, its config.json says width {config.d_model}")
        if name.endswith("linear1.weight") and tensor.shape != (config.d_ff, config.d_model):
            raise UserError(f"{path}: {name} is {tuple(tensor.shape)}, its config.json says {config.d_ff} hidden units")
    return result


def _get(weights: Mapping[str, Tensor], name: str, path: Path) -> Tensor:
    if name not in weights:
        raise UserError(f"{path}: has no {name}: it is cut off, or of another architecture than its config.json says")
    return weights[name]


def _layers(config: TransformerConfig) -> Iterator[tuple[str, str]]:
    """(side, prefix) of every layer."""
    for side, count in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for layer in range(count):
            yield side, f"{side}.layers.{layer}."


def _layer_names(config: TransformerConfig) -> Iterator[tuple[str, str]]:
    """(our name, theirs) of all weights of the layers but attention's input projections."""
    for side, prefix in _layers(config):
        pairs = {**_NORMS[side], **_LINEARS}
        pairs |= {f"{ours}.out_proj": f"{theirs}.out_proj" for ours, theirs in _ATTENTIONS[side].items()}
        for ours, theirs in pairs.items():
            for kind in ("weight", "bias"):
                yield f"{prefix}{ours}.{kind}", f"model.{prefix}{theirs}.{kind}"
    if config.final_norm:
        for side in ("encoder", "decoder"):
            for kind in ("weight", "bias"):
                yield f"{side}.norm.{kind}", f"model.{side}.layer_norm.{kind}"


def _attention_names(config: TransformerConfig) -> Iterator[tuple[str, str]]:
    for side, prefix in _layers(config):
        for ours, theirs in _ATTENTIONS[side].items():
            yield prefix + ours, f"model.{prefix}{theirs}"
