"""Tokenizers of running text that keep line breaks: SentencePiece, bytes, or a tokenizer.json of another tool.

Each has an end-of-document token (`end`) and may have a mask token (`mask`).
"""

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fasttfm.data.tokenizer import EOS, Tokenizer, train_tokenizer
from fasttfm.data.tokenizer_files import MASK_PIECE, PIECES_FILE, TOKENIZER_FILE
from fasttfm.errors import UserError
from fasttfm.system.files import read_json
from fasttfm.system.folders import settled
from fasttfm.system.parsing import characters, decoded, parse_json

NEWLINE = "\n"
BYTES_FILE = "bytes.json"
_FIRST_BYTE = 5
_BEGINS = ("<|begin_of_text|>", "<s>", "<bos>")
"""Llama's, and others'."""
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "[SEP]", "</s>", "<eos>", "<unk>")
"""GPT-1's vocabulary has no other than the last."""
_NEVER = -1e4
"""Score of a piece that is never produced by tokenization."""
_MASKS = ("[MASK]", MASK_PIECE)


class TextTokenizer(ABC):
    """Text to tokens and back."""

    file: str
    """File name that save() writes."""
    end: int
    """The end-of-document token."""
    mask: int | None
    """The mask token; None if the vocabulary has none."""

    begin: int
    """The start-of-document token: `end`, unless another tool's vocabulary has its own."""
    newline: int | None = None
    """The token of a line break; None if the vocabulary has none of its own."""
    separators: int = 1
    """Tokens between the two texts of a pair."""

    @abstractmethod
    def __len__(self) -> int:
        """Tokens."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a text of any number of lines, without `end`."""

    @abstractmethod
    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of a text and their character spans, preceding spaces included.

        A character spelled in bytes belongs to the last of them; the other bytes have empty spans at its start.
        """

    @abstractmethod
    def encode_lines(self, lines: Sequence[str], threads: int = 1) -> list[list[int]]:
        """The tokens of each line of one text, its line break's token at the end."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text without special tokens."""

    @abstractmethod
    def pieces(self) -> list[str]:
        """All tokens as written in the vocabulary."""

    def textless(self, size: int) -> list[int]:
        """Tokens below `size` without text: gaps in the vocabulary, or padding up to `size`."""
        pieces = self.pieces()
        return [number for number in range(size) if number >= len(pieces) or not pieces[number]]

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the file for load_text_tokenizer()."""


class PieceTokenizer(TextTokenizer):
    """A SentencePiece model; lines are tokenized one by one and joined by its line-break piece."""

    file = PIECES_FILE
    newline: int

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError for a model without a line-break piece."""
        self.tokenizer = tokenizer
        newline = tokenizer.piece_id(NEWLINE) or tokenizer.piece_id("<0x0A>")
        if newline is None:
            raise ValueError("its SentencePiece model has no piece for a line break and no byte fallback")
        self.newline = newline
        self.begin = self.end = EOS
        self.mask = tokenizer.piece_id(MASK_PIECE)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        return list(itertools.chain.from_iterable(self.encode_lines(text.split(NEWLINE))))[:-1]

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        spans, begin = [], 0
        for line in text.split(NEWLINE):
            spans += [(begin + first, begin + last) for first, last in self.tokenizer.spans(line)]
            begin += len(line) + 1
            spans.append((begin - 1, begin))
        return self.encode(text), spans[:-1]

    def encode_lines(self, lines: Sequence[str], threads: int = 1) -> list[list[int]]:
        return [[*ids, self.newline] for ids in self.tokenizer.encode_lines(lines, threads)]

    def decode(self, ids: Iterable[int]) -> str:
        lines: list[list[int]] = [[]]
        for number in map(int, ids):
            if number == self.newline:
                lines.append([])
            else:
                lines[-1].append(number)
        return NEWLINE.join(map(self.tokenizer.decode, lines))

    def pieces(self) -> list[str]:
        """The text of every token; U+2581 stands for a space."""
        return self.tokenizer.pieces(range(len(self)))

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder / PIECES_FILE)


class ByteTokenizer(TextTokenizer):
    """One token per UTF-8 byte: 256, after padding 0, unknown 1, start 2, end 3 and mask 4."""

    file = BYTES_FILE
    begin: int = EOS
    end: int = EOS
    mask: int | None = 4
    newline: int | None = _FIRST_BYTE + ord(NEWLINE)

    def __len__(self) -> int:
        return _FIRST_BYTE + 256

    def encode(self, text: str) -> list[int]:
        return [_FIRST_BYTE + byte for byte in characters(text).encode()]

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        sizes = [len(character.encode()) for character in characters(text)]
        return self.encode(text), [(i, i + (byte == size - 1)) for i, size in enumerate(sizes) for byte in range(size)]

    def encode_lines(self, lines: Sequence[str], threads: int = 1) -> list[list[int]]:
        return [self.encode(line + NEWLINE) for line in lines]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the tokens; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(i) - _FIRST_BYTE for i in ids if int(i) >= _FIRST_BYTE).decode(errors="replace")

    def pieces(self) -> list[str]:
        """The text of every token, bytes as Latin-1."""
        return [*("<pad>", "<unk>", "<s>", "</s>", MASK_PIECE), *map(chr, range(256))]

    def save(self, folder: Path) -> None:
        (folder / BYTES_FILE).write_text(json.dumps({"first_byte": _FIRST_BYTE}) + "\n", encoding="utf-8")


