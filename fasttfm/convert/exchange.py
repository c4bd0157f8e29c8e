"""Common parts of the import and export formats: a model with its tokenizers, vocabulary order, special tokens."""

import dataclasses
import re
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
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

_MIN_NUMBERED = 0.5
"""Minimum share of a SentencePiece model's pieces in the vocabulary, which may omit pieces unseen in training."""
NO_TEXT = re.compile(r"madeupword\d+|<\S+>|__\S+__|\[\S+\]|>>\S+<<")
"""Vocabulary entries other than pieces that other tools and their users add."""
_MIN_COVERED = 0.85
"""Minimum share of a vocabulary's pieces in the SentencePiece models. On three German-English corpora with 4,000 and
8,000 pieces a side, the right models cover at least 97 %, one model of another corpus at most 75 %."""
NEVER = -1e4
"""Logit bias that excludes a token; representable in float16."""
OF_GENERATION = frozenset(
    {"beam", "length_penalty", "alpha", "early_stopping", "min_len", "no_repeat_ngram", "allow_unk"}
)
"""Search settings that generation_settings() translates."""
_OF_BATCHES = {"alignment_layer", "batch_tokens", "batch_invariant", "buffer_size"}
"""Settings that do not change translations."""


@dataclass(frozen=True)
class Model:
    """Everything needed to translate."""

    config: TransformerConfig
    weights: Mapping[str, Tensor]
    """By the names of models.Transformer; a shared table occurs once."""
    tokenizers: tuple[Tokenizer, Tokenizer]
    """Source and target; the same object if the vocabulary is joint."""
    decoding: DecodingConfig
    folder: Path | None = None
    """Directory of its training records."""
    notes: tuple[str, ...] = ()
    """Assumptions and omissions of the import."""

    @property
    def source_tokenizer(self) -> Tokenizer:
        return self.tokenizers[0]

    @property
    def target_tokenizer(self) -> Tokenizer:
        return self.tokenizers[1]


def load(model_dir: Path, checkpoint: str = "best") -> Model:
    """Load a directory of `fasttfm train`, `fasttfm import` or save_pretrained().

    Raises UserError for files that are missing, damaged or of another model.
    """
    config, weights, saved = read_pretrained(model_dir, checkpoint)
    refuse_others(lambda: Transformer(config), weights, saved)
    sizes = config.source_vocab_size or config.vocab_size, config.vocab_size
    tokenizers = load_tokenizers(model_dir, sizes=sizes)
    return Model(config, weights, tokenizers, build(read_values(model_dir)).decoding, folder=model_dir)


def store(model: Model, folder: Path, origin: Sequence[str] = ()) -> None:
    """Write a model directory for `fasttfm translate` and other commands; UserError if it cannot be written.

    origin: lines for the model card on the model's origin.
    """
    write_pretrained(
        folder, model.config, model.weights, decoding=model.decoding, tokenizers=model.tokenizers, origin=origin
    )


def export(model: Model, folder: Path) -> list[str]:
    """Write a directory for Transformer.from_pretrained() and transformers' AutoTokenizer; returns notes."""
    write_model(
        folder, model.config, model.weights, model.decoding, tokenizers=model.tokenizers, model_dir=model.folder
    )
    if model.source_tokenizer is not model.target_tokenizer:
        return ["no tokenizer.json was written, because it holds one tokenizer and this model has two"]
    return write_tokenizer(model.source_tokenizer, folder, "end")


