"""SentencePiece tokenizers with fixed special ids, trained here or imported.

By default text is not normalized, so decode(encode(text)) == text up to repeated spaces (NFKC would change the Japanese
full-width question mark). With byte fallback, the default, no character is unknown. U+2581, SentencePiece's space
symbol, is mapped to a private-use character, so that it survives in text.
Source: Kudo and Richardson 2018 (SentencePiece), Sennrich et al. 2016 (BPE), Kudo 2018 (unigram).
"""

import io
import itertools
import json
import re
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
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
"""Ids of padding, the unknown piece, start and end of sentence, in every vocabulary."""

ModelType = Literal["bpe", "unigram"]
Normalization = Literal["identity", "nfc", "nmt_nfkc", "nfkc"]

_TRAINER_THREADS = 4
"""Fixed, because unigram training sums one part per thread: the model must not depend on the machine."""
_FULL_COVERAGE_SHARE = 8
_LONGEST_LINE = 4192
"""Longest line in bytes that SentencePiece trains on; it silently skips longer ones."""
HIDDEN_SPACE = "\U0010fb81"
"""Replacement for U+2581 of the text in a model."""
_HIDE = str.maketrans({"\u2581": HIDDEN_SPACE})
_SHOW = str.maketrans({HIDDEN_SPACE: "\u2581"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Numbering of an imported model's pieces, which differs from its SentencePiece model's."""

    pieces: list[str]
    """By id; the first four are padding, unknown, start and end of sentence."""
    prefix: list[str]
    """Forced first pieces of every hypothesis, such as a language code; not part of the text."""
    silent: list[str] = field(default_factory=list)
    """Other pieces that are not text, such as language codes."""
    codes: bool = False
    """Whether a line may begin with a language code such as >>deu<<, which is one piece (OPUS-MT)."""
    ends: bool = True
    """Whether sources end with eos; OpenNMT's do not."""

    def __post_init__(self) -> None:
        for each in (self.pieces, self.prefix, self.silent):
            if not (isinstance(each, list) and all(isinstance(piece, str) for piece in each)):
                raise ValueError("pieces, prefix and silent must be lists of strings")
        if len(self.pieces) <= EOS:
            raise ValueError(f"has {len(self.pieces)} pieces, but four are special")
        if unknown := sorted(set(self.prefix) - set(self.pieces)):
            raise ValueError(f"the prefix {unknown[0]} is not among the pieces")


_CODE = re.compile(r">>[^<]*<<")


class Tokenizer:
    """A SentencePiece model. Ids: pad 0, unk 1, bos 2, eos 3; encode adds neither bos nor eos.

    With a vocabulary, SentencePiece splits text into pieces and the vocabulary numbers them.
    """

    file_name = "spm{}.model"
    """File name in a directory; the placeholder is empty for a joint model, .src or .tgt for one side."""
    vocabulary_kind: type[Vocabulary] = Vocabulary
    prefix: list[int]
    """Forced first ids of every hypothesis."""
    source_end: list[int]
    """Ids appended to every source: [EOS] or none."""

    def __init__(self, model: bytes, vocabulary: Vocabulary | None = None):
        """model: a serialized SentencePiece model. Raises ValueError for other bytes or other special ids."""
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
            raise ValueError(f"the ids of pad, unk, bos and eos are {ids}, but must be {(PAD, UNK, BOS, EOS)}")

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
        """Read a model, and its vocabulary file if there is one. changes: fields of the vocabulary to override.

        Raises UserError for a missing or damaged file.
        """
        model = read_content(Path(path), "no such SentencePiece model")
        vocabulary, vocabulary_path = None, vocabulary_file(path)
        remedy = "prepare the data again, or copy the file again"
        if vocabulary_path.exists():
            remedy = "import the model again"
            try:
                vocabulary = cls.vocabulary_kind(**{**parse_json(vocabulary_path.read_bytes(), dict), **changes})
            except (ValueError, TypeError) as error:
                raise UserError(f"{vocabulary_path}: is damaged ({error}): {remedy}") from None
        try:
            return cls(model, vocabulary)
        except ValueError as error:
            raise UserError(f"{path}: {error}: {remedy}") from None

    def save(self, path: Path | str) -> None:
        """Write the model, and next to it the vocabulary, if any."""
        Path(path).write_bytes(self.model)
        if self.vocabulary is not None:
            vocabulary_file(path).write_text(json.dumps(asdict(self.vocabulary)) + "\n", encoding="utf-8")

    def __len__(self) -> int:
        """Number of pieces, special ones included."""
        return self._processor.GetPieceSize() if self.vocabulary is None else len(self.vocabulary.pieces)

    def encode(self, text: str) -> list[int]:
        """The ids of a line."""
        if self.vocabulary is not None:
            return [self._ids.get(piece, UNK) for piece in self._cut(text)]
        return self._processor.EncodeAsIds(characters(text).translate(_HIDE))

    def _cut(self, text: str) -> list[str]:
        """The pieces of a line; a language code is one piece."""
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
        """The text of ids as one line: special ids are dropped, and a generated line break becomes a space."""
        if self.vocabulary is not None:
            pieces = self.pieces([i for i in ids if int(i) not in self._silent])
            return self._joined(pieces).replace("\r", " ").replace("\n", " ")
        text = self._processor.DecodeIds([int(i) for i in ids])
        return text.replace("\r", " ").replace("\n", " ").translate(_SHOW)

    def stable_prefix(self, ids: Sequence[int]) -> str:
        """The prefix of decode(ids) that stays the same whatever ids follow."""
        return self.decode(ids).rstrip("\ufffd")  # an incomplete character

    def _joined(self, pieces: list[str]) -> str:
        """The text of the pieces of a vocabulary."""
        return self._processor.DecodePieces(pieces).replace("\u2581", " ").strip()

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Begin and end of each token of encode(text) in characters of text, including the space before it.

        Of byte pieces, the last spans the character; the others are empty spans before it. Raises UserError for an
        imported model, whose prefixes and codes are not text.
        """
        self._refuse_imported()
        return _spans(self._processor, "Encode", characters(text).translate(_HIDE), text)

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a line, and their spans()."""
        return self.encode(text), self.spans(text)

    def decoded_spans(self, ids: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
        """Begin and end of each id in characters of decode(ids), as in spans()."""
        self._refuse_imported()
        ids = [int(i) for i in ids]
        return _spans(self._processor, "DecodeIds", ids, self._processor.DecodeIds(ids))

    def piece_id(self, piece: str) -> int | None:
        """The id of a piece; None if the vocabulary does not have it."""
        number = self._processor.PieceToId(piece) if self.vocabulary is None else self._ids.get(piece, UNK)
        return None if number == UNK else number

    def cuts_into(self, piece: str) -> bool:
        """Whether the SentencePiece model produces this piece, whether or not a vocabulary numbers it."""
        number = self._processor.PieceToId(piece)
        return not (self._processor.IsUnknown(number) or self._processor.IsControl(number))

    def numbered_share(self) -> float:
        """Share of the SentencePiece model's pieces (without bytes and special ones) that the vocabulary numbers."""
        count, model = self._processor.GetPieceSize(), self._processor
        others = (model.IsControl, model.IsUnknown, model.IsByte, model.IsUnused)
        text = [model.IdToPiece(number) for number in range(count) if not any(each(number) for each in others)]
        return sum(piece in self._ids for piece in text) / max(1, len(text))

    def _refuse_imported(self) -> None:
        if self.vocabulary is not None:
            raise UserError("--alignment is not supported for imported models: omit the option")

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The pieces of ids; a leading U+2581 marks the start of a word."""
        if self.vocabulary is not None:
            return [self.vocabulary.pieces[int(i)] for i in ids]
        return [self._processor.IdToPiece(int(i)) for i in ids]


def _spans(
    processor: spm.SentencePieceProcessor, verb: str, value: str | list[int], text: str
) -> list[tuple[int, int]]:
    """SentencePiece's spans of pieces, in characters of text."""
    if not hasattr(processor, f"{verb}AsProto"):  # before 0.2.1; counts characters
        return [(piece.begin, piece.end) for piece in getattr(processor, f"{verb}AsImmutableProto")(value).pieces]
    pieces = getattr(processor, f"{verb}AsProto")(value).pieces  # counts bytes of UTF-8
    hidden = value if isinstance(value, str) else text
    ends = list(itertools.accumulate(len(character.encode()) for character in hidden))
    return [(bisect_right(ends, piece.begin), bisect_right(ends, piece.end)) for piece in pieces]


def vocabulary_file(model: Path | str) -> Path:
    """Path of a model's vocabulary: spm.model -> spm.vocabulary.json."""
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

    vocab_size: number of pieces, including the special ones and, with byte_fallback, 256 bytes. symbols: user-defined
    pieces that are never split. controls: pieces that are never produced from text. keep_spaces: keep repeated, leading
    and trailing spaces. Raises UserError with the largest or smallest possible size if the lines do not allow
    vocab_size.
    """
    model = io.BytesIO()
    raised: list[BaseException] = []
    rules: dict[str, Any] = {"normalization_rule_name": normalization}

    def read() -> Iterator[str]:
        try:
            for line in lines:
                yield from _split_long(line.translate(_HIDE))
        except BaseException as error:  # SentencePiece turns it into a RuntimeError
            raised.append(error)
            raise

    with tempfile.TemporaryDirectory() as folder:
        if normalization == "nfc":
            rules = {"normalization_rule_tsv": str(Path(folder) / "nfc.tsv")}
            Path(rules["normalization_rule_tsv"]).write_text(composition_rules(), encoding="ascii")
        try:
            spm.SentencePieceTrainer.Train(
                sentence_iterator=read(),
                model_writer=model,
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
        except RuntimeError as error:
            if raised:  # Ctrl-C, or a file that changed
                raise raised[0] from None
            raise _vocabulary_error(str(error), vocab_size) from None
    return Tokenizer(model.getvalue())


def coverage_for(distinct_characters: int, vocab_size: int) -> float:
    """Default share of character occurrences that get their own piece.

    1.0 if the script is small compared to the vocabulary; else 0.9995 (SentencePiece's recommendation for Japanese and
    Chinese), because single characters would fill the vocabulary and rare ones are better encoded as bytes.
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
        return UserError("the training text has no line that SentencePiece can learn pieces from")
    # drop the source location from "INTERNAL: file.cc(123) [condition] reason"
    reason = re.sub(r"\S+\.(cc|h)\(\d+\)|\b[A-Z_]+:(?= )", " ", message).replace("[", " ").replace("]", " ")
    return UserError(
        f"--vocab-size {vocab_size:,}: SentencePiece cannot train on this text: {' '.join(reason.split())}"
    )


def _split_long(line: str) -> Iterator[str]:
    """A line in parts of at most _LONGEST_LINE bytes, split at spaces where possible."""
    begin = 0
    while begin < len(line):
        part = line[begin : begin + _LONGEST_LINE].encode()[:_LONGEST_LINE].decode(errors="ignore")
        space = part.rfind(" ")
        if space > 0 and begin + len(part) < len(line):
            part = part[:space]
        yield part
        begin += len(part)
