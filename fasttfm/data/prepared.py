"""The prepared data directory: tokenizers and token ids on disk, read on access.

    data.yaml                     format, options, counts and the SHA-256 of every input file
    spm.model                     the joint SentencePiece model; or spm.src.model and spm.tgt.model
    {train,valid}.{src,tgt}.npy            all ids of a side, concatenated, uint16 (or int32)
    {train,valid}.{src,tgt}.offsets.npy    sentence i is ids[offsets[i]:offsets[i + 1]], int64
    valid.src.txt, valid.tgt.txt           raw text of the validation pairs, for BLEU
    sha256sums                             of all these (see fasttfm.system.folders)

Ids contain neither bos nor eos, but the language codes of an imported model. A kill at any time leaves the old data,
the new data, or a directory that is refused until `prepare` is run again.
"""

import itertools
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.data.tokenizer_files import load_tokenizers
from fasttfm.errors import UserError
from fasttfm.system.files import read_content, read_plain_yaml, unreadable
from fasttfm.system.folders import PREPARE_AGAIN, VOCABULARY_FILES, read_manifest, reading
from fasttfm.system.parsing import write_yaml
from fasttfm.system.wording import counted

FORMAT = "fasttfm prepared data, version 1"
DESCRIPTION = "data.yaml"
_BLOCK = 1 << 20
_SEEKING = threading.Lock()
"""Makes seek and read atomic on systems without pread."""


class StoredIds:
    """The ids of a .npy file, read on access.

    Not a memory map: if a mapped file is truncated, the system kills the process without a message.
    """

    def __init__(self, path: Path, dtypes: Sequence[type]) -> None:
        """Raises OSError for an unreadable file, and almost any exception for a damaged header."""
        self.path = path
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)
        with path.open("rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("not version 1.0 of .npy")
            shape, _, self.dtype = np.lib.format.read_array_header_1_0(file)
            self._begin = file.tell()
        if len(shape) != 1 or self.dtype not in dtypes:
            raise ValueError(f"{len(shape)} dimensions of {self.dtype}")
        self._count = shape[0]
        size, expected = os.fstat(self._file).st_size, self._begin + self._count * self.dtype.itemsize
        if size != expected:
            raise ValueError(f"{size:,} bytes, expected {expected:,} from its header")

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredIds, (self.path, [self.dtype.type])  # a copy opens the file for itself

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, where: slice) -> np.ndarray:
        begin, end, _ = where.indices(self._count)
        size, start = max(0, end - begin) * self.dtype.itemsize, self._begin + begin * self.dtype.itemsize
        content = _read_at(self._file, size, start)
        if len(content) != size:
            raise UserError(f"{self.path}: was truncated while it was read: {PREPARE_AGAIN}")
        return np.frombuffer(content, self.dtype)

    def blocks(self, overlap: int = 0) -> Iterator[np.ndarray]:
        """All ids in blocks, each with the first `overlap` ids of the next block."""
        for begin in range(0, self._count - overlap, _BLOCK):
            yield self[begin : begin + _BLOCK + overlap]


