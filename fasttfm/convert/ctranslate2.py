"""Export to CTranslate2, written with its own model specification.

https://opennmt.net/CTranslate2/conversion.html                            filling a specification manually
https://github.com/OpenNMT/CTranslate2/blob/master/python/ctranslate2/specs/model_spec.py       the binary format
https://github.com/OpenNMT/CTranslate2/blob/master/python/ctranslate2/specs/transformer_spec.py
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fasttfm.config.model import TransformerConfig
from fasttfm.convert.exchange import OF_GENERATION, Model, generation_settings, left_out, piece_names, positions
from fasttfm.convert.names import EncoderDecoderNames, Table, theirs
from fasttfm.data.moses_tokenizer import MosesTokenizer
from fasttfm.data.tokenizer import BOS, EOS, PAD, UNK
from fasttfm.errors import optional

SPECIAL = {PAD: "<blank>", UNK: "<unk>", BOS: "<s>", EOS: "</s>"}
_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
_ENCODER_LAYER: Table = {
    "self_attn.in_proj": "self_attention.linear_0",
    "self_attn.out_proj": "self_attention.linear_1",
    "norm1": "self_attention.layer_norm",
    "linear1": "ffn.linear_0",
    "linear2": "ffn.linear_1",
    "norm2": "ffn.layer_norm",
}
_DECODER_LAYER: Table = {
    **_ENCODER_LAYER,
    "multihead_attn.in_proj": ("attention.linear_0", "attention.linear_1"),
    "multihead_attn.out_proj": "attention.linear_2",
    "norm2": "attention.layer_norm",
    "norm3": "ffn.layer_norm",
}
NAMES = EncoderDecoderNames(_ENCODER_LAYER, _DECODER_LAYER, "layer_{}")
"""Variable names with dots, and with weight and bias for a norm's gamma and beta."""


def export(model: Model, folder: Path) -> list[str]:
    """Write a model for ctranslate2.Translator() with the tokenizers' files; returns notes.

    The Translator takes pieces, and adds the end token itself if sources have one.
    """
    names = [piece_names(tokenizer, SPECIAL) for tokenizer in model.tokenizers]
    write(model.config, model.weights, folder, *names, add_source_eos=bool(model.source_tokenizer.source_end))
    same = {
        "beam_size": model.decoding.beam,
        "length_penalty": generation_settings(model.decoding)["length_penalty"],
        "min_decoding_length": model.decoding.min_len,
        "no_repeat_ngram_size": model.decoding.no_repeat_ngram,
        "disable_unk": not model.decoding.allow_unk,
        "suppress_sequences": [[SPECIAL[PAD]], [SPECIAL[BOS]]],
    }
    given = ", ".join(f"{name}={value}" for name, value in same.items())
    notes = [f"no search setting is recorded: give translate_batch {given}"]
    notes += left_out(model.decoding, OF_GENERATION - {"early_stopping"})
    for side, tokenizer in zip(("source", "target"), model.tokenizers):
        if isinstance(tokenizer, MosesTokenizer):
            tokenizer.save(folder / f"{side}.codes")
            notes.append(f"{side} text is tokenized by sacremoses and {side}.codes: {tokenizer.vocabulary}")
        else:
            (folder / f"{side}.spm").write_bytes(tokenizer.model)
    if model.decoding.length_penalty == "wu" and model.decoding.alpha:
        notes.append(f"the length penalty wu {model.decoding.alpha} is not known there: its length_penalty is a power")
    if any(each.prefix for each in model.tokenizers):
        codes = [each.pieces(each.prefix) for each in model.tokenizers]
        notes.append(f"sources must begin with {codes[0]}, and target_prefix must be {codes[1]}")
    return notes


def write(
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    folder: Path,
    source_words: Sequence[str],
    target_words: Sequence[str],
    *,
    add_source_eos: bool = False,
    alignment_layer: int = 0,
) -> None:
    """Write weights by models.Transformer's names to folder, in float32. UserError if ctranslate2 is not installed.

    alignment_layer: decoder layer, from 1, whose mean over heads is returned as attention; 0: one head of the last.
    """
    specs = optional("ctranslate2.specs", "ctranslate2")
    spec = specs.transformer_spec.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.heads,
        pre_norm=config.norm_first,
        no_final_norm=not config.final_norm,
        activation=getattr(specs.common_spec.Activation, _ACTIVATIONS[config.activation]),
        alignment_layer=alignment_layer - 1,
        alignment_heads=config.heads if alignment_layer else 1,
    )
    target = weights["target_embedding.weight"]
    tables = {"encoder": weights.get("source_embedding.weight", target), "decoder": target}
    for side, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        embeddings = stack.embeddings[0] if side == "encoder" else stack.embeddings
        embeddings.weight = _array(tables[side])
        stack.scale_embeddings = True
        stack.position_encodings.encodings = _array(positions(config, weights, side))
    for name, tensor in theirs(weights, NAMES.parameters(config)).items():
        _set(spec, name, _array(tensor))
    spec.decoder.projection.weight = _array(weights.get("output.weight", target))
    if "output.bias" in weights:
        spec.decoder.projection.bias = _array(weights["output.bias"])
    spec.register_source_vocabulary(list(source_words))
    spec.register_target_vocabulary(list(target_words))
    spec.config.add_source_eos = add_source_eos
    spec.config.add_attribute("layer_norm_epsilon", config.layer_norm_eps)
    spec.validate()
    spec.optimize()
    spec.save(str(folder))


def _array(x: Tensor) -> Any:
    return x.detach().float().cpu().contiguous().numpy()


def _set(spec: Any, name: str, value: Any) -> None:
    """Set a variable of a specification by a name such as decoder.layer_3.attention.linear_0.weight."""
    *path, kind = name.split(".")
    for part in path:
        entry = re.fullmatch(r"(\w+)_(\d+)", part)
        if entry is None or hasattr(spec, part):
            spec = getattr(spec, part)
        else:
            spec = getattr(spec, entry[1])[int(entry[2])]
    setattr(spec, {"weight": "gamma", "bias": "beta"}[kind] if path[-1] == "layer_norm" else kind, value)
