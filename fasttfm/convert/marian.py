"""Import and export of Hugging Face's MarianMTModel and MarianTokenizer, the format of OPUS-MT models.

https://huggingface.co/docs/transformers/model_doc/marian
Post-norm, scaled embeddings, the paper's sinusoids with all sines before all cosines, a start token without embedding.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fasttfm.config.model import TransformerConfig
from fasttfm.convert.bart import BART, FIELDS, KNOWN, bart_config, decoding, read_network, tables
from fasttfm.convert.channels import halves_from_pairs, pairs_from_halves
from fasttfm.convert.config_json import THEIR_ACTIVATIONS, described, read_config, refuse_others, tell_unknown_fields
from fasttfm.convert.exchange import (
    OF_GENERATION,
    Arrangement,
    Model,
    fitting_tokenizer,
    generation_settings,
    left_out,
    piece_names,
    refuse_other_corpus,
    special_id,
)
from fasttfm.convert.names import theirs
from fasttfm.convert.tokenizer_json import SPECIAL_PIECES
from fasttfm.convert.weight_files import read_tensors
from fasttfm.data.moses_tokenizer import MosesTokenizer
from fasttfm.data.tokenizer import Tokenizer, Vocabulary
from fasttfm.errors import UserError
from fasttfm.models.pretrained import SPECIAL_TOKENS, write_files
from fasttfm.system.files import read_json
from fasttfm.system.parsing import field

_EPSILON = 1e-5
_LONGEST = 512


def export(model: Model, folder: Path) -> list[str]:
    """Write a directory for MarianMTModel.from_pretrained() and MarianTokenizer.from_pretrained(); returns notes.

    Raises UserError for a model that Marian cannot represent.
    """
    _refuse_unsupported(model)
    weights = halves_from_pairs(model.weights, model.config.d_model)
    tensors = {name: tensor.float().clone() for name, tensor in marian_weights(model.config, weights).items()}
    write_files(folder, marian_config(model.config), tensors)
    settings = generation_settings(model.decoding)
    _write_json(folder / "generation_config.json", {**settings, "max_length": _LONGEST})
    _write_tokenizer(model, folder)
    notes = left_out(model.decoding, OF_GENERATION)
    if model.decoding.length_penalty == "wu" and model.decoding.alpha:
        notes.append(f"the length penalty wu {model.decoding.alpha} is not known there: length_penalty 1.0 was written")
    return notes


def _refuse_unsupported(model: Model) -> None:
    """Raise UserError for features that MarianMTModel lacks."""
    config = model.config
    for unsupported, feature in (
        (not model.source_tokenizer.source_end, "sources without an end"),
        (config.norm_first, "norm_first"),
        (config.positional_encoding != "paper", f"positional_encoding {config.positional_encoding}"),
        (config.first_position != 0, f"first_position {config.first_position}"),
        (config.layer_norm_eps != _EPSILON, f"layer_norm_eps {config.layer_norm_eps}"),
        (config.share_embeddings == "none", "share_embeddings none"),
        (isinstance(model.source_tokenizer, MosesTokenizer), "codes of fastBPE or subword-nmt"),
        (
            config.share_embeddings == "all" and model.source_tokenizer is not model.target_tokenizer
            and model.source_tokenizer.vocabulary is None, "two tokenizers for one table",
        ),
    ):  # fmt: skip
        if unsupported:
            raise UserError(f"marian-hf has no {feature}: export this model as ctranslate2, onnx or pretrained")


def marian_weights(config: TransformerConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of MarianMTModel without positions. weights: in Marian's channel order."""
    target = weights["target_embedding.weight"]
    source = weights.get("source_embedding.weight", target)
    bias = weights.get("output.bias")
    result = {
        "final_logits_bias": target.new_zeros(1, config.vocab_size) if bias is None else bias[None],
        "model.encoder.embed_tokens.weight": source,
        "model.decoder.embed_tokens.weight": target,
        "lm_head.weight": target,
        **theirs(weights, BART.parameters(config, "model.")),
    }
    if config.share_embeddings == "all":
        result["model.shared.weight"] = target
    return result