def _read_at(file: int, size: int, start: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(file, size, start)
    with _SEEKING:
        os.lseek(file, start, os.SEEK_SET)
        return os.read(file, size)


def _lengths(offsets: np.ndarray | StoredIds) -> np.ndarray:
    """(n,) int32: differences of n + 1 offsets. ValueError if one is negative or does not fit in int32."""
    lengths, begin = np.empty(max(0, len(offsets) - 1), np.int32), 0
    for block in map(np.diff, offsets.blocks(1) if isinstance(offsets, StoredIds) else [offsets]):
        if len(block) and not 0 <= int(block.min()) <= int(block.max()) <= np.iinfo(np.int32).max:
            raise ValueError(f"offsets increase by {int(block.min())} to {int(block.max())}")
        lengths[begin : begin + len(block)] = block
        begin += len(block)
    return lengths


class ParallelTokens:
    """Sentence pairs as ids; source_lengths and target_lengths are int32 arrays, without bos and eos.

    Of pairs on disk, only the lengths are in memory (4 bytes per side): ids and offsets are read on access.
    """

    def __init__(
        self,
        source: np.ndarray | StoredIds,
        source_offsets: np.ndarray | StoredIds,
        target: np.ndarray | StoredIds,
        target_offsets: np.ndarray | StoredIds,
    ) -> None:
        """Source i is source[source_offsets[i]:source_offsets[i + 1]]. Raises ValueError for decreasing offsets."""
        self._source, self._source_offsets = source, source_offsets
        self._target, self._target_offsets = target, target_offsets
        self.source_lengths = _lengths(source_offsets)
        self.target_lengths = _lengths(target_offsets)

    @classmethod
    def from_lists(cls, source: Sequence[Sequence[int]], target: Sequence[Sequence[int]]) -> "ParallelTokens":
        """Pairs of ids in memory."""
        if len(source) != len(target):
            raise ValueError(f"{len(source)} source but {len(target)} target sentences")
        ids = (np.fromiter(itertools.chain.from_iterable(side), np.int32) for side in (source, target))
        offsets = (np.cumsum([0, *map(len, side)], dtype=np.int64) for side in (source, target))
        return cls(next(ids), next(offsets), next(ids), next(offsets))

    def __len__(self) -> int:
        return len(self.source_lengths)

    def part(self, begin: int, end: int) -> "ParallelTokens":
        """A view of the pairs [begin, end)."""
        offsets = (offsets[begin : end + 1] for offsets in (self._source_offsets, self._target_offsets))
        return ParallelTokens(self._source, next(offsets), self._target, next(offsets))

    def source(self, i: int) -> np.ndarray:
        """The source ids of pair i, (length,), uint16 or int32."""
        begin, end = self._source_offsets[i : i + 2].tolist()
        return self._source[begin:end]

    def target(self, i: int) -> np.ndarray:
        """The target ids of pair i, as source()."""
        begin, end = self._target_offsets[i : i + 2].tolist()
        return self._target[begin:end]


@dataclass(eq=False)
class PreparedFolder:
    """A prepared directory, opened for reading: pairs, or documents (fasttfm-pretraining)."""

    path: Path
    description: dict[str, Any]
    """The content of data.yaml."""

    @classmethod
    def open(cls, path: Path | str) -> "PreparedFolder":
        """Raises UserError if `path` is not a prepared directory, or if a file is missing or damaged."""
        raise NotImplementedError

    @classmethod
    def holds(cls, path: Path, fingerprint: dict[str, Any]) -> bool:
        """Whether `path` is complete and was prepared from exactly these inputs and options."""
        try:
            return cls.open(path).description.get("fingerprint") == fingerprint
        except UserError:
            return False  # incomplete: prepare again


@dataclass(eq=False)
class PreparedData(PreparedFolder):
    """A prepared directory of sentence pairs."""

    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    """The same object as source_tokenizer if the vocabulary is joint."""
    train: ParallelTokens
    valid: ParallelTokens

    @classmethod
    def open(cls, path: Path | str) -> "PreparedData":
        path = Path(path)
        with reading(path, PREPARE_AGAIN):
            description = read_description(path, FORMAT)
            if description is None or description.get("vocabulary") not in ("joint", "separate"):
                raise UserError(f"{path}: not a prepared data directory (no usable {DESCRIPTION}): run fasttfm prepare")
            if (path / "config.yaml").exists() and not (path / "train.src.npy").exists():
                raise UserError(f"{path}: is a model directory: --data takes the output directory of fasttfm prepare")
            read_manifest(path)
            source_tokenizer, target_tokenizer = load_tokenizers(path, joint=description["vocabulary"] == "joint")
            train, valid = (
                _load_pairs(path, split, len(source_tokenizer), len(target_tokenizer)) for split in ("train", "valid")
            )
        return cls(path, description, source_tokenizer, target_tokenizer, train, valid)

    @property
    def joint(self) -> bool:
        """Whether source and target have the same pieces (imported ones may still differ in language)."""
        source, target = self.source_tokenizer.vocabulary, self.target_tokenizer.vocabulary
        same_pieces = source is not None and target is not None and source.pieces == target.pieces
        return same_pieces or self.source_tokenizer is self.target_tokenizer

    @property
    def model_files(self) -> list[Path]:
        """The vocabulary's files, which a model directory must copy: one if joint, else source then target."""
        return [path for path in (self.path / name for name in VOCABULARY_FILES) if path.exists()]

    @property
    def valid_source_text(self) -> list[str]:
        """The raw source lines of the validation pairs."""
        return _load_text(self.path / "valid.src.txt", len(self.valid))

    @property
    def valid_target_text(self) -> list[str]:
        """The raw target lines of the validation pairs: the references."""
        return _load_text(self.path / "valid.tgt.txt", len(self.valid))


class IdsWriter:
    """Streams ids and offsets to disk, sentence by sentence."""

    def __init__(self, directory: Path, name: str, dtype: np.dtype) -> None:
        """name: stem of both files, such as train.src."""
        self.tokens = self.sentences = self.longest = self._begin = 0
        self._dtype = dtype
        self._files = [(directory / f"{name}{end}").open("wb") for end in (".npy", ".offsets.npy")]
        for file in self._files:
            _write_header(file, dtype, 0)
        self._files[1].write(bytes(8))  # offset of the first sentence

    def write(self, ids: Sequence[int], *, ends: bool = True) -> None:
        """Append ids; ends: they complete a sentence."""
        self._files[0].write(np.asarray(ids, self._dtype).tobytes())
        self.tokens += len(ids)
        if ends:
            self._files[1].write(self.tokens.to_bytes(8, "little"))
            self.sentences += 1
            self.longest, self._begin = max(self.longest, self.tokens - self._begin), self.tokens

    def close(self) -> None:
        """Rewrite the headers with the final counts and close the files."""
        for file, dtype, count in zip(self._files, (self._dtype, np.dtype("<i8")), (self.tokens, self.sentences + 1)):
            try:
                file.seek(0)
                _write_header(file, dtype, count)
                file.close()
            except OSError as error:
                error.filename = error.filename or file.name
                raise


def _write_header(file: BinaryIO, dtype: np.dtype, count: int) -> None:
    """Write the header of a one-dimensional .npy file; numpy pads it for any count."""
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})