@contextmanager
def exporting(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a new directory that replaces `folder` on exit, and a list for notes, which go to its README.md."""
    notes: list[str] = []
    with replacing(folder, "exporting a model into it", "exported model") as fresh:
        yield fresh.path, notes
        path = fresh.path / "README.md"
        card = path.read_text(encoding="utf-8") if path.exists() else "# Model exported by fasttfm\n"
        write_file(path, "\n".join([card, "## Export", "", *(f"- {note}" for note in notes), ""]).encode())


@contextmanager
def warnings_as_lines() -> Iterator[list[str]]:
    """Capture RuntimeWarnings; the yielded list holds their messages on exit."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        yield lines
    lines += [str(each.message) for each in caught if each.category is RuntimeWarning]


class Arrangement:
    """Permutation from another system's vocabulary to ours: pad, unk, start, eos, then the rest in their order."""

    def __init__(self, size: int, *, pad: int | None, unk: int, start: int | None, eos: int) -> None:
        """Takes the ids of their special tokens; None adds a row of zeros for a token that has no embedding."""
        special = [pad, unk, start, eos]
        if wrong := [row for row in special if row is not None and not 0 <= row < size]:
            raise UserError(
                f"a special token has the number {wrong[0]}, of {size:,} tokens: give the files of one model"
            )
        others = [row for row in range(size) if row not in special]
        self.their_size = size
        self.rows: list[int | None] = [*special, *others]
        self.impossible = [position for position, row in ((PAD, pad), (BOS, start)) if row is None]
        """Special tokens of ours that theirs lacks; their probability must be zero."""
        if start is not None and start in (pad, unk, eos):
            self.impossible.append(BOS)

    def __len__(self) -> int:
        return len(self.rows)

    def apply(self, table: Tensor) -> Tensor:
        """Permute the rows of a table (V, ...) to our order."""
        extended = torch.cat([table, torch.zeros_like(table[:1])])
        return extended[[len(table) if row is None else row for row in self.rows]]

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """Permute the logits' bias (V,) to our order; None if none is needed."""
        if bias is None and not self.impossible:
            return None
        if bias is None:
            bias = torch.zeros(self.their_size, dtype=torch.float32, device="cpu")
        arranged = self.apply(bias.float())
        arranged[self.impossible] = NEVER
        return arranged

    def pieces(self, theirs: Sequence[str]) -> list[str]:
        """Permute their pieces to our order."""
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
    """Add the embeddings, output projection and logits' bias, permuted to our order, to the weights.

    arrangements, tables: source's and target's; output: projection (V, d), used if share_embeddings is "none"; path:
    their file. Returns configuration and weights. Raises UserError for a table of the wrong shape.
    """
    source, target = arrangements
    for name, table, arrangement in (
        ("the source's embedding", tables[0], source),
        ("the target's embedding", tables[1], target),
        ("the output's table", output, target),
        ("the output's bias", bias, target),
    ):
        shape = (arrangement.their_size, config.d_model)[: 1 if table is bias else 2]
        if table is not None and table.shape != shape:
            raise UserError(f"{path}: {name} is {tuple(table.shape)}: {shape} fits its vocabulary and width")
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
    """Return the shapes of a model's weights by our names, computed on the meta device."""
    with torch.device("meta"):
        return {name: each.shape for name, each in model_weights(Transformer(config)).items()}


def learned_positions(tables: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Cut source's and target's position tables (L, d) to one length; returns weights by our names, and notes."""
    length = min(map(len, tables))
    weights, notes = {}, [f"positions are learned: no text may have more than {length:,} tokens"]
    for side, table in zip(("source", "target"), tables):
        weights[f"{side}_positions.weight"] = table[:length].clone()
        if len(table) > length:
            notes.append(f"left out the {side}'s positions beyond the {length:,} that both sides have")
    return weights, notes


def numbered_tokenizer(path: Path, vocabulary: Vocabulary, kind: type[Tokenizer] = Tokenizer) -> Tokenizer:
    """Load a SentencePiece model or BPE codes with the ids of another tool's vocabulary; UserError if not readable."""
    what = "SentencePiece model: give the directory" if kind is Tokenizer else "file of codes: give it"
    content = read_content(path, f"no such {what} as the other tool saved it")
    try:
        return kind(content, vocabulary)
    except ValueError as error:
        raise UserError(f"{path}: {error}: copy the file again") from None


def fitting_tokenizer(path: Path, vocabulary: Vocabulary) -> Tokenizer:
    """A numbered_tokenizer() with a SentencePiece model; UserError if most of its pieces are not in the vocabulary."""
    tokenizer = numbered_tokenizer(path, vocabulary)
    share = tokenizer.numbered_share()
    if share < _MIN_NUMBERED:
        raise UserError(
            f"{path}: {share:.0%} of its pieces are in the vocabulary, {_MIN_NUMBERED:.0%} are needed: it belongs to "
            "another model, or to the other side"
        )
    return tokenizer


def refuse_other_corpus(folder: Path, tokenizers: Sequence[Tokenizer]) -> None:
    """Raise UserError if a vocabulary has many pieces that none of the SentencePiece models can produce."""
    for tokenizer in tokenizers:
        vocabulary = tokenizer.vocabulary
        assert vocabulary is not None
        silent = {*vocabulary.prefix, *vocabulary.silent}
        text = [each for each in vocabulary.pieces[UNK + 1 :] if each not in silent and not NO_TEXT.fullmatch(each)]
        share = sum(any(each.cuts_into(piece) for each in tokenizers) for piece in text) / max(1, len(text))
        if share < _MIN_COVERED:
            raise UserError(
                f"{folder}: its SentencePiece models have {share:.0%} of the vocabulary's pieces, {_MIN_COVERED:.0%} "
                "are needed: one of them belongs to another corpus"
            )


def positions(config: TransformerConfig, weights: Mapping[str, Tensor], side: str) -> Tensor:
    """Return the positions (L, d) of "encoder" or "decoder": the learned table, or at least 1,024 sinusoids."""
    if config.positions is not None:
        return weights[f"{'source' if side == 'encoder' else 'target'}_positions.weight"].float()
    length = max(config.max_length, 1024)
    return positional_encoding(
        length, config.d_model, config.positional_encoding, first=config.first_position, device="cpu"
    )


def suppressed(decoding: DecodingConfig) -> list[int]:
    """Return our special tokens that a search never produces."""
    return [PAD, BOS] if decoding.allow_unk else [PAD, UNK, BOS]


def left_out(decoding: DecodingConfig, recorded: Container[str]) -> list[str]:
    """Return a note on the search settings that differ from the defaults and are not recorded, if there are any."""
    names = [
        f"{each.name} {getattr(decoding, each.name)}"
        for each in fields(decoding)
        if each.name not in _OF_BATCHES and each.name not in recorded and getattr(decoding, each.name) != each.default
    ]
    return [f"left out its search settings {', '.join(names)}"] if names else []


def generation_settings(decoding: DecodingConfig) -> dict[str, Any]:
    """Return the fields of generation_config.json, those of OF_GENERATION.

    transformers divides scores by length^length_penalty.
    """
    penalties = {"power": decoding.alpha, "avg": 1.0, "wu": 1.0 if decoding.alpha else 0.0, "none": 0.0}
    return {
        **SPECIAL_TOKENS,
        "num_beams": decoding.beam,
        "length_penalty": penalties[decoding.length_penalty],
        "early_stopping": decoding.early_stopping or "never",
        "min_new_tokens": decoding.min_len,
        "no_repeat_ngram_size": decoding.no_repeat_ngram,
        "suppress_tokens": suppressed(decoding),
    }


def piece_names(tokenizer: Tokenizer, special: Mapping[int, str]) -> list[str]:
    """Return unique names of a tokenizer's pieces, for formats that identify pieces by name.

    special: names of the special tokens. A later piece with the same name gets its id appended if no text is cut into
    it, such as <s> in a model whose start token is another one; otherwise UserError is raised.
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
                    "which identifies pieces by name: export this model as onnx or pretrained"
                )
            names[position] = f"{name}#{position}"
        numbers[names[position]] = position
    return names


def language_token(codes: Mapping[str, str], side: str, language: str | None) -> str:
    """Return the token of a side's language from language -> token; UserError if it is missing or unknown."""
    if language is None or language not in codes:
        problem = "none was given" if language is None else f"{language} is unknown"
        raise UserError(f"--{side}-language: {problem}: give one of {', '.join(sorted(codes)[:8])}, ...")
    return codes[language]


def special_id(pieces: Sequence[str], piece: str, path: Path) -> int:
    """Return the id of a special token; UserError, which names path, if it is missing."""
    if piece not in pieces:
        raise UserError(f"{path}: has no token {piece}: give the files of one model")
    return pieces.index(piece)