def marian_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json of MarianMTModel."""
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "vocab_size": config.source_vocab_size or config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        **described(config, FIELDS),
        "decoder_attention_heads": config.heads,
        "decoder_ffn_dim": config.d_ff,
        "activation_function": THEIR_ACTIVATIONS[config.activation],
        "scale_embedding": True,
        "static_position_embeddings": True,
        "share_encoder_decoder_embeddings": config.share_embeddings == "all",
        "tie_word_embeddings": True,
        "forced_eos_token_id": None,
        **SPECIAL_TOKENS,
    }


def _write_tokenizer(model: Model, folder: Path) -> None:
    source, target = model.tokenizers
    for name, tokenizer in (("source.spm", source), ("target.spm", target)):
        (folder / name).write_bytes(tokenizer.model)
    separate = model.config.share_embeddings != "all"
    _write_json(folder / "vocab.json", _numbers(source))
    if separate:
        _write_json(folder / "target_vocab.json", _numbers(target))
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "unk_token": "<unk>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": _LONGEST,
        "separate_vocabs": separate,
        "source_lang": "source",
        "target_lang": "target",
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _numbers(tokenizer: Tokenizer) -> dict[str, int]:
    return {name: position for position, name in enumerate(piece_names(tokenizer, SPECIAL_PIECES))}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(folder: Path, **languages: Any) -> Model:
    """Read a directory saved by MarianMTModel and MarianTokenizer (OPUS-MT).

    Raises UserError for a file that is missing, truncated or of another architecture.
    """
    path, given = folder / "config.json", read_config(folder, "marian")
    off = ("normalize_before", "normalize_embedding", "add_final_layer_norm", "is_decoder")
    refused = {**dict.fromkeys(off, (None, False)), "scale_embedding": (True,)}
    refuse_others({"scale_embedding": False, **given}, path, refused)
    tell_unknown_fields(given, path, {*KNOWN, *refused})
    weights = read_tensors(folder)
    joint = field(given, "share_encoder_decoder_embeddings", bool, str(path), True)
    sides = []
    for name in ("vocab.json", "vocab.json" if joint else "target_vocab.json"):
        pieces = ordered_pieces(read_json(folder / name), folder / name)
        unk, eos = (special_id(pieces, piece, folder / name) for piece in ("<unk>", "</s>"))
        pad = pieces.index("<pad>") if "<pad>" in pieces else None
        start = field(given, "decoder_start_token_id", int, str(path), pad)
        arrangement = Arrangement(len(pieces), pad=pad, unk=unk, start=start, eos=eos)
        sides.append((arrangement, arrangement.pieces(pieces)))
    search = decoding(folder, given, eos=eos, unk=unk, start=start, pad=pad)  # of the target side, the last in the loop
    config = bart_config(given, path, len(sides[1][0]), "gelu", positional_encoding="paper")
    embeddings = tables(weights, given, path, joint=joint)
    for table, (arrangement, _) in zip(embeddings[:2], sides):
        if len(table) != max(row for row in arrangement.rows if row is not None) + 1:
            raise UserError(f"{folder}: vocab.json does not fit its weights, which have {len(table):,} tokens")
    bias = weights.get("final_logits_bias")
    if bias is None:
        message = f"{folder}: its weights have no final_logits_bias: the output has no bias"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    elif bias.dim() != 2 or len(bias) != 1:
        raise UserError(f"{folder}: final_logits_bias is {tuple(bias.shape)}: one row is needed")
    else:
        bias = bias[0]
    arrangements = [arrangement for arrangement, _ in sides]
    config, result = read_network(folder, config, weights, arrangements, embeddings, bias)
    source, target = (
        fitting_tokenizer(folder / name, Vocabulary(pieces=pieces, prefix=[], codes=True))
        for name, (_, pieces) in zip(("source.spm", "target.spm"), sides)
    )
    refuse_other_corpus(folder, (source, target))
    return Model(config, pairs_from_halves(result, config.d_model), (source, target), search)


def ordered_pieces(words: Mapping[str, Any], path: Path) -> list[str]:
    """Return the pieces of a vocab.json in order of their ids; UserError if an id is missing or duplicate."""
    if sorted(value for value in words.values() if type(value) is int) != list(range(len(words))):
        raise UserError(f"{path}: does not number its {len(words):,} pieces one after the other: copy it again")
    return sorted(words, key=lambda piece: words[piece])
