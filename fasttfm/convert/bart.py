"""Common parts of formats with BART's names: Hugging Face's Marian and M2M-100, and fairseq's Transformer."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.config.model import TransformerConfig
from fasttfm.convert.config_json import Field, configuration, our_activation, read_search, tell_search
from fasttfm.convert.exchange import Arrangement, shapes, with_tables
from fasttfm.convert.names import EncoderDecoderNames, Table, TheirWeights
from fasttfm.errors import UserError
from fasttfm.reference import positional_encoding
from fasttfm.system.parsing import field, shown

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
    Field("attention_dropout", "attention_dropout", 0.0),
    Field("relu_dropout", "activation_dropout", 0.0),
    Field("max_length", "max_position_embeddings", 1024),
)
KNOWN = {
    *(each.theirs for each in FIELDS),
    *("activation_function", "decoder_attention_heads", "decoder_ffn_dim", "add_bias_logits"),
    *("share_encoder_decoder_embeddings", "decoder_vocab_size", "forced_eos_token_id"),
    *("decoder_start_token_id", "unk_token_id"),
    *("length_penalty", "num_beams", "early_stopping", "no_repeat_ngram_size", "suppress_tokens"),
    # training, search and runtime
    *("init_std", "encoder_layerdrop", "decoder_layerdrop", "num_hidden_layers", "max_length", "min_length"),
    *("bad_words_ids", "classif_dropout", "classifier_dropout", "static_position_embeddings"),
    *("max_new_tokens", "min_new_tokens"),
}
"""Fields of config.json that are read or do not affect logits, besides those common to all models."""
_SHARED = r"model\.shared\.weight"
"""Present but unused if each side has its own table."""
_READ = ("num_beams", "length_penalty", "early_stopping", "no_repeat_ngram_size", "min_new_tokens", "min_length")
_OF_SEARCHES = ("max_length", "max_new_tokens", "bad_words_ids", "forced_eos_token_id")
"""Search settings in config.json before generation_config.json existed."""


def read_network(
    folder: Path,
    config: TransformerConfig,
    weights: TheirWeights,
    arrangements: Sequence[Arrangement],
    embeddings: tuple[Tensor, Tensor, Tensor | None],
    bias: Tensor | None = None,
    *,
    padding: int | None = None,
) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """Return configuration and weights of a Marian or M2M-100 model, by our names and in our token order.

    config: from config.json, with share_embeddings "all"; embeddings: from tables(); bias: of the logits (V,);
    padding: the zero row of the positions. Raises UserError for a weight that is missing, unknown or of a wrong shape.
    """
    source, target, output = embeddings
    if output is not None or source is not target:
        shared: Any = "decoder" if output is None else "none"
        config = dataclasses.replace(config, share_embeddings=shared, source_vocab_size=len(arrangements[0]))
    config, result = with_tables(
        config, from_bart(weights, config), arrangements, (source, target), output, bias, path=folder
    )
    _refuse_trained_positions(weights, config.positional_encoding, padding)
    weights.refuse_rest(_SHARED)
    return config, result


def from_bart(weights: TheirWeights, config: TransformerConfig, prefix: str = "model.") -> dict[str, Tensor]:
    """Return the layers' weights by our names; UserError for one that is missing or does not match config."""
    for side, number in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        weights.refuse_other_layers(f"{prefix}{side}.layers.", number, f"{side}_layers")
    return weights.ours(BART.parameters(config, prefix), shapes(config))


def tables(
    weights: TheirWeights, given: Mapping[str, Any], path: Path, *, joint: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the source and target embeddings, and the output projection if it is not tied.

    If tied, Hugging Face uses the shared table for both sides of a joint vocabulary and ignores other tables.
    """
    tied = field(given, "tie_word_embeddings", bool, str(path), True)
    of_sides = [f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    if tied and joint:
        names = ("model.shared.weight", *of_sides, "lm_head.weight")
        origin = next((name for name in names if name in weights), names[0])
        weights.refuse_other_copies(dict.fromkeys(names, origin))
        return weights[origin], weights[origin], None
    shared = ["model.shared.weight"] if joint else []
    source, target = (weights.first(name, *shared) for name in of_sides)
    if tied:
        weights.refuse_other_copies({"lm_head.weight": of_sides[1]})
    return source, target, None if tied else weights["lm_head.weight"]


def _refuse_trained_positions(weights: TheirWeights, variant: str, padding: int | None) -> None:
    """Raise UserError if a file's positions are not the sinusoids that we compute."""
    name = "weight" if variant == "paper" else "weights"
    for side in ("encoder", "decoder"):
        table = weights.get(f"model.{side}.embed_positions.{name}")
        if table is None:
            continue
        same = table.dim() == 2 and table.shape[1] % 2 == 0
        if same:
            ours = positional_encoding(table.shape[0], table.shape[1], variant, device=table.device)
            ours = torch.cat([ours[:, 0::2], ours[:, 1::2]], dim=1) if variant == "paper" else ours
            rows = [row for row in range(len(table)) if row != padding]
            same = torch.allclose(table[rows], ours[rows], atol=1e-2)
        if not same:
            raise UserError(
                f"{weights.path}: model.{side}.embed_positions.{name} is not sinusoids: only they are supported"
            )


def bart_config(
    given: Mapping[str, Any], path: Path, vocab_size: int, activation: str, **fields: Any
) -> TransformerConfig:
    """Convert config.json of Marian or M2M-100 to our configuration; UserError for unsupported values.

    activation: default if config.json has none.
    """
    for name in ("attention_heads", "ffn_dim"):
        if given.get(f"encoder_{name}") != given.get(f"decoder_{name}"):
            raise UserError(f"{path}: encoder_{name} and decoder_{name} differ, which is not supported")
    fields["activation"] = our_activation(given, path, "activation_function", activation)
    return configuration(TransformerConfig, given, path, FIELDS, vocab_size=vocab_size, **fields)


def decoding(
    folder: Path, given: Mapping[str, Any], *, eos: int, unk: int, start: int | None, pad: int | None
) -> DecodingConfig:
    """Return the search settings of generation_config.json, or of an older config.json.

    Warns of settings without a counterpart. eos, unk, start, pad: the vocabulary's ids; UserError if a file has others.
    """
    path = folder / "generation_config.json"
    search = read_search(folder)
    settings, where = {**given, **search}, str(path)
    for name, number in (("eos_token_id", eos), ("decoder_start_token_id", start), ("pad_token_id", pad)):
        for file, value in ((folder / "config.json", given.get(name)), (path, search.get(name))):
            if number is not None and value not in (None, number, [number]):
                raise UserError(
                    f"{file}: {name} is {shown(value)}, in the vocabulary it is {number}: copy both from one model"
                )
    older = {name: given[name] for name in _OF_SEARCHES if name in given}
    suppressed = field(settings, "suppress_tokens", list, where, [])
    shortest = max(1, field(settings, "min_length", int, where, 0) - 1)  # it counts the start token
    others = [token for token in suppressed if token not in (unk, start, pad)]
    left = {**older, **search, "suppress_tokens": others or None}
    tell_search(folder, left, (*_READ, "eos_token_id", "decoder_start_token_id"))
    try:
        return DecodingConfig(
            beam=field(settings, "num_beams", int, where, 1) or 1,
            length_penalty="power",
            early_stopping=settings.get("early_stopping") is True,
            min_len=field(settings, "min_new_tokens", int, where, shortest),
            alpha=float(field(settings, "length_penalty", float, where, 1.0)),
            no_repeat_ngram=field(settings, "no_repeat_ngram_size", int, where, 0) or 0,
            allow_unk=unk not in suppressed,
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
