"""A model with its tokenizers between our directories and other systems' formats, and what these have in common."""

import dataclasses
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.config import build
from fasttfm.config.decoding import DecodingConfig
from fasttfm.config.model import TransformerConfig
from fasttfm.convert.tokenizer_json import write_tokenizer
from fasttfm.data.tokenizer import BOS, PAD, UNK, Tokenizer, Vocabulary
from fasttfm.data.tokenizer_files import load_tokenizers
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.models.pretrained import SPECIAL_TOKENS, read_pretrained, read_values, write_model, write_pretrained
from fasttfm.reference import positional_encoding
from fasttfm.store.weights import model_weights, refuse_others
from fasttfm.system.files import read_content, write_file
from fasttfm.system.folders import replacing

_NUMBERED = 0.5
"""Of a SentencePiece model's pieces; a vocabulary may leave out what its training text never had."""
NO_TEXT = re.compile(r"madeupword\d+|<\S+>|__\S+__|\[\S+\]|>>\S+<<")
"""Entries that other tools and their users add to a vocabulary besides pieces."""
_KNOWN = 0.85
"""Of a vocabulary's pieces. Of three German-English corpora in 4,000 and 8,000 pieces a side their own SentencePiece
models have at least 97 %, with one model of another corpus at most 75 %."""
NEVER = -1e4
"""A logit's bias that makes its token impossible, and that float16 can hold."""


@dataclass(frozen=True)
class Model:
    """All that translating takes."""

    config: TransformerConfig
    weights: Mapping[str, Tensor]
    """Under the names of models.Transformer, a shared table once."""
    tokenizers: tuple[Tokenizer, Tokenizer]
    """The source's and the target's, one object where the vocabulary is joint."""
    decoding: DecodingConfig
    folder: Path | None = None
    """Folder of its training records."""
    notes: tuple[str, ...] = ()
    """Assumptions and omissions of the import from another tool's files."""

    @property
    def source_tokenizer(self) -> Tokenizer:
        return self.tokenizers[0]

    @property
    def target_tokenizer(self) -> Tokenizer:
        return self.tokenizers[1]


def load(model_dir: Path, checkpoint: str = "best") -> Model:
    """The model of a directory of `fasttfm train`, `fasttfm import` or save_pretrained().

    Raises UserError naming what is missing, damaged or of another model.
    """
    config, weights, saved = read_pretrained(model_dir, checkpoint)
    refuse_others(lambda: Transformer(config), weights, saved)
    tokenizers = load_tokenizers(model_dir)
    for tokenizer, size in zip(tokenizers, (config.source_vocab_size or config.vocab_size, config.vocab_size)):
        if len(tokenizer) != size:
            raise UserError(
                f"{model_dir}: its vocabulary has {len(tokenizer):,} pieces but its configuration says "
                f"{size:,}: copy both from the same training run"
            )
    return Model(config, weights, tokenizers, build(read_values(model_dir)).decoding, folder=model_dir)


def store(model: Model, folder: Path, origin: Sequence[str] = ()) -> None:
    """Write a directory that `fasttfm translate` and the others take; UserError where nothing can be written.

    origin: lines of the model card on where the model comes from.
    """
    write_pretrained(
        folder, model.config, model.weights, decoding=model.decoding, tokenizers=model.tokenizers, origin=origin
    )


def export(model: Model, folder: Path) -> list[str]:
    """Write what Transformer.from_pretrained() and transformers' AutoTokenizer load into a new directory.

    Returns lines for the user.
    """
    write_model(
        folder, model.config, model.weights, model.decoding, tokenizers=model.tokenizers, model_dir=model.folder
    )
    if model.source_tokenizer is not model.target_tokenizer:
        return ["no tokenizer.json was written, because it has one vocabulary and this model has two"]
    return write_tokenizer(model.source_tokenizer, folder, "end")


def add_notes(folder: Path, lines: Sequence[str]) -> None:
    """Write what an export left out, assumed or was compared with into the folder's model card, README.md."""
    path = folder / "README.md"
    card = path.read_text(encoding="utf-8") if path.exists() else "# Model exported by fasttfm\n"
    write_file(path, "\n".join([card, "## Export", "", *(f"- {line}" for line in lines), ""]).encode())


