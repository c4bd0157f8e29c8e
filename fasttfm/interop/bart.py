"""Common parts of the files of BART's relatives: Hugging Face's Marian and M2M-100, and fairseq's Transformer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.config.model import TransformerConfig
from fasttfm.errors import UserError
from fasttfm.files import read_json
from fasttfm.interop.config_json import Field, configuration, our_activation
from fasttfm.interop.exchange import shapes
from fasttfm.interop.names import EncoderDecoderNames, Table, TheirWeights
from fasttfm.parsing import field

_ENCODER_LAYER: Table = {
    "self_attn.in_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.out_proj": "self_attn.out_proj",
    "norm1": "self_attn_layer_norm",
    "linear1": "fc1",
    "linear2": "fc2",
    "norm2": "final_layer_norm",
}
_DECODER_LAYER: Table = {
    **_ENCODER_LAYER,
    "multihead_attn.in_proj": ("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj"),
    "multihead_attn.out_proj": "encoder_attn.out_proj",
    "norm2": "encoder_attn_layer_norm",
    "norm3": "final_layer_norm",
}
BART = EncoderDecoderNames(_ENCODER_LAYER, _DECODER_LAYER, "layers.{}")
FIELDS = (
    Field("d_model", "d_model"),
    Field("heads", "encoder_attention_heads"),
    Field("d_ff", "encoder_ffn_dim"),
    Field("encoder_layers", "encoder_layers"),
    Field("decoder_layers", "decoder_layers"),
    Field("dropout", "dropout", 0.1),
    Field("max_length", "max_position_embeddings", 1024),
)
THEIR_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "swish"}
_ACTIVATIONS = {theirs: ours for ours, theirs in THEIR_ACTIVATIONS.items()} | {"gelu_new": "gelu_tanh", "silu": "silu"}
KNOWN = {
    *(each.theirs for each in FIELDS),
    *("activation_function", "decoder_attention_heads", "decoder_ffn_dim", "scale_embedding", "normalize_before"),
    *("share_encoder_decoder_embeddings", "normalize_embedding", "decoder_vocab_size", "forced_eos_token_id"),
    *("decoder_start_token_id", "unk_token_id", "attention_dropout", "activation_dropout"),
    *("length_penalty", "num_beams", "early_stopping", "suppress_tokens"),
    # how they are trained, searched and run
    *("init_std", "encoder_layerdrop", "decoder_layerdrop", "num_hidden_layers", "max_length"),
    *("bad_words_ids", "classif_dropout", "classifier_dropout", "static_position_embeddings", "max_new_tokens"),
}
"""Fields of config.json that are read, or that change no logit, beside those of every model."""
OTHER_NAMES = (
    r"lm_head\.weight",
    r"model\.(shared|(encoder|decoder)\.embed_tokens)\.weight",
    r"model\.(encoder|decoder)\.embed_positions\.weights?",
)
"""Names that a table has beside the one that is read, and sinusoids, which are computed."""


def from_bart(weights: TheirWeights, config: TransformerConfig, prefix: str = "model.") -> dict[str, Tensor]:
    """The layers' weights by our names; UserError for one that is missing or of another shape than config says."""
    for side, number in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        weights.refuse_other_layers(f"{prefix}{side}.layers.", number, f"{side}_layers")
    return weights.ours(BART.parameters(config, prefix), shapes(config))


def tables(
    weights: TheirWeights, given: Mapping[str, Any], path: Path, *, joint: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Source's and target's embeddings, and the output's where config.json says that it is of its own.

    Tied, Hugging Face gives every side of a joint vocabulary the shared table, whatever else a file has.
    """
    tied = field(given, "tie_word_embeddings", bool, str(path), True)
    of_sides = [f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    if tied and joint:
        table = weights.first("model.shared.weight", *of_sides, "lm_head.weight")
        return table, table, None
    shared = ["model.shared.weight"] if joint else []
    source, target = (weights.first(name, *shared) for name in of_sides)
    return source, target, None if tied else weights["lm_head.weight"]


def bart_config(given: Mapping[str, Any], path: Path, vocab_size: int, **fields: Any) -> TransformerConfig:
    """Our configuration for Hugging Face's config.json of Marian or M2M-100; UserError for what we have not."""
    for name in ("attention_heads", "ffn_dim"):
        if given.get(f"encoder_{name}") != given.get(f"decoder_{name}"):
            raise UserError(f"{path}: encoder_{name} and decoder_{name} differ, which is not supported")
    activation = our_activation(given, path, "activation_function", "relu", _ACTIVATIONS)
    return configuration(TransformerConfig, given, path, FIELDS, vocab_size=vocab_size, activation=activation, **fields)


def decoding(folder: Path, given: Mapping[str, Any]) -> DecodingConfig:
    """Return Hugging Face's search settings: generation_config.json, or what an older config.json says."""
    path = folder / "generation_config.json"
    settings, where = {**given, **(read_json(path) if path.exists() else {})}, str(path)
    suppressed = field(settings, "suppress_tokens", list, where, [])
    try:
        return DecodingConfig(
            beam=field(settings, "num_beams", int, where, 1) or 1,
            length_penalty="power",
            early_stopping=settings.get("early_stopping") is True,
            alpha=float(field(settings, "length_penalty", float, where, 1.0)),
            allow_unk=settings.get("unk_token_id") not in suppressed or not suppressed,
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