class ImportedTokenizer(TextTokenizer):
    """A tokenizer.json of Hugging Face's `tokenizers`, such as that of GPT-2 or BERT."""

    file = TOKENIZER_FILE

    def __init__(self, content: str) -> None:
        """content: of the file. Raises ValueError for other content, or without an end-of-document token."""
        self.content = content
        import tokenizers  # type: ignore[import-untyped, unused-ignore]

        self._tokenizer: Any = tokenizers.Tokenizer.from_str(_without_special_pieces(content))
        self._tokenizer.encode_special_tokens = True  # as text: a document's words end no document
        self._tokenizer.no_truncation()  # which the file of a fine-tuned model may tell
        self._tokenizer.no_padding()
        self._size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        end, self.mask = self._first(_ENDS), self._first(_MASKS)
        if end is None:
            raise ValueError(f"it has none of {', '.join(_ENDS)}, which would end a document")
        self.end = end
        begin = self._first(_BEGINS)
        self.begin = end if begin is None else begin
        joins = parse_json(content, dict).get("post_processor")
        self.separators = 2 if isinstance(joins, dict) and joins.get("type") == "RobertaProcessing" else 1

    def _first(self, pieces: Sequence[str]) -> int | None:
        """Token of the first of these pieces in the vocabulary."""
        tokens = map(self._tokenizer.token_to_id, pieces)
        return next((token for token in tokens if token is not None), None)

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(characters(text), add_special_tokens=False).ids)

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._tokenizer.encode(characters(text), add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def encode_lines(self, lines: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Tokens of each line, tokenized as one text: GPT-2 may encode several line breaks as one token."""
        return [self.encode("".join(line + NEWLINE for line in lines))]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids]))

    def pieces(self) -> list[str]:
        return [self._tokenizer.id_to_token(number) or "" for number in range(len(self))]

    def save(self, folder: Path) -> None:
        (folder / TOKENIZER_FILE).write_text(self.content, encoding="utf-8")


def _without_special_pieces(content: str) -> str:
    """A tokenizer.json that cuts no text into the name of a special token, as a unigram model would: [MASK] is one of
    its pieces, and scores 0."""
    given = parse_json(content, dict)
    if not isinstance(given.get("model"), dict) or given["model"].get("type") != "Unigram":
        return content
    special = {each["content"] for each in given["added_tokens"] if each["special"]}
    given["model"]["vocab"] = [
        [piece, _NEVER if piece in special else score] for piece, score in given["model"]["vocab"]
    ]
    return json.dumps(given)


def train_text_tokenizer(lines: Iterable[str], vocab_size: int) -> PieceTokenizer:
    """Train a SentencePiece BPE model with byte fallback that preserves all spaces and line breaks."""
    tokenizer = train_tokenizer(
        lines, vocab_size=vocab_size, symbols=[NEWLINE], controls=[MASK_PIECE], keep_spaces=True
    )
    return PieceTokenizer(tokenizer)


def load_text_tokenizer(folder: Path) -> TextTokenizer:
    """Load the tokenizer of a data or model directory. Raises UserError if it is missing or damaged."""
    settled(folder)
    if (folder / BYTES_FILE).is_file():
        if read_json(folder / BYTES_FILE) != {"first_byte": _FIRST_BYTE}:
            raise UserError(f"{folder / BYTES_FILE}: is damaged: prepare the data again, or copy the file again")
        return ByteTokenizer()
    if (folder / TOKENIZER_FILE).is_file() and not (folder / PIECES_FILE).is_file():  # else it was made of that one
        return load_tokenizer_file(folder / TOKENIZER_FILE)
    return load_pieces(folder / PIECES_FILE)


def load_pieces(path: Path) -> PieceTokenizer:
    """Load a SentencePiece model file. Raises UserError if it is unusable."""
    try:
        return PieceTokenizer(Tokenizer.load(path))
    except ValueError as error:
        raise UserError(f"{path}: {error}: leave --spm out, or give another") from None


def load_tokenizer_file(path: Path) -> ImportedTokenizer:
    """Load a tokenizer.json. Raises UserError if it is unusable or `tokenizers` is not installed."""
    try:
        content = decoded(path.read_bytes())
        parse_json(content, dict)
        return ImportedTokenizer(content)
    except ImportError:
        raise UserError(f"{path}: needs the package tokenizers: pip install tokenizers") from None
    except MemoryError:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        raise UserError(f"{path}: is damaged or no tokenizer.json ({error}): copy it again") from None