@contextmanager
def exporting(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Give a fresh folder, which takes the place of this one at the end, and lines for the user, its card's notes."""
    told: list[str] = []
    with replacing(folder, "exporting a model into it", "exported model") as fresh:
        yield fresh.path, told
        add_notes(fresh.path, told)


@contextmanager
def warnings_as_lines() -> Iterator[list[str]]:
    """Inside, a warning of what is left out or assumed becomes a line of the list, which is there in the end."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        yield lines
    lines += [str(each.message) for each in caught if each.category is RuntimeWarning]


class Arrangement:
    """The rows of another system's vocabulary in our order: padding, unknown, start, end, then the others in theirs."""

    def __init__(self, size: int, *, pad: int | None, unk: int, start: int | None, eos: int) -> None:
        """Numbers of their special tokens; None: it has none, or its embedding is zero, and a row of zeros is made."""
        special = [pad, unk, start, eos]
        if wrong := [row for row in special if row is not None and not 0 <= row < size]:
            raise UserError(
                f"a special token has the number {wrong[0]}, of {size:,} tokens: give the files of one model"
            )
        others = [row for row in range(size) if row not in special]
        self.their_size = size
        self.rows: list[int | None] = [*special, *others]
        self.impossible = [position for position, row in ((PAD, pad), (BOS, start)) if row is None]
        """Our tokens that theirs has not, and that must not take any probability."""
        if start is not None and start in (pad, unk, eos):
            self.impossible.append(BOS)

    def __len__(self) -> int:
        return len(self.rows)

    def apply(self, table: Tensor) -> Tensor:
        """The rows of a table (V, ...) in our order."""
        extended = torch.cat([table, torch.zeros_like(table[:1])])
        return extended[[len(table) if row is None else row for row in self.rows]]

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """The logits' bias (V,) in our order; None where none is needed."""
        if bias is None and not self.impossible:
            return None
        if bias is None:
            bias = torch.zeros(self.their_size, dtype=torch.float32, device="cpu")
        arranged = self.apply(bias.float())
        arranged[self.impossible] = NEVER
        return arranged

    def pieces(self, theirs: Sequence[str]) -> list[str]:
        """Their pieces in our order."""
        names = ["<pad>", "<unk>", "<s>", "</s>"]
        return [
            names[position] if row is None or position in self.impossible else theirs[row]
            for position, row in enumerate(self.rows)
        ]


def with_tables(
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    arrangements: Sequence[Arrangement],
    tables: Sequence[Tensor],
    output: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    path: Path,
) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """Configuration and weights with embeddings, output and the logits' bias in our order.

    arrangements, tables: of source and target, theirs; output: their table (V, d), read where none is shared; path:
    where they are from. Raises UserError for a table of another shape than the configuration and the vocabulary say.
    """
    source, target = arrangements
    for name, given, arrangement in (
        ("the source's embedding", tables[0], source),
        ("the target's embedding", tables[1], target),
        ("the output's table", output, target),
        ("the output's bias", bias, target),
    ):
        wanted = (arrangement.their_size, config.d_model)[: 1 if given is bias else 2]
        if given is not None and given.shape != wanted:
            raise UserError(f"{path}: {name} is {tuple(given.shape)}: {wanted} fits its vocabulary and width")
    result = {**weights, "target_embedding.weight": target.apply(tables[1])}
    if config.share_embeddings != "all":
        result["source_embedding.weight"] = source.apply(tables[0])
    if config.share_embeddings == "none" and output is not None:
        result["output.weight"] = target.apply(output)
    arranged = target.bias(bias)
    if arranged is not None:
        result["output.bias"] = arranged
    return dataclasses.replace(config, output_bias=arranged is not None), result


def shapes(config: TransformerConfig) -> dict[str, torch.Size]:
    """Shapes of a model's weights by our names, of which nothing is built."""
    with torch.device("meta"):
        return {name: each.shape for name, each in model_weights(Transformer(config)).items()}


def learned_positions(tables: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Weights of the positions of source and target (L, d), theirs without the rows before the first, as many for both;
    and lines for the user."""
    length = min(map(len, tables))
    names = ("source", "target")
    told = [
        f"left out the {side}'s positions behind the {length:,} that both sides have"
        for side, table in zip(names, tables)
        if len(table) > length
    ]
    weights = {f"{side}_positions.weight": table[:length].clone() for side, table in zip(names, tables)}
    return weights, [f"positions are learned: no text may have more than {length:,} tokens", *told]


def numbered_tokenizer(path: Path, vocabulary: Vocabulary, kind: type[Tokenizer] = Tokenizer) -> Tokenizer:
    """A SentencePiece model, or codes, whose pieces another file numbers; UserError where it is missing or damaged."""
    what = "SentencePiece model: give the directory" if kind is Tokenizer else "file of codes: give it"
    content = read_content(path, f"no such {what} as the other tool saved it")
    try:
        return kind(content, vocabulary)
    except ValueError as error:
        raise UserError(f"{path}: {error}: copy the file again") from None


def fitting_tokenizer(path: Path, vocabulary: Vocabulary) -> Tokenizer:
    """A numbered_tokenizer() whose SentencePiece model cuts text into pieces that have numbers; UserError for one of
    which most have none, such as the other side's."""
    tokenizer = numbered_tokenizer(path, vocabulary)
    share = tokenizer.numbered_share()
    if share < _NUMBERED:
        raise UserError(
            f"{path}: {share:.0%} of its pieces are in the vocabulary, {_NUMBERED:.0%} are needed: it is of another "
            "model, or of the other side"
        )
    return tokenizer


def refuse_other_corpus(folder: Path, tokenizers: Sequence[Tokenizer]) -> None:
    """Raise UserError where a side's vocabulary has many pieces that no side's SentencePiece model cuts text into."""
    for vocabulary in (each.vocabulary for each in tokenizers):
        assert vocabulary is not None
        silent = {*vocabulary.prefix, *vocabulary.silent}
        text = [each for each in vocabulary.pieces[UNK + 1 :] if each not in silent and not NO_TEXT.fullmatch(each)]
        share = sum(any(each.cuts_into(piece) for each in tokenizers) for piece in text) / max(1, len(text))
        if share < _KNOWN:
            raise UserError(
                f"{folder}: its SentencePiece models have {share:.0%} of the vocabulary's pieces, {_KNOWN:.0%} are "
                "needed: one is of another corpus"
            )


def positions(config: TransformerConfig, weights: Mapping[str, Tensor], side: str) -> Tensor:
    """The learned positions of a model's encoder or decoder, or sinusoids (at least 1,024, d) for systems that make
    none themselves."""
    if config.positions is not None:
        return weights[f"{'source' if side == 'encoder' else 'target'}_positions.weight"].float()
    length = max(config.max_length, 1024)
    return positional_encoding(
        length, config.d_model, config.positional_encoding, first=config.first_position, device="cpu"
    )


def suppressed(decoding: DecodingConfig) -> list[int]:
    """Our special tokens that a search never writes."""
    return [PAD, BOS] if decoding.allow_unk else [PAD, UNK, BOS]


def generation_settings(decoding: DecodingConfig) -> dict[str, Any]:
    """The fields of Hugging Face's generation_config.json, whose search divides scores by length^length_penalty."""
    penalties = {"power": decoding.alpha, "avg": 1.0, "wu": 1.0 if decoding.alpha else 0.0, "none": 0.0}
    return {
        **SPECIAL_TOKENS,
        "num_beams": decoding.beam,
        "length_penalty": penalties[decoding.length_penalty],
        "early_stopping": decoding.early_stopping or "never",
        "suppress_tokens": suppressed(decoding),
    }


def piece_names(tokenizer: Tokenizer, special: Mapping[int, str]) -> list[str]:
    """A tokenizer's pieces for a format that tells them apart by name, special tokens under the names given.

    A piece that no text is cut into, such as the <s> of a model that begins with another token, has its number behind
    its name where an earlier one has that name. UserError where text is cut into it.
    """
    names = tokenizer.pieces(range(len(tokenizer)))
    for position, name in special.items():
        names[position] = name
    numbers: dict[str, int] = {}
    for position, name in enumerate(names):
        if name in numbers:
            if tokenizer.cuts_into(name):
                raise UserError(
                    f"piece {position} of the vocabulary is {name!r}, and so is piece {numbers[name]} in this format, "
                    "which tells pieces by their names: export this model as onnx or pretrained"
                )
            names[position] = f"{name}#{position}"
        numbers[names[position]] = position
    return names


def language_token(codes: Mapping[str, str], side: str, language: str | None) -> str:
    """The token of a side's language, by codes; UserError for a language that is unknown or not given."""
    if language is None or language not in codes:
        told = "none was given" if language is None else f"{language} is unknown"
        raise UserError(f"--{side}-language: {told}: give one of {', '.join(sorted(codes)[:8])}, ...")
    return codes[language]


def number(pieces: Sequence[str], piece: str, path: Path) -> int:
    """The number of a special token; UserError where there is none."""
    try:
        return list(pieces).index(piece)
    except ValueError:
        raise UserError(f"{path}: has no token {piece}: give the files of one model") from None
