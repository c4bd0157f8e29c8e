"""Prepared documents: running text as tokens on disk, and rows of it that are full and keep documents apart.

    data.yaml          what is inside, the options, counts and the SHA-256 of every text
    spm.model          the SentencePiece model; or bytes.json, or tokenizer.json
    {train,valid}.npy           all tokens, one document after the other, uint16 (or int32)
    {train,valid}.offsets.npy   document i is ids[offsets[i]:offsets[i + 1]], int64; its last token is `end`
    sha256sums         of all these (see fasttfm.system.folders)

A row is the next `row_length` tokens of the documents, wherever these begin and end: no cell is padding. A model is
given each token's predecessor, `begin` before the first of a document; a document's part of a row is a sequence of its
own, which sees nothing of its neighbours and counts its positions from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fasttfm.data.prepared import PreparedFolder, StoredIds, id_dtype, load_ids, read_description
from fasttfm.data.tensor_batch import TensorBatch
from fasttfm.errors import UserError
from fasttfm.system.folders import PREPARE_AGAIN, read_manifest, reading
from fasttfm_pretraining.data.text_tokenizer import TextTokenizer, load_text_tokenizer

FORMAT = "fasttfm prepared documents, version 1"


class Documents:
    """The documents of one split. A slice of their tokens is read when it is asked for."""

    def __init__(
        self, ids: np.ndarray | StoredIds, offsets: np.ndarray, text_bytes: int, end: int, begin: int | None = None
    ) -> None:
        """ids: all tokens. offsets (documents + 1,) int64. text_bytes: of the text that they are of.

        begin: what a model is given before the first token of a document; None: end.
        """
        self._ids = ids
        self.offsets = offsets
        self.bytes = text_bytes
        """UTF-8 bytes of the text, a line break a line counted: what bits per byte are divided by."""
        self.end = end
        self.begin = end if begin is None else begin

    @classmethod
    def from_lists(
        cls, documents: Sequence[Sequence[int]], end: int, text_bytes: int = 0, begin: int | None = None
    ) -> Documents:
        """Documents that are in memory, without `end`, which is added."""
        whole = [[*document, end] for document in documents]
        ids = np.array([token for document in whole for token in document], np.int64)
        return cls(ids, np.cumsum([0, *map(len, whole)]), text_bytes, end, begin)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents, their ends included."""
        return int(self.offsets[-1])

    def read(self, begin: int, end: int) -> np.ndarray:
        """Tokens [begin, end) of all, int64."""
        return self._ids[begin:end].astype(np.int64)

    def row(self, number: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row `number` of rows of so many tokens, the last of which may be shorter: inputs, targets, lengths.

        inputs and targets (tokens,) int64; lengths (sequences,) int64: of the documents' parts, one after the other.
        """
        begin = number * length
        end = min(begin + length, self.tokens)
        targets = self.read(max(begin - 1, 0), end)
        before, targets = (self.end, targets) if begin == 0 else (int(targets[0]), targets[1:])
        first, last = np.searchsorted(self.offsets, (begin, end), side="right")
        starts = np.unique([begin, *self.offsets[first:last]])
        lengths = np.diff([*starts[starts < end], end])
        inputs = np.array([before, *targets[:-1]], np.int64)
        opening, after = np.searchsorted(self.offsets[:-1], (begin, end))
        inputs[self.offsets[opening:after] - begin] = self.begin
        return inputs, targets, lengths


@dataclass(frozen=True, slots=True)
class TextBatch(TensorBatch):
    """N packed sequences: T tokens without padding."""

    tokens: torch.Tensor
    """(1, T) int64: inputs."""
    targets: torch.Tensor
    """(1, T) int64: what comes after each of them."""
    lengths: torch.Tensor
    """(N,) int64."""
    longest: int
    """Length of the longest sequence."""
    rows: int
    """Number of rows that the sequences are cut from."""

    @property
    def source_tokens(self) -> int:
        """T: every token is predicted."""
        return 0

    @property
    def target_tokens(self) -> int:
        """The number of elements T."""
        return self.tokens.numel()

    @property
    def cells(self) -> int:
        """T: there is no padding."""
        return self.tokens.numel()

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and tokens."""
        return self.rows, self.tokens.numel()

    @property
    def is_even(self) -> bool:
        """Whether all sequences have the same length, so that tokens.view(N, longest) has one per row."""
        return len(self.lengths) * self.longest == self.tokens.numel()


class RowBatches:
    """Batches of rows, reshuffled each epoch. The position (epoch, batch) is the whole state."""

    unit = "row"
    skipped = 0
    padding_ratio = 0.0

    def __init__(self, documents: Documents, row_length: int, max_tokens: int, seed: int = 0) -> None:
        """max_tokens: of a batch, at least row_length."""
        self.documents, self.row_length, self.max_tokens, self.seed = documents, row_length, max_tokens, seed
        self.rows = -(-documents.tokens // row_length)
        self.rows_per_batch = max_tokens // row_length

    def __len__(self) -> int:
        return -(-self.rows // self.rows_per_batch)

    @property
    def target_tokens(self) -> int:
        """Number of target tokens of an epoch."""
        return self.documents.tokens

    @property
    def shapes(self) -> int:
        """Full batches, the last one, and those with the last row."""
        return min(3, len(self))

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Row indices of each batch; they depend on (seed, epoch) only."""
        order = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        return np.split(order, range(self.rows_per_batch, self.rows, self.rows_per_batch))

    def in_order(self) -> list[np.ndarray]:
        """The same without shuffling: for validation."""
        return np.split(np.arange(self.rows), range(self.rows_per_batch, self.rows, self.rows_per_batch))

    def largest(self) -> np.ndarray:
        """The first rows."""
        return np.arange(min(self.rows, self.rows_per_batch))

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Any:
        """The TextBatch of these rows."""
        rows = [self.documents.row(int(number), self.row_length) for number in indices]
        tokens, targets, lengths = (torch.from_numpy(np.concatenate(part)) for part in zip(*rows))
        return TextBatch(tokens[None], targets[None], lengths, int(lengths.max()), len(indices))


@dataclass(eq=False)
class PreparedDocuments(PreparedFolder):
    """A prepared directory of documents."""

    tokenizer: TextTokenizer
    train: Documents
    valid: Documents

    @classmethod
    def open(cls, path: Path | str) -> PreparedDocuments:
        path = Path(path)
        with reading(path, PREPARE_AGAIN):
            description = _description(path)
            read_manifest(path)
            tokenizer = load_text_tokenizer(path)
            splits = []
            for split in ("train", "valid"):
                ids, stored = load_ids(path, split)
                offsets = stored[:]
                if ids.dtype != id_dtype(len(tokenizer)) or (np.diff(offsets) <= 0).any():
                    raise UserError(f"{ids.path}: is damaged or of another vocabulary: {PREPARE_AGAIN}")
                text_bytes = int(description[split]["bytes"])
                splits.append(Documents(ids, offsets, text_bytes, tokenizer.end, tokenizer.begin))
        return cls(path, description, tokenizer, *splits)

    @property
    def model_files(self) -> list[Path]:
        """The tokenizer's file, which a model directory copies."""
        return [self.path / self.tokenizer.file]


def _description(path: Path) -> dict[str, Any]:
    content = read_description(path, FORMAT)
    with suppress(KeyError, TypeError):
        if content is not None and all(isinstance(content[split]["bytes"], int) for split in ("train", "valid")):
            return content
    what = "is a model directory" if (path / "config.yaml").exists() else "holds no prepared documents"
    raise UserError(f"{path}: {what}: give the directory that fasttfm lm prepare made")
