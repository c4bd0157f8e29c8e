"""fairseq's Transformer for translation, from a checkpoint of fairseq-train and the dictionaries of fairseq-preprocess.

https://github.com/facebookresearch/fairseq
Layers have BART's names. Sinusoids are tensor2tensor's and count from padding's number + 1, which is 2. A target input
begins with the end of a sentence. Text must have been cut by SentencePiece: its model is given besides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.config.model import TransformerConfig
from fasttfm.data.tokenizer import Tokenizer, Vocabulary
from fasttfm.errors import UserError
from fasttfm.files import unreadable
from fasttfm.interop.bart import from_bart
from fasttfm.interop.config_json import Field, configuration, our_activation
from fasttfm.interop.exchange import Arrangement, Model, numbered_tokenizer, with_tables
from fasttfm.interop.fairseq_checkpoint import load
from fasttfm.interop.names import TheirWeights

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
    "adaptive_input": "adaptive inputs",
    "char_inputs": "inputs of characters",
    "encoder_langtok": "tokens of languages",
    "decoder_langtok": "tokens of languages",
    "prepend_bos": "sources that begin with <s>",
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
_NO_TEXT = re.compile(r"madeupword\d+|<\S+>|__\S+__|\[\S+\]")
"""What fairseq and its users add to a dictionary besides pieces."""
_COVERED = 0.97
"""Share of a dictionary's tokens that are pieces of its SentencePiece model. Of three German corpora in 8,000 pieces
their own models have 99.8 %, the other algorithm's on the same corpus at most 95.5 %, another corpus's at most 87 %."""
_JOINED = 0.02
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_tanh", "swish": "silu"}


def read(checkpoint: Path, dictionaries: Sequence[Path], models: Sequence[Path]) -> Model:
    """The model of a checkpoint, which is loaded without running any code in it.

    dictionaries: dict.SRC.txt and dict.TGT.txt, or one for both; models: the SentencePiece models likewise. Raises
    UserError for a file that is missing, cut off or of another architecture.
    """
    if not 1 <= len(dictionaries) <= 2 or not 1 <= len(models) <= 2:
        raise UserError("--dict and --spm: give one file for both sides, or the source's and then the target's")
    settings, weights = load(checkpoint)
    counted = [_read_dictionary(path) for path in (dictionaries[0], dictionaries[-1])]
    pieces = [[*_SPECIAL, *(piece for piece, _ in each)] for each in counted]
    joint = pieces[0] == pieces[1] and len(models) == 1
    arrangements = [Arrangement(len(each), pad=_PAD, unk=_UNK, start=_EOS, eos=_EOS) for each in pieces]
    tables = [weights[f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder")]
    for table, each, path in zip(tables, pieces, (dictionaries[0], dictionaries[-1])):
        if len(table) != len(each):
            raise UserError(f"{path}: has {len(each):,} pieces with the special ones, the weights {len(table):,}")
    config = _config(settings, weights, checkpoint, list(map(len, arrangements)), joint, tables)
    layers = from_bart(weights, config, prefix="")
    config, result = with_tables(config, layers, arrangements, tables, _output(weights))
    for side in ("encoder", "decoder"):
        if f"{side}.embed_positions.weight" in weights:
            raise UserError(f"{checkpoint}: has {side}.embed_positions.weight: learned positions are not supported")
    weights.refuse_rest(
        r"decoder\.output_projection\.weight", r"(encoder|decoder)\.(version|embed_positions\._float_tensor)"
    )
    sides = [
        numbered_tokenizer(path, Vocabulary(pieces=arrangement.pieces(each), prefix=[], silent=["<s>"]))
        for path, arrangement, each in zip((models[0], models[-1]), arrangements, pieces)
    ]
    for tokenizer, counts, path, model in zip(
        sides, counted, (dictionaries[0], dictionaries[-1]), (models[0], models[-1])
    ):
        _refuse_another_tokenizer(tokenizer, counts, path, model)
    return Model(
        config=config,
        weights=result,
        source_tokenizer=sides[0] if not joint else sides[1],
        target_tokenizer=sides[1],
        decoding=DecodingConfig(
            beam=5, length_penalty="power", alpha=1.0, max_len_a=0.0, max_len_b=200, allow_unk=True
        ),
        notes=("searches as fairseq-generate does unless it is told otherwise: beam 5, lenpen 1, at most 200 tokens",),
    )


def _refuse_another_tokenizer(tokenizer: Tokenizer, counts: Sequence[tuple[str, int]], path: Path, model: Path) -> None:
    """Raise UserError where a dictionary was not counted in the pieces of this SentencePiece model."""
    text = [(piece, count) for piece, count in counts if not _NO_TEXT.fullmatch(piece)]
    total = sum(count for _, count in text)
    joined = sum(count for piece, count in text if piece.endswith("@@"))
    if joined > _JOINED * total:
        raise UserError(
            f"{path}: {joined / total:.0%} of its tokens end in @@: it is of subword-nmt or fastBPE, whose codes are "
            "not supported: only text that SentencePiece cut is"
        )
    covered = sum(count for piece, count in text if tokenizer.cuts_into(piece))
    if covered < _COVERED * total:
        raise UserError(
            f"{model}: has the pieces of {covered / total:.1%} of the tokens in {path}, {_COVERED:.0%} are needed: "
            "it is the model of another corpus"
        )


def _read_dictionary(path: Path) -> list[tuple[str, int]]:
    """The pieces of a dict.txt by their numbers without the special ones, and how often each was counted."""
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
        pieces.append((piece, int(count)))
    return pieces


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
