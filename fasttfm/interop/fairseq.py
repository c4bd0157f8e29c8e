"""fairseq's Transformer for translation, from a checkpoint of fairseq-train and the dictionaries of fairseq-preprocess.

https://github.com/facebookresearch/fairseq
Layers have BART's names. Sinusoids are tensor2tensor's and count from padding's number + 1, which is 2. A target input
begins with the end of a sentence. Text must have been cut by SentencePiece: its model is given besides.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.checkpoints.weights import refuse_what_is_no_number
from fasttfm.config.decoding import DecodingConfig
from fasttfm.config.model import TransformerConfig
from fasttfm.data.tokenizer import Vocabulary
from fasttfm.errors import UserError, is_out_of_memory
from fasttfm.files import unreadable
from fasttfm.interop.bart import from_bart
from fasttfm.interop.config_json import Field, configuration, our_activation
from fasttfm.interop.exchange import Arrangement, Model, numbered_tokenizer, with_tables
from fasttfm.interop.names import TheirWeights
from fasttfm.interop.weight_files import first_line

_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
_START, _PAD, _EOS, _UNK = range(4)
_UNSUPPORTED = {
    "encoder_learned_pos": "learned positions",
    "decoder_learned_pos": "learned positions",
    "no_token_positional_embeddings": "no positions",
    "no_scale_embedding": "embeddings that are not scaled",
    "layernorm_embedding": "a norm on the embeddings",
    "adaptive_softmax_cutoff": "an adaptive softmax",
    "cross_self_attention": "attention over both sides at once",
    "no_cross_attention": "decoders without attention to the source",
    "no_decoder_final_norm": "a decoder without its final norm",
    "scale_fc": "norms inside of layers",
    "scale_attn": "norms inside of layers",
    "scale_heads": "scaled heads",
    "scale_resids": "scaled residuals",
}
"""Settings of architectures that we have not, and what they mean."""
_SIZES = (
    Field("d_model", "encoder_embed_dim", 512),
    Field("d_ff", "encoder_ffn_embed_dim", 2048),
    Field("heads", "encoder_attention_heads", 8),
)
_FIELDS = (
    *_SIZES,
    Field("dropout", "dropout", 0.1),
    Field("attention_dropout", "attention_dropout", 0.0),
    Field("relu_dropout", "activation_dropout", 0.0),
)
"""With fairseq's own defaults (base_architecture)."""
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_tanh", "swish": "silu"}