def save_description(directory: Path, form: str, content: dict[str, Any]) -> None:
    """Write data.yaml; form: the format that read_description() expects."""
    text = write_yaml({"format": form, **content}, sort_keys=False)
    (directory / DESCRIPTION).write_bytes(text.encode())


def read_description(directory: Path, form: str) -> dict[str, Any] | None:
    """The content of data.yaml; None if it is missing or has another format."""
    try:
        content = read_plain_yaml(directory / DESCRIPTION)
    except UserError:
        return None
    return content if content.get("format") == form else None


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype for ids on disk: uint16 if they fit, else int32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def _load_pairs(path: Path, split: str, *vocab_sizes: int) -> ParallelTokens:
    sides = [load_ids(path, f"{split}.{side}") for side in ("src", "tgt")]
    for (ids, _), size in zip(sides, vocab_sizes):
        # one pass over data that training reads anyway; otherwise the embedding would fail in the middle of an epoch
        for block in ids.blocks():
            if not 0 <= int(block.min()) <= int(block.max()) < size:
                wrong = int(block.max() if block.max() >= size else block.min())
                raise UserError(f"{ids.path}: contains token {wrong}, but the vocabulary has {size:,}: {PREPARE_AGAIN}")
    try:
        pairs = ParallelTokens(*sides[0], *sides[1])
    except ValueError as error:
        raise UserError(f"{path}: {split} does not match its offsets ({error}): {PREPARE_AGAIN}") from None
    if len(pairs.source_lengths) != len(pairs.target_lengths):
        raise UserError(f"{path}: {split} has unequal sides: {PREPARE_AGAIN}")
    return pairs


def load_ids(path: Path, name: str) -> tuple[StoredIds, StoredIds]:
    """The ids and offsets of an IdsWriter of this name; UserError if one is missing, damaged or does not match."""
    ids = _load(path / f"{name}.npy", (np.uint16, np.int32))
    offsets = _load(path / f"{name}.offsets.npy", (np.int64,))
    count = len(offsets)
    if count < 2 or offsets[:1][0] != 0 or offsets[count - 1 :][0] != len(ids):
        raise UserError(f"{ids.path}: does not match its offsets: {PREPARE_AGAIN}")
    return ids, offsets


def _load(path: Path, dtypes: tuple[type, ...]) -> StoredIds:
    try:
        return StoredIds(path, dtypes)
    except FileNotFoundError:
        raise UserError(f"{path}: missing from the prepared data: {PREPARE_AGAIN}") from None
    except OSError as error:
        raise unreadable(path, error) from error
    # numpy parses the header as Python source, so a flipped bit may raise almost anything
    except (ValueError, EOFError, SyntaxError, TokenError, TypeError, OverflowError, MemoryError) as error:
        raise UserError(f"{path}: truncated or damaged ({error}): {PREPARE_AGAIN}") from None


def _load_text(path: Path, lines: int) -> list[str]:
    content = read_content(path, "missing from the prepared data: run fasttfm prepare again")
    try:
        text = content.decode().split("\n")[:-1]
    except UnicodeDecodeError:
        raise UserError(f"{path}: damaged, not valid UTF-8: {PREPARE_AGAIN}") from None
    if len(text) != lines:
        raise UserError(f"{path}: has {counted(len(text), 'line')} for {counted(lines, 'pair')}: {PREPARE_AGAIN}")
    return text
