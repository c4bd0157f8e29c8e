"""fairseq's Transformer for translation, from a checkpoint of fairseq-train and the dictionaries of fairseq-preprocess.

https://github.com/facebookresearch/fairseq
Layers have BART's names. Positions count from padding's number + 1, which is 2: sinusoids are tensor2tensor's, and a
learned table has rows before it that no token is at. A target input begins with the end of a sentence. What cut the
text is given besides: a SentencePiece model, or the codes of fastBPE or subword-nmt, which cut Moses' tokens.

A line of dict.LANG.txt is a piece and how often it was counted. Pieces are SentencePiece's, or those of fastBPE and
subword-nmt, which end in @@ where another follows in the word.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.config.model import TransformerConfig
from fasttfm.convert.bart import from_bart
from fasttfm.convert.config_json import Field, configuration, our_activation
from fasttfm.convert.exchange import NO_TEXT, Arrangement, Model, learned_positions, numbered_tokenizer, with_tables
from fasttfm.convert.fairseq_checkpoint import load
from fasttfm.convert.names import TheirWeights
from fasttfm.data.moses_tokenizer import JOINED, MosesTokenizer, MosesVocabulary
from fasttfm.data.tokenizer import Tokenizer, Vocabulary
from fasttfm.errors import UserError
from fasttfm.system.files import read_content
from fasttfm.system.parsing import field

_UNSUPPORTED = {
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
_OF_MODEL = re.compile(
    r"(en|de)coder_|embed|attn|attention|norm(_|alize|$)|activation_|position|softmax|^scale_|_bos$|^rotary|^moe"
)
"""Settings whose names say something of the model. Training has some 200 others."""
_READ = re.compile(
    r"(en|de)coder_(layers|layerdrop|layers_to_keep|embed_path|learned_pos|normalize_before)|decoder_(in|out)put_dim"
    r"|activation_fn|max_(source|target)_positions|share_(all_embeddings|decoder_input_output_embed)"
    r"|adaptive_softmax_\w+|\w+_activations|pipeline_\w+"
)
"""Settings that are read, that weights show, or that only training uses."""
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
_COPIES = r"encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"
"""Of fairseq 0.12's encoder layers, for its fast path: filled when a checkpoint is loaded, and never trained."""
_SIDES = ("source", "target")
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_tanh", "swish": "silu"}