def read(checkpoint: Path, dictionaries: Sequence[Path], models: Sequence[Path]) -> Model:
    """The model of a checkpoint, which is loaded without running any code in it.

    dictionaries: dict.SRC.txt and dict.TGT.txt, or one for both; models: the SentencePiece models likewise. Raises
    UserError for a file that is missing, cut off or of another architecture.
    """
    if not 1 <= len(dictionaries) <= 2 or not 1 <= len(models) <= 2:
        raise UserError("--dict and --spm: give one file for both sides, or the source's and then the target's")
    settings, weights = _load(checkpoint)
    pieces = [_read_dictionary(path) for path in (dictionaries[0], dictionaries[-1])]
    joint = pieces[0] == pieces[1] and len(models) == 1
    arrangements = [Arrangement(len(each), pad=_PAD, unk=_UNK, start=_EOS, eos=_EOS) for each in pieces]
    tables = [weights[f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder")]
    for table, each, path in zip(tables, pieces, (dictionaries[0], dictionaries[-1])):
        if len(table) != len(each):
            raise UserError(f"{path}: has {len(each):,} pieces with the special ones, the weights {len(table):,}")
    config = _config(settings, weights, checkpoint, list(map(len, arrangements)), joint, tables)
    layers = from_bart(weights, config, prefix="")
    config, result = with_tables(config, layers, arrangements, tables, _output(weights))
    weights.refuse_rest(r"decoder\.output_projection\.weight", r"(encoder|decoder)\.(version|embed_positions\..*)")
    sides = [
        numbered_tokenizer(path, Vocabulary(pieces=arrangement.pieces(each), prefix=[], silent=["<s>"]))
        for path, arrangement, each in zip((models[0], models[-1]), arrangements, pieces)
    ]
    return Model(
        config=config,
        weights=result,
        source_tokenizer=sides[0] if not joint else sides[1],
        target_tokenizer=sides[1],
        decoding=DecodingConfig(
            beam=5, length_penalty="power", alpha=1.0, max_len_a=0.0, max_len_b=200, allow_unk=True
        ),
    )


def _load(path: Path) -> tuple[Mapping[str, Any], TheirWeights]:
    """Settings and float32 weights of a checkpoint."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: give a checkpoint of fairseq-train") from None
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # unpickling raises of every kind
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        raise UserError(f"{path}: is cut off, or holds more than settings and weights ({first_line(error)})") from None
    weights = loaded.get("model") if isinstance(loaded, dict) else None
    configuration = loaded.get("cfg") if isinstance(loaded, dict) else None
    settings = configuration.get("model") if isinstance(configuration, dict) else None
    settings = settings or (loaded.get("args") if isinstance(loaded, dict) else None)
    if isinstance(settings, argparse.Namespace):
        settings = vars(settings)
    if not isinstance(weights, dict) or not isinstance(settings, dict):
        raise UserError(f"{path}: has no weights (model) or no settings (cfg, args): give one of fairseq-train")
    floats = {name: each.float() for name, each in weights.items() if isinstance(each, Tensor)}
    refuse_what_is_no_number({name: each for name, each in floats.items() if "_float_tensor" not in name}, path)
    return settings, TheirWeights(path, floats)


def _read_dictionary(path: Path) -> list[str]:
    """The pieces of a dict.txt by their numbers, the special ones first."""
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such dictionary: fairseq-preprocess wrote it as dict.LANG.txt") from None
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8, so it is not a dictionary of fairseq-preprocess") from None
    pieces = []
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix(" #fairseq:overwrite")
        piece, _, count = line.rpartition(" ")
        if not piece or not count.isdecimal():
            raise UserError(f"{path}: line {number:,} is not a piece with its count: {line[:60]!r}")
        pieces.append(piece)
    return [*_SPECIAL, *pieces]


def _config(
    given: Mapping[str, Any], weights: TheirWeights, path: Path, sizes: list[int], joint: bool, tables: list[Tensor]
) -> TransformerConfig:
    for name, what in _UNSUPPORTED.items():
        if given.get(name):
            raise UserError(f"{path}: {name} is {given[name]}: {what} are not supported")
    given = {name: value for name, value in given.items() if value is not None}
    for _, name, default in _SIZES:
        other = name.replace("encoder", "decoder")
        if given.get(name, default) != given.get(other, default):
            raise UserError(f"{path}: {name} and {other} differ, which is not supported")
    norm_first = bool(given.get("encoder_normalize_before"))
    if norm_first != bool(given.get("decoder_normalize_before")):
        raise UserError(f"{path}: encoder_normalize_before and decoder_normalize_before differ: not supported")
    shared = "none"
    if torch.equal(tables[1], _output(weights)):
        shared = "all" if joint and torch.equal(*tables) else "decoder"
    return configuration(
        TransformerConfig,
        given,
        path,
        _FIELDS,
        vocab_size=sizes[1],
        source_vocab_size=None if shared == "all" else sizes[0],
        encoder_layers=_layers(weights, "encoder"),
        decoder_layers=_layers(weights, "decoder"),
        norm_first=norm_first,
        final_norm=norm_first,
        activation=our_activation(given, path, "activation_fn", "relu", _ACTIVATIONS),
        positional_encoding="tensor2tensor",
        first_position=_PAD + 1,
        share_embeddings=shared,
    )


def _layers(weights: Mapping[str, Tensor], side: str) -> int:
    return len({name.split(".")[2] for name in weights if name.startswith(f"{side}.layers.")})


def _output(weights: TheirWeights) -> Tensor:
    """The output's table: of its own, or that of the target embedding."""
    return weights.first("decoder.output_projection.weight", "decoder.embed_out", "decoder.embed_tokens.weight")
