"""The prepared data directory: subwords and token ids on disk, memory-mapped when read.

    data.yaml                     what is inside, the options, counts and the SHA-256 of every input file
    spm.model                     the joint SentencePiece model; or spm.src.model and spm.tgt.model
    {train,valid}.{src,tgt}.npy            all ids of a side, one sentence after the other, uint16 (or int32)
    {train,valid}.{src,tgt}.offsets.npy    sentence i is ids[offsets[i]:offsets[i + 1]], int64
    valid.src.txt, valid.tgt.txt           the raw text of the validation pairs, for BLEU

Ids carry neither bos nor eos. A directory is written under a temporary name beside its place and renamed when complete,
so that a kill at any moment leaves either the old directory, none, or the new one, never half of one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import yaml

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.errors import UserError

FORMAT = "fasttfm prepared data, version 1"
DESCRIPTION = "data.yaml"


class ParallelTokens:
    """Sentence pairs as ids. source_lengths and target_lengths are int64 arrays, without bos and eos."""

    def __init__(
        self, source: np.ndarray, source_offsets: np.ndarray, target: np.ndarray, target_offsets: np.ndarray
    ) -> None:
        self._source, self._source_offsets = source, source_offsets
        self._target, self._target_offsets = target, target_offsets
        self.source_lengths = np.diff(source_offsets)
        self.target_lengths = np.diff(target_offsets)

    @classmethod
    def from_lists(cls, source: Sequence[Sequence[int]], target: Sequence[Sequence[int]]) -> ParallelTokens:
        """Pairs that are already in memory."""
        if len(source) != len(target):
            raise ValueError(f"{len(source)} source but {len(target)} target sentences")
        return cls(*_flat(source, np.dtype(np.int32)), *_flat(target, np.dtype(np.int32)))

    def __len__(self) -> int:
        return len(self.source_lengths)

    def source(self, i: int) -> np.ndarray:
        """The source ids of pair i, (length,), uint16 or int32; a view into the memory map."""
        return self._source[self._source_offsets[i] : self._source_offsets[i + 1]]

    def target(self, i: int) -> np.ndarray:
        """The target ids of pair i, as source()."""
        return self._target[self._target_offsets[i] : self._target_offsets[i + 1]]


class PreparedData:
    """A prepared directory, opened for reading."""

    def __init__(
        self,
        path: Path,
        description: dict[str, Any],
        source_tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        train: ParallelTokens,
        valid: ParallelTokens,
    ) -> None:
        self.path = path
        self.description = description
        """The content of data.yaml."""
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer
        """The same object as source_tokenizer when the vocabulary is joint."""
        self.train = train
        self.valid = valid

    @classmethod
    def open(cls, path: Path | str) -> PreparedData:
        """Raises UserError when path is no prepared directory or one of its files is missing or damaged."""
        path = Path(path)
        description = _description(path)
        if description is None:
            raise UserError(f"{path}: not a prepared data directory (no usable {DESCRIPTION}): run fasttfm prepare")
        if (path / "config.yaml").exists() and not (path / "train.src.npy").exists():
            raise UserError(f"{path}: this is a model directory: give --data the directory that fasttfm prepare made")
        if description["vocabulary"] == "joint":
            source_tokenizer = target_tokenizer = Tokenizer.load(path / "spm.model")
        else:
            source_tokenizer = Tokenizer.load(path / "spm.src.model")
            target_tokenizer = Tokenizer.load(path / "spm.tgt.model")
        train, valid = (
            ParallelTokens(
                *_load_side(path, split, "src", len(source_tokenizer)),
                *_load_side(path, split, "tgt", len(target_tokenizer)),
            )
            for split in ("train", "valid")
        )
        for split, tokens in (("train", train), ("valid", valid)):
            if len(tokens.source_lengths) != len(tokens.target_lengths):
                raise UserError(f"{path}: {split} has unequal sides: run fasttfm prepare again")
        return cls(path, description, source_tokenizer, target_tokenizer, train, valid)

    @property
    def joint(self) -> bool:
        """Whether source and target share one vocabulary."""
        return self.source_tokenizer is self.target_tokenizer

    @property
    def model_files(self) -> list[Path]:
        """The SentencePiece files, one when joint, else source then target: what a model directory must copy."""
        names = ("spm.model",) if self.joint else ("spm.src.model", "spm.tgt.model")
        return [self.path / name for name in names]

    @property
    def valid_source_text(self) -> list[str]:
        """The raw source lines of the validation pairs."""
        return _load_text(self.path / "valid.src.txt", len(self.valid))

    @property
    def valid_target_text(self) -> list[str]:
        """The raw target lines of the validation pairs: the references."""
        return _load_text(self.path / "valid.tgt.txt", len(self.valid))


def is_prepared(path: Path, fingerprint: dict[str, Any]) -> bool:
    """Whether path already holds, whole, exactly what these inputs and options give."""
    description = _description(path)
    if description is None or description.get("fingerprint") != fingerprint:
        return False
    try:
        PreparedData.open(path)
    except UserError:
        return False  # a file is missing or damaged: preparing again is the remedy, so it has to be done
    return all((path / f"valid.{side}.txt").is_file() for side in ("src", "tgt"))


def check_replaceable(path: Path) -> None:
    """Raise UserError when path is something that `prepare` did not make and must not overwrite."""
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir():
        raise UserError(f"{path}: exists and is not a directory: choose another --out")
    if any(path.iterdir()) and _description(path) is None:
        raise UserError(
            f"{path}: this directory holds other files and is not prepared data: choose another --out, or empty it"
        )


@contextmanager
def building(path: Path) -> Iterator[Path]:
    """A fresh directory that takes the place of `path` when the block ends well, and vanishes when it does not."""
    check_replaceable(path)
    path = Path(os.path.realpath(path))  # a link to a larger disk stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    fresh = path.parent / f".{path.name}.preparing-{os.getpid()}"
    fresh.mkdir()
    try:
        yield fresh
        check_replaceable(path)  # again: minutes may have passed
        old = path.parent / f".{path.name}.replaced-{os.getpid()}"
        if path.is_dir():
            path.rename(old)
        fresh.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def save_side(directory: Path, split: str, side: str, sentences: list[np.ndarray], dtype: np.dtype) -> None:
    """Write the ids and offsets of one side of one split."""
    ids, offsets = _flat(sentences, dtype)
    _save(directory / f"{split}.{side}.npy", ids)
    _save(directory / f"{split}.{side}.offsets.npy", offsets)


def save_text(path: Path, lines: Sequence[str]) -> None:
    """Write lines as UTF-8 with "\\n" ends, byte for byte as they were read."""
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())


def save_description(directory: Path, content: dict[str, Any]) -> None:
    text = yaml.safe_dump({"format": FORMAT, **content}, sort_keys=False, allow_unicode=True)
    (directory / DESCRIPTION).write_bytes(text.encode())


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest type of the ids on disk: uint16 while it holds them, else int32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def _flat(sentences: Sequence[Sequence[int] | np.ndarray], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.zeros(len(sentences) + 1, dtype=np.int64)
    np.cumsum([len(sentence) for sentence in sentences], out=offsets[1:])
    ids = np.empty(int(offsets[-1]), dtype=dtype)
    for i, sentence in enumerate(sentences):
        ids[offsets[i] : offsets[i + 1]] = sentence
    return ids, offsets


def _save(path: Path, array: np.ndarray) -> None:
    # numpy's own writing loses the reason (disk full) when a write fails; plain file writes keep it.
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.tobytes())


def _load_side(path: Path, split: str, side: str, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    file = path / f"{split}.{side}.npy"
    ids = _load(file, (np.uint16, np.int32))
    offsets = _load(path / f"{split}.{side}.offsets.npy", (np.int64,))
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(ids) or (offsets[1:] < offsets[:-1]).any():
        raise UserError(f"{file}: does not match its offsets: run fasttfm prepare again")
    # one pass over memory that training reads anyway; an embedding would fail on the id in the middle of an epoch
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        wrong = int(ids.max() if ids.max() >= vocab_size else ids.min())
        raise UserError(
            f"{file}: holds the token {wrong}, but the vocabulary has {vocab_size:,}: run fasttfm prepare again"
        )
    return ids, offsets


def _load(path: Path, dtypes: tuple[type, ...]) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.ndim != 1 or array.dtype not in dtypes:
            raise ValueError(f"{array.ndim} dimensions of {array.dtype}")
    except FileNotFoundError:
        raise UserError(f"{path}: missing from the prepared data: run fasttfm prepare again") from None
    # numpy reads the header as Python text, so that a flipped bit may raise nearly anything
    except (ValueError, EOFError, SyntaxError, TokenError, TypeError, OverflowError, MemoryError) as error:
        raise UserError(f"{path}: cut off or damaged ({error}): run fasttfm prepare again") from None
    return array


def _load_text(path: Path, lines: int) -> list[str]:
    try:
        text = path.read_bytes().decode().split("\n")[:-1]
    except FileNotFoundError:
        raise UserError(f"{path}: missing from the prepared data: run fasttfm prepare again") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: damaged, it is not valid UTF-8: run fasttfm prepare again") from None
    if len(text) != lines:
        raise UserError(f"{path}: has {len(text):,} lines for {lines:,} pairs: run fasttfm prepare again")
    return text


def _description(path: Path) -> dict[str, Any] | None:
    try:
        content = yaml.safe_load((path / DESCRIPTION).read_bytes())
    except (OSError, yaml.YAMLError, RecursionError):
        return None
    whole = isinstance(content, dict) and content.get("format") == FORMAT
    return content if whole and content.get("vocabulary") in ("joint", "separate") else None


def _remove_leftovers(path: Path) -> None:
    """Remove what runs that were killed have left beside path; another run that is still at work is left alone."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.(preparing|replaced)-(\d+)")
    for sibling in path.parent.iterdir():
        match = pattern.fullmatch(sibling.name)
        if not match or _is_running(int(match.group(2))):
            continue
        if match.group(1) == "replaced" and not path.exists():
            sibling.rename(path)  # killed between the two renames: the old data is still whole
        else:
            shutil.rmtree(sibling, ignore_errors=True)


def _is_running(pid: int) -> bool:
    if os.name == "nt":
        return True  # os.kill would end the process there; leftovers stay until the user removes them
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()
