"""Import of fairseq translation models: a checkpoint of fairseq-train and the dictionaries of fairseq-preprocess.

https://github.com/facebookresearch/fairseq
Layers have BART's names. Positions start at the padding id + 1 = 2: sinusoids are tensor2tensor's, and the first rows
of a learned table are unused. Target inputs begin with the end token. The segmentation comes from extra files: a
SentencePiece model, or codes of fastBPE or subword-nmt, applied to Moses tokens.

A line of dict.LANG.txt is a piece and its count. Pieces are SentencePiece's, or those of fastBPE and subword-nmt, which
end in @@ inside a word.
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
"""Settings of unsupported architectures, and their meaning."""
_OF_MODEL = re.compile(
    r"(en|de)coder_|embed|attn|attention|norm(_|alize|$)|activation_|position|softmax|^scale_|_bos$|^rotary|^moe"
)
"""Names of settings that may describe the model; training has some 200 others."""
_READ = re.compile(
    r"(en|de)coder_(layers|layerdrop|layers_to_keep|embed_path|learned_pos|normalize_before)|decoder_(in|out)put_dim"
    r"|activation_fn|max_(source|target)_positions|share_(all_embeddings|decoder_input_output_embed)"
    r"|adaptive_softmax_\w+|\w+_activations|pipeline_\w+"
)
"""Settings that are read, implied by the weights, or used only in training."""
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
"""With fairseq's defaults (base_architecture)."""
_COPIES = r"encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"
"""Copies that fairseq 0.12's encoder fast path makes when a checkpoint is loaded; never trained."""
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
    """Read a checkpoint without running code from it.

    dictionaries: dict.SRC.txt and dict.TGT.txt, or one for both; models: SentencePiece models, or codes: files of
    fastBPE or subword-nmt, also one or two. source_language, target_language: for Moses tokenization; None: the
    checkpoint's. Raises UserError for a file that is missing, truncated or of another architecture.
    """
    segmenters = models or codes
    if (models and codes) or not 1 <= len(dictionaries) <= 2 or not 1 <= len(segmenters) <= 2:
        raise UserError(
            "--dict, and either --spm or --codes: give one file for both sides, or the source's and then the target's"
        )
    settings, weights = load(checkpoint)
    sides = [Dictionary(path) for path in (dictionaries[0], dictionaries[-1])]
    joint = sides[0].pieces == sides[1].pieces and len(segmenters) == 1
    tables = [weights[f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder")]
    for table, each in zip(tables, sides):
        if len(table) != len(each.pieces):
            raise UserError(
                f"{each.path}: has {len(each.pieces):,} pieces with the special ones, the weights {len(table):,}"
            )
    arrangements = [each.arrangement for each in sides]
    config = _config(settings, weights, checkpoint, list(map(len, arrangements)), joint, tables)
    layers = from_bart(weights, config, prefix="")
    notes = _unknown(settings)
    if config.positions is not None:
        learned, lines = learned_positions(_learned(weights))
        layers |= learned
        notes += lines
    config, result = with_tables(config, layers, arrangements, tables, _output(weights), path=checkpoint)
    weights.refuse_rest(r"(encoder|decoder)\.version", _COPIES)
    if any(re.fullmatch(_COPIES, name) for name in weights):
        notes.append(
            "left out the second copy of the encoder's matrices, which fairseq 0.12 makes when it loads a model"
        )
    languages = [source_language, target_language]
    if codes:
        languages = [_language(settings, *each) for each in zip(languages, _SIDES)]
    files = (segmenters[0], segmenters[-1])
    tokenizers = [each.tokenizer(file, language) for each, file, language in zip(sides, files, languages)]
    if codes:
        notes += [f"{side} text becomes {each.vocabulary}, as its dictionary shows"
                  for side, each in zip(_SIDES, tokenizers)]  # fmt: skip
    joint = joint and languages[0] == languages[1]
    return Model(
        config,
        result,
        (tokenizers[1 if joint else 0], tokenizers[1]),
        DecodingConfig(
            beam=5, length_penalty="power", alpha=1.0, early_stopping=True, max_len_a=0.0, max_len_b=200, allow_unk=True
        ),
        notes=(*notes, "searches with the defaults of fairseq-generate: beam 5, lenpen 1, at most 200 tokens"),
    )


def _unknown(settings: Mapping[str, Any]) -> list[str]:
    """Return notes on model settings that are not read."""
    known = {name for each in _FIELDS for name in (each.theirs, each.theirs.replace("encoder", "decoder"))}
    names = sorted(
        f"{name} {value}"
        for name, value in settings.items()
        if value and _OF_MODEL.search(name) and not _READ.fullmatch(name) and name not in known
    )
    return [f"the settings {', '.join(names)} are unknown: they were left out"] if names else []


def _language(settings: Mapping[str, Any], language: str | None, side: str) -> str:
    """Return the language for Moses tokenization: the given one, or the checkpoint's."""
    language = language or settings.get(f"{side}_lang")
    if not isinstance(language, str) or not language:
        raise UserError(f"--{side}-language: Moses' rules need it and the checkpoint lacks it: give one such as en")
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
    flags = {"encoder_normalize_before": False, "encoder_learned_pos": False}
    for name, default in [*((each.theirs, each.default) for each in _SIZES), *flags.items()]:
        other = name.replace("encoder", "decoder")
        if given.get(name, default) != given.get(other, default):
            raise UserError(f"{path}: {name} and {other} differ, which is not supported")
    norm_first, learned = (bool(given.get(name)) for name in flags)
    positions = {"positional_encoding": "tensor2tensor", "first_position": PAD + 1}
    if learned:
        lengths = [len(table) for table in _learned(weights)]
        for side, length in zip(_SIDES, lengths):
            if given.get(f"max_{side}_positions", length) != length:
                raise UserError(
                    f"{path}: max_{side}_positions is {given[f'max_{side}_positions']}, its weights have {length}"
                )
        positions = {"positional_encoding": "learned", "max_length": min(lengths)}
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
        **positions,
    )


def _learned(weights: TheirWeights) -> list[Tensor]:
    """Return the learned positions (L, d) of both sides, without the unused first rows."""
    return [weights[f"{side}.embed_positions.weight"][PAD + 1 :] for side in ("encoder", "decoder")]


def _layers(given: Mapping[str, Any], weights: Mapping[str, Tensor], side: str, path: Path) -> int:
    """Return the number of layers of a side by the settings, or by the weights if the settings lack it."""
    count = len({name.split(".")[2] for name in weights if name.startswith(f"{side}.layers.")})
    return field(given, f"{side}_layers", int, str(path), count)


def _output(weights: TheirWeights) -> Tensor:
    """Return the output projection: its own, or the target embedding."""
    return weights.first("decoder.output_projection.weight", "decoder.embed_out", "decoder.embed_tokens.weight")


START, PAD, EOS, UNK = range(4)
_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
_MIN_COVERED = 0.97
"""Minimum share of a dictionary's tokens that the segmentation can produce. On three German corpora with 8,000 pieces
the right SentencePiece model covers 99.8 %, one of the other algorithm at most 95.5 %, one of another corpus at most
87 %; codes of 4,000 merges cover 100 % of their own corpus and at most 82 % of another."""
_MIN_JOINED = 0.02
"""Share of tokens ending in @@ above which a dictionary is that of BPE codes."""


class Dictionary:
    """A dict.LANG.txt: pieces and counts of one side."""

    def __init__(self, path: Path) -> None:
        """Read the file; UserError if it is missing or damaged."""
        content = read_content(path, "no such dictionary: fairseq-preprocess wrote it as dict.LANG.txt")
        try:
            lines = content.decode().rstrip("\n").split("\n")
        except UnicodeDecodeError:
            raise UserError(f"{path}: is not UTF-8, so it is not a dictionary of fairseq-preprocess") from None
        self.path = path
        self.counts: list[tuple[str, int]] = []
        for number, line in enumerate(lines, start=1):
            line = line.removesuffix(" #fairseq:overwrite")
            piece, _, count = line.rpartition(" ")
            if not piece or not count.isdecimal():
                raise UserError(f"{path}: line {number:,} is not a piece with its count: {line[:60]!r}")
            self.counts.append((piece, int(count)))
        self.pieces = [*_SPECIAL, *(piece for piece, _ in self.counts)]
        """By id."""
        self.arrangement = Arrangement(len(self.pieces), pad=PAD, unk=UNK, start=EOS, eos=EOS)

    def tokenizer(self, file: Path, language: str | None) -> Tokenizer:
        """Load the tokenizer for these pieces; UserError if the file belongs to other pieces.

        file: a SentencePiece model, or with a language (of Moses' rules) BPE codes.
        """
        joined = self._share(lambda piece: piece.endswith(JOINED))
        if (joined > _MIN_JOINED) != (language is not None):
            what = "of subword-nmt or fastBPE: give their --codes instead of --spm"
            if language is not None:
                what = "not of subword-nmt or fastBPE: give --spm instead of --codes"
            raise UserError(f"{self.path}: {joined:.0%} of its tokens end in {JOINED}: it is {what}")
        pieces = self.arrangement.pieces(self.pieces)
        if language is None:
            vocabulary = Vocabulary(pieces=pieces, prefix=[], silent=["<s>"])
            tokenizer = numbered_tokenizer(file, vocabulary)
        else:
            vocabulary = MosesVocabulary.inferred(language, pieces, prefix=[], silent=["<s>"])
            tokenizer = numbered_tokenizer(file, vocabulary, MosesTokenizer)
        covered = self._share(tokenizer.cuts_into)
        if covered < _MIN_COVERED:
            raise UserError(
                f"{file}: has the pieces of {covered:.1%} of the tokens in {self.path}, {_MIN_COVERED:.0%} are needed: "
                "it belongs to another corpus"
            )
        return tokenizer

    def _share(self, condition: Callable[[str], bool]) -> float:
        """Return the share of the tokens whose piece meets the condition."""
        text = [(piece, count) for piece, count in self.counts if not NO_TEXT.fullmatch(piece)]
        return sum(count for piece, count in text if condition(piece)) / max(1, sum(count for _, count in text))
