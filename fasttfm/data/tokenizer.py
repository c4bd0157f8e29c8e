"""Subwords: SentencePiece, trained on the corpus, with the ids that the rest of the package relies on.

Text is not normalised by default, so decode(encode(text)) gives the text back (repeated spaces apart); NFKC would turn
the Japanese full-width question mark into another character. With byte fallback, the default, no character is unknown.
U+2581, SentencePiece's space, stands for itself in text, by way of a private-use character.
Source: Kudo and Richardson 2018 (SentencePiece), Sennrich et al. 2016 (BPE), Kudo 2018 (unigram).
"""

import io
import itertools
import json
import re
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sentencepiece as spm

from fasttfm.data.unicode_forms import composition_rules
from fasttfm.errors import UserError
from fasttfm.system.files import read_content
from fasttfm.system.parsing import characters, parse_json

PAD, UNK, BOS, EOS = 0, 1, 2, 3
"""The ids of padding, the unknown piece, the start and the end of a sentence, in every vocabulary."""

ModelType = Literal["bpe", "unigram"]
Normalization = Literal["identity", "nfc", "nmt_nfkc", "nfkc"]

# SentencePiece's unigram training sums in as many parts as it has threads: a fixed number keeps the model the same
# on every machine.
_TRAINER_THREADS = 4
_FULL_COVERAGE_SHARE = 8
_LONGEST_LINE = 4192
"""Bytes of a line that SentencePiece trains on; it leaves out longer ones without a word."""
HIDDEN_SPACE = "\U0010fb81"
"""Replacement in a model for U+2581 in a text."""
_HIDE = str.maketrans({"\u2581": HIDDEN_SPACE})
_SHOW = str.maketrans({HIDDEN_SPACE: "\u2581"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The pieces of a model that was not trained here, whose numbers are not those of its SentencePiece model."""

    pieces: list[str]
    """By id; the first four are padding, the unknown piece, the start and the end of a sentence."""
    prefix: list[str]
    """Pieces before every line, such as a language code; a search is forced to begin with them, text is not."""
    silent: list[str] = field(default_factory=list)
    """Besides the first four, what is not text: such as the codes of languages."""
    codes: bool = False
    """Whether a line may begin with a code such as >>deu<<, which is one piece (OPUS-MT)."""
    ends: bool = True
    """Whether a source has the end of a sentence behind it; OpenNMT's have not."""

    def __post_init__(self) -> None:
        for each in (self.pieces, self.prefix, self.silent):
            if not (isinstance(each, list) and all(isinstance(piece, str) for piece in each)):
                raise ValueError("pieces, prefix and silent must be lists of text")
        if len(self.pieces) <= EOS:
            raise ValueError(f"{len(self.pieces)} pieces are too few: four are special")
        if unknown := sorted(set(self.prefix) - set(self.pieces)):
            raise ValueError(f"its prefix {unknown[0]} is not among its pieces")


_CODE = re.compile(r">>[^<]*<<")


class Tokenizer:
    """A trained SentencePiece model. Ids: pad 0, unk 1, bos 2, eos 3; encode never adds bos or eos itself.

    With a vocabulary the SentencePiece model cuts text into pieces, and the vocabulary numbers them.
    """

    file_name = "spm{}.model"
    """In a directory; its part is empty for both sides, .src or .tgt for one."""
    vocabulary_kind: type[Vocabulary] = Vocabulary
    prefix: list[int]
    """The ids that every line begins with."""
    source_end: list[int]
    """The ids that every source ends with: of the end of a sentence, or none."""

    def __init__(self, model: bytes, vocabulary: Vocabulary | None = None):
        """model: the bytes of a SentencePiece model. Raises ValueError when they are not one or its ids differ."""
        self.model = model
        self.vocabulary, self.prefix, self.source_end = vocabulary, [], [EOS]
        self._processor = spm.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
            ids = tuple(getattr(self._processor, name)() for name in ("pad_id", "unk_id", "bos_id", "eos_id"))
        except RuntimeError:
            raise ValueError("not a SentencePiece model") from None
        if vocabulary is not None:
            self._number(vocabulary)
        elif ids != (PAD, UNK, BOS, EOS):
            raise ValueError(f"pad, unk, bos and eos have the ids {ids}, but {(PAD, UNK, BOS, EOS)} are needed")

    def _number(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._ids = {piece: number for number, piece in reversed(list(enumerate(vocabulary.pieces)))}
        self.prefix = [self._ids[piece] for piece in vocabulary.prefix]
        self.source_end = [EOS] if vocabulary.ends else []
        silent = {*vocabulary.prefix, *vocabulary.silent}
        numbers = (number for number, piece in enumerate(vocabulary.pieces) if piece in silent)
        self._silent = {PAD, UNK, BOS, EOS, *numbers}

    @classmethod
    def load(cls, path: Path | str, **changes: Any) -> "Tokenizer":
        """Raises UserError when the file is missing or is not a usable model, or its vocabulary is damaged.

        changes: fields of the vocabulary that are others.
        """
        model = read_content(Path(path), "no such SentencePiece model")
        beside = vocabulary_file(path)
        if not beside.exists():
            try:
                return cls(model)
            except ValueError as error:
                raise UserError(f"{path}: {error}: prepare the data again, or copy the file again") from None
        try:
            vocabulary = cls.vocabulary_kind(**{**parse_json(beside.read_bytes(), dict), **changes})
        except (ValueError, TypeError) as error:
            raise UserError(f"{beside}: is damaged ({error}): import the model again") from None
        try:
            return cls(model, vocabulary)
        except ValueError as error:
            raise UserError(f"{path}: {error}: import the model again") from None

    def save(self, path: Path | str) -> None:
        """Write the model, and its vocabulary beside it where it has one."""
        Path(path).write_bytes(self.model)
        if self.vocabulary is not None:
            vocabulary_file(path).write_text(json.dumps(asdict(self.vocabulary)) + "\n", encoding="utf-8")

    def __len__(self) -> int:
        """Number of pieces, the four special ones included."""
        return self._processor.GetPieceSize() if self.vocabulary is None else len(self.vocabulary.pieces)

    def encode(self, text: str) -> list[int]:
        """The ids of one line."""
        if self.vocabulary is not None:
            return [self._ids.get(piece, UNK) for piece in self._cut(text)]
        return self._processor.EncodeAsIds(characters(text).translate(_HIDE))

    def _cut(self, text: str) -> list[str]:
        """The pieces of a line, its code of a language one of them."""
        code = _CODE.match(text) if self.vocabulary is not None and self.vocabulary.codes else None
        pieces = self._processor.EncodeAsPieces(characters(text)[code.end() :] if code else text)
        return [code[0], *pieces] if code else pieces

    def encode_lines(self, lines: Sequence[str], threads: int = 1) -> list[list[int]]:
        """The ids of every line, in order; the result does not depend on threads."""
        if self.vocabulary is not None:
            return [self.encode(line) for line in lines]
        hidden = [characters(line).translate(_HIDE) if "\u2581" in line else characters(line) for line in lines]
        return self._processor.Encode(hidden, out_type=int, num_threads=threads) if lines else []

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids as one line: special ids vanish, and a generated line break becomes a space."""
        if self.vocabulary is not None:
            pieces = self.pieces([i for i in ids if int(i) not in self._silent])
            return self._joined(pieces).replace("\r", " ").replace("\n", " ")
        text = self._processor.DecodeIds([int(i) for i in ids])
        return text.replace("\r", " ").replace("\n", " ").translate(_SHOW)

    def lasting(self, ids: Sequence[int]) -> str:
        """The beginning of decode(ids) that no further ids change."""
        return self.decode(ids).rstrip("\ufffd")  # what a beginning of a character is decoded to

    def _joined(self, pieces: list[str]) -> str:
        """The text of a vocabulary's pieces."""
        return self._processor.DecodePieces(pieces).replace("\u2581", " ").strip()

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the begin and end of each token of encode(text) in text, in characters, spaces before it included.

        A character that is spelt in bytes belongs to the last of them; the others begin and end where it begins. Raises
        UserError for an imported model, whose prefixes and codes are not text.
        """
        self._refuse_imported()
        return _spans(self._processor, "Encode", characters(text).translate(_HIDE), text)

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of one line, and spans() of them."""
        return self.encode(text), self.spans(text)

    def decoded_spans(self, ids: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
        """Return the begin and end of each id's characters in decode(ids), as in spans()."""
        self._refuse_imported()
        ids = [int(i) for i in ids]
        return _spans(self._processor, "DecodeIds", ids, self._processor.DecodeIds(ids))

    def piece_id(self, piece: str) -> int | None:
        """The id of a piece; None where the vocabulary has it not."""
        number = self._processor.PieceToId(piece)
        return None if number == UNK else number

    def cuts_into(self, piece: str) -> bool:
        """Return whether text is cut into a piece by the SentencePiece model, however a vocabulary numbers it."""
        number = self._processor.PieceToId(piece)
        return not (self._processor.IsUnknown(number) or self._processor.IsControl(number))

    def numbered_share(self) -> float:
        """The share of the SentencePiece model's pieces, bytes and special ones apart, that the vocabulary numbers."""
        count, model = self._processor.GetPieceSize(), self._processor
        others = (model.IsControl, model.IsUnknown, model.IsByte, model.IsUnused)
        text = [model.IdToPiece(number) for number in range(count) if not any(each(number) for each in others)]
        return sum(piece in self._ids for piece in text) / max(1, len(text))

    def _refuse_imported(self) -> None:
        if self.vocabulary is not None:
            raise UserError("words cannot be aligned with an imported model: leave --alignment out")

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The pieces themselves, for showing; a leading U+2581 marks the start of a word."""
        if self.vocabulary is not None:
            return [self.vocabulary.pieces[int(i)] for i in ids]
        return [self._processor.IdToPiece(int(i)) for i in ids]


def _spans(
    processor: spm.SentencePieceProcessor, verb: str, given: str | list[int], text: str
) -> list[tuple[int, int]]:
    """Return SentencePiece's spans of its pieces, in characters of text."""
    if not hasattr(processor, f"{verb}AsProto"):  # before 0.2.1, which counts characters
        return [(piece.begin, piece.end) for piece in getattr(processor, f"{verb}AsImmutableProto")(given).pieces]
    pieces = getattr(processor, f"{verb}AsProto")(given).pieces  # counts bytes of UTF-8
    hidden = given if isinstance(given, str) else text
    ends = list(itertools.accumulate(len(character.encode()) for character in hidden))
    return [(bisect_right(ends, piece.begin), bisect_right(ends, piece.end)) for piece in pieces]


def vocabulary_file(model: Path | str) -> Path:
    """Return the path of a SentencePiece model's vocabulary: spm.model's in spm.vocabulary.json."""
    return Path(model).with_suffix(".vocabulary.json")


def train_tokenizer(
    lines: Iterable[str],
    *,
    vocab_size: int,
    model_type: ModelType = "bpe",
    byte_fallback: bool = True,
    normalization: str = "identity",
    character_coverage: float = 1.0,
    symbols: Sequence[str] = (),
    controls: Sequence[str] = (),
    keep_spaces: bool = False,
) -> Tokenizer:
    """Train SentencePiece on lines; the same lines and options give the same model on every machine.

    vocab_size: pieces in total, the special ones (and with byte_fallback 256 bytes) included.
    symbols: pieces that are always there and never cut. controls: pieces that no text is cut into. keep_spaces:
    repeated spaces, and those at the ends of a line, stay.
    Raises UserError, naming the largest or smallest possible size, for a vocab_size that the lines do not allow.
    """
    written = io.BytesIO()
    raised: list[BaseException] = []
    rules: dict[str, Any] = {"normalization_rule_name": normalization}

    def read() -> Iterator[str]:
        try:
            for line in lines:
                yield from _shortened(line.translate(_HIDE))
        except BaseException as error:  # SentencePiece makes a RuntimeError of it
            raised.append(error)
            raise

    with tempfile.TemporaryDirectory() as folder, _told(raised, vocab_size):
        if normalization == "nfc":
            rules = {"normalization_rule_tsv": str(Path(folder) / "nfc.tsv")}
            Path(rules["normalization_rule_tsv"]).write_text(composition_rules(), encoding="ascii")
        spm.SentencePieceTrainer.Train(
            sentence_iterator=read(),
            model_writer=written,
            model_type=model_type,
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            byte_fallback=byte_fallback,
            **rules,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            user_defined_symbols=list(symbols),
            control_symbols=list(controls),
            remove_extra_whitespaces=not keep_spaces,
            num_threads=_TRAINER_THREADS,
            minloglevel=2,
        )
    return Tokenizer(written.getvalue())


@contextmanager
def _told(raised: list[BaseException], vocab_size: int) -> Iterator[None]:
    """Raise what ends SentencePiece's training: what reading lines has raised, or a UserError."""
    try:
        yield
    except RuntimeError as error:
        if raised:  # Ctrl-C while it was reading lines, or a file that changed
            raise raised[0] from None
        raise _vocabulary_error(str(error), vocab_size) from None


def coverage_for(distinct_characters: int, vocab_size: int) -> float:
    """The share of character occurrences that get a piece of their own, when the user does not say.

    All of them where the script is small beside the vocabulary; 0.9995 (SentencePiece's advice for Japanese and
    Chinese) where single characters would fill the vocabulary, and rare ones are better written as bytes.
    """
    return 1.0 if distinct_characters * _FULL_COVERAGE_SHARE <= vocab_size else 0.9995


def _vocabulary_error(message: str, vocab_size: int) -> UserError:
    if match := re.search(r"Vocabulary size too high.*<= (\d+)", message):
        return UserError(
            f"--vocab-size {vocab_size:,}: the training text is too small for so many pieces: at most "
            f"{int(match.group(1)):,} are possible"
        )
    if match := re.search(r"smaller than required_chars\D*(\d+) vs (\d+)", message):
        return UserError(
            f"--vocab-size {vocab_size:,}: the characters and special pieces of this text alone need "
            f"{int(match.group(2)):,}: choose a larger size"
        )
    if "sentences_.empty()" in message or "no sentences" in message.lower():
        return UserError("no line of the training text has anything that SentencePiece can learn pieces from")
    # "INTERNAL: file.cc(123) [condition] what is wrong": where in its source says nothing to a user
    told = re.sub(r"\S+\.(cc|h)\(\d+\)|\b[A-Z_]+:(?= )", " ", message).replace("[", " ").replace("]", " ")
    return UserError(f"--vocab-size {vocab_size:,}: SentencePiece cannot train on this text: {' '.join(told.split())}")


def _shortened(line: str) -> Iterator[str]:
    """The line in parts that SentencePiece trains on, cut at spaces where there are any."""
    begin = 0
    while begin < len(line):
        part = line[begin : begin + _LONGEST_LINE].encode()[:_LONGEST_LINE].decode(errors="ignore")
        space = part.rfind(" ")
        if space > 0 and begin + len(part) < len(line):
            part = part[:space]
        yield part
        begin += len(part)