def read(
    checkpoint: Path,
    dictionaries: Sequence[Path],
    models: Sequence[Path] = (),
    codes: Sequence[Path] = (),
    source_language: str | None = None,
    target_language: str | None = None,
) -> Model:
    """The model of a checkpoint, which is loaded without running any code in it.

    dictionaries: dict.SRC.txt and dict.TGT.txt, or one for both; models: the SentencePiece models likewise, or codes:
    the files of fastBPE or subword-nmt. source_language, target_language: of Moses' tokens; None: the checkpoint's.
    Raises UserError for a file that is missing, cut off or of another architecture.
    """
    cutters = models or codes
    if (models and codes) or not 1 <= len(dictionaries) <= 2 or not 1 <= len(cutters) <= 2:
        raise UserError(
            "--dict, and either --spm or --codes: give one file for both sides, or the source's and then the target's"
        )
    settings, weights = load(checkpoint)
    sides = [Dictionary.read(path) for path in (dictionaries[0], dictionaries[-1])]
    joint = sides[0].pieces == sides[1].pieces and len(cutters) == 1
    tables = [weights[f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder")]
    for table, each in zip(tables, sides):
        if len(table) != len(each.pieces):
            raise UserError(
                f"{each.path}: has {len(each.pieces):,} pieces with the special ones, the weights {len(table):,}"
            )
    arrangements = [each.arrangement for each in sides]
    config = _config(settings, weights, checkpoint, list(map(len, arrangements)), joint, tables)
    layers = from_bart(weights, config, prefix="")
    told = _unknown(settings)
    if config.positions is not None:
        learned, lines = learned_positions(_learned(weights))
        layers |= learned
        told += lines
    config, result = with_tables(config, layers, arrangements, tables, _output(weights), path=checkpoint)
    weights.refuse_rest(r"(encoder|decoder)\.version", _COPIES)
    if any(re.fullmatch(_COPIES, name) for name in weights):
        told.append(
            "left out the second copy of the encoder's matrices, which fairseq 0.12 makes when it loads a model"
        )
    languages = [source_language, target_language]
    if codes:
        languages = [_language(settings, *each) for each in zip(languages, _SIDES)]
    files = (cutters[0], cutters[-1])
    tokenizers = [each.tokenizer(file, language) for each, file, language in zip(sides, files, languages)]
    prepared = [str(each.vocabulary) for each in tokenizers] if codes else []
    joint = joint and languages[0] == languages[1]
    return Model(
        config,
        result,
        (tokenizers[1 if joint else 0], tokenizers[1]),
        DecodingConfig(
            beam=5, length_penalty="power", alpha=1.0, early_stopping=True, max_len_a=0.0, max_len_b=200, allow_unk=True
        ),
        notes=(
            *told,
            *(f"{side} text becomes {what}, as its dictionary shows" for side, what in zip(_SIDES, prepared)),
            "searches as fairseq-generate does unless it is told otherwise: beam 5, lenpen 1, at most 200 tokens",
        ),
    )


def _unknown(settings: Mapping[str, Any]) -> list[str]:
    """Lines for the user on settings of the model that nobody reads."""
    known = {name for each in _FIELDS for name in (each.theirs, each.theirs.replace("encoder", "decoder"))}
    names = sorted(
        f"{name} {value}"
        for name, value in settings.items()
        if value and _OF_MODEL.search(name) and not _READ.fullmatch(name) and name not in known
    )
    return [f"nobody here knows the settings {', '.join(names)}: they were left out"] if names else []


def _language(settings: Mapping[str, Any], given: str | None, side: str) -> str:
    """The language of Moses' tokens."""
    language = given or settings.get(f"{side}_lang")
    if not isinstance(language, str) or not language:
        raise UserError(
            f"--{side}-language: the checkpoint does not say it, and Moses' rules need it: give one such as en"
        )
    return language


def _config(
    given: Mapping[str, Any], weights: TheirWeights, path: Path, sizes: list[int], joint: bool, tables: list[Tensor]
) -> TransformerConfig:
    for name, what in _UNSUPPORTED.items():
        if given.get(name):
            raise UserError(f"{path}: {name} is {given[name]}: {what} are not supported")
    given = {name: value for name, value in given.items() if value is not None}
    if not given.get("activation_dropout") and "relu_dropout" in given:
        given["activation_dropout"] = given["relu_dropout"]  # its name until 2019
    flags = [("encoder_normalize_before", False), ("encoder_learned_pos", False)]
    for name, default in [*((each.theirs, each.default) for each in _SIZES), *flags]:
        other = name.replace("encoder", "decoder")
        if given.get(name, default) != given.get(other, default):
            raise UserError(f"{path}: {name} and {other} differ, which is not supported")
    norm_first, learned = (bool(given.get(name)) for name, _ in flags)
    places = {"positional_encoding": "tensor2tensor", "first_position": PAD + 1}
    if learned:
        lengths = [len(table) for table in _learned(weights)]
        for side, length in zip(_SIDES, lengths):
            if given.get(f"max_{side}_positions", length) != length:
                raise UserError(
                    f"{path}: max_{side}_positions is {given[f'max_{side}_positions']}, its weights have {length}"
                )
        places = {"positional_encoding": "learned", "max_length": min(lengths)}
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
        **{f"{side}_layers": _layers(given, weights, side, path) for side in ("encoder", "decoder")},
        norm_first=norm_first,
        final_norm=norm_first,
        activation=our_activation(given, path, "activation_fn", "relu", _ACTIVATIONS),
        share_embeddings=shared,
        **places,
    )


def _learned(weights: TheirWeights) -> list[Tensor]:
    """The learned positions (L, d) of both sides, from the first token's on."""
    return [weights[f"{side}.embed_positions.weight"][PAD + 1 :] for side in ("encoder", "decoder")]


def _layers(given: Mapping[str, Any], weights: Mapping[str, Tensor], side: str, path: Path) -> int:
    """The layers of a side: what the settings say, or else what the weights have."""
    found = len({name.split(".")[2] for name in weights if name.startswith(f"{side}.layers.")})
    return field(given, f"{side}_layers", int, str(path), found)


def _output(weights: TheirWeights) -> Tensor:
    """The output's table: of its own, or that of the target embedding."""
    return weights.first("decoder.output_projection.weight", "decoder.embed_out", "decoder.embed_tokens.weight")


START, PAD, EOS, UNK = range(4)
_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
_COVERED = 0.97
"""Share of a dictionary's tokens that are pieces of its SentencePiece model. Of three German corpora in 8,000 pieces
their own models have 99.8 %, the other algorithm's on the same corpus at most 95.5 %, another corpus's at most 87 %;
codes of 4,000 merges 100 % of their own and at most 82 % of another."""
_JOINED = 0.02


class Dictionary:
    """The dictionary of a side."""

    def __init__(self, path: Path, counts: list[tuple[str, int]]) -> None:
        self.path, self.counts = path, counts
        self.pieces = [*_SPECIAL, *(piece for piece, _ in counts)]
        """By their numbers."""
        self.arrangement = Arrangement(len(self.pieces), pad=PAD, unk=UNK, start=EOS, eos=EOS)

    @classmethod
    def read(cls, path: Path) -> "Dictionary":
        """Raises UserError for a file that is missing or damaged."""
        content = read_content(path, "no such dictionary: fairseq-preprocess wrote it as dict.LANG.txt")
        try:
            lines = content.decode().rstrip("\n").split("\n")
        except UnicodeDecodeError:
            raise UserError(f"{path}: is not UTF-8, so it is not a dictionary of fairseq-preprocess") from None
        pieces = []
        for number, line in enumerate(lines, start=1):
            line = line.removesuffix(" #fairseq:overwrite")
            piece, _, count = line.rpartition(" ")
            if not piece or not count.isdecimal():
                raise UserError(f"{path}: line {number:,} is not a piece with its count: {line[:60]!r}")
            pieces.append((piece, int(count)))
        return cls(path, pieces)

    def tokenizer(self, file: Path, language: str | None) -> Tokenizer:
        """Return the tokenizer that cuts text into the pieces; UserError where they are those of another one.

        file: a SentencePiece model, or codes, which take the language of Moses' rules.
        """
        self._refuse_other_joins(language is not None)
        pieces = self.arrangement.pieces(self.pieces)
        if language is None:
            vocabulary = Vocabulary(pieces=pieces, prefix=[], silent=["<s>"])
            tokenizer = numbered_tokenizer(file, vocabulary)
        else:
            vocabulary = MosesVocabulary.inferred(language, pieces, prefix=[], silent=["<s>"])
            tokenizer = numbered_tokenizer(file, vocabulary, MosesTokenizer)
        covered = self._share(tokenizer.cuts_into)
        if covered < _COVERED:
            raise UserError(
                f"{file}: has the pieces of {covered:.1%} of the tokens in {self.path}, {_COVERED:.0%} are needed: "
                "it is of another corpus"
            )
        return tokenizer

    def _refuse_other_joins(self, has_codes: bool) -> None:
        """Raise UserError where codes are given for pieces of SentencePiece, or the other way round."""
        joined = self._share(lambda piece: piece.endswith(JOINED))
        told = f"{self.path}: {joined:.0%} of its tokens end in {JOINED}"
        if joined > _JOINED and not has_codes:
            raise UserError(f"{told}: it is of subword-nmt or fastBPE: give their --codes in place of --spm")
        if joined <= _JOINED and has_codes:
            raise UserError(f"{told}: it is not of subword-nmt or fastBPE: give --spm in place of --codes")

    def _share(self, holds: Callable[[str], bool]) -> float:
        """The share of the tokens for which something holds."""
        text = [(piece, count) for piece, count in self.counts if not NO_TEXT.fullmatch(piece)]
        return sum(count for piece, count in text if holds(piece)) / max(1, sum(count for _, count in text))
