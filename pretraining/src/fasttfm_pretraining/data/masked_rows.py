"""Rows of documents for masked language models, and their batches.

    one segment   [CLS] tokens [SEP]
    pairs         [CLS] first [SEP] second [SEP]     segments 0 and 1

A document's tokens are cut into consecutive spans. A pair is a span cut in two at the start of a line, or else of a
word. For next-sentence prediction half of the rows take their second part from another document (label 1); for sentence
order half of the rows swap the two parts (label 1). As in BERT, a segment is a span of text, not a grammatical
sentence. Masks, cuts and labels depend on (seed, epoch, row) only, so the position (epoch, batch) is the whole state.
Source: Devlin et al. 2019, section 3.1; Lan et al. 2020, section 3.1 (sentence order).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasttfm.data.epochs import mixed_order
from fasttfm.data.tensor_batch import TensorBatch
from fasttfm.data.tokenizer import PAD
from fasttfm_pretraining.data.documents import Documents
from fasttfm_pretraining.data.masking import Masker, MaskingVocabulary

_MULTIPLE = 8
"""Rows are padded to multiples of this length."""
_SHORTEST = 4
"""Spans with fewer tokens are left out."""


@dataclass(frozen=True, slots=True)
class MaskedBatch(TensorBatch):
    """B rows, padded with 0 on the right, M tokens of which are hidden."""

    tokens: Tensor
    """(B, L) int64: the masked rows."""
    segments: Tensor | None
    """(B, L) int64: 1 in the second segment; None for single segments."""
    lengths: Tensor
    """(B,) int64."""
    positions: Tensor
    """(M,) int64: flat positions of the masked tokens, padding counted."""
    labels: Tensor
    """(M,) int64: the original tokens there."""
    sentence_labels: Tensor | None
    """(B,) int64: 0 if the second segment follows the first, else 1; None for single segments."""
    source_tokens: int
    """Tokens without padding that are not predicted."""

    @property
    def target_tokens(self) -> int:
        """The number M of tokens that the loss is summed over."""
        return len(self.labels)

    @property
    def cells(self) -> int:
        """Places of the padded rows."""
        return self.tokens.numel()

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and padded length."""
        return tuple(self.tokens.shape)


class Spans(NamedTuple):
    """Places of each row's text."""

    begins: np.ndarray
    """(R,) int64."""
    ends: np.ndarray
    """(R,) int64."""
    documents: np.ndarray
    """(R,) int64, ascending."""
    skipped: int
    """Spans left out because they are too short."""

    @classmethod
    def of(cls, corpus: Documents, length: int) -> Spans:
        """Spans of at most `length` tokens, without the last token of each document, which ends it."""
        begins, ends, documents = [], [], []
        for number, (begin, end) in enumerate(zip(corpus.offsets[:-1], corpus.offsets[1:] - 1)):
            starts = np.arange(begin, end, length)
            begins.append(starts)
            ends.append(np.minimum(starts + length, end))
            documents.append(np.full(len(starts), number))
        if not begins:
            empty = np.empty(0, np.int64)
            return cls(empty, empty, empty, 0)
        first, last, document = (np.concatenate(each).astype(np.int64) for each in (begins, ends, documents))
        kept = last - first >= _SHORTEST
        return cls(first[kept], last[kept], document[kept], int((~kept).sum()))


class Pair(NamedTuple):
    """Two segments, and label 1 if the second does not follow the first."""

    first: np.ndarray
    second: np.ndarray
    label: int


class Pairs:
    """Makes pairs of the spans of a corpus."""

    def __init__(
        self, corpus: Documents, spans: Spans, vocabulary: MaskingVocabulary, *, order: bool, line: int | None
    ):
        """order: sentence order, else next sentence. line: the token of a line break."""
        self.corpus, self.spans, self.vocabulary, self.order, self.line = corpus, spans, vocabulary, order, line

    def pair(self, row: int, random: np.random.Generator) -> Pair:
        """The pair of a row's span."""
        text = self.corpus.read(int(self.spans.begins[row]), int(self.spans.ends[row]))
        cuts = np.arange(1, len(text))
        cut = self._cut(text, np.abs(2 * cuts - len(text)) <= len(text) // 2, random)  # in the middle half if it can
        first, second = text[:cut], text[cut:]
        if random.random() < 0.5:
            return Pair(first, second, 0)
        if self.order:
            return Pair(second, first, 1)
        return Pair(first, self._other(row, len(second), random), 1)

    def _cut(self, text: np.ndarray, fits: np.ndarray, random: np.random.Generator) -> int:
        """Choose where a second segment begins: line or word that fits, else any word, else anywhere.

        fits (tokens - 1,) bool: of the cuts before each token but the first.
        """
        cuts = np.arange(1, len(text))
        line_starts = text[:-1] == self.line if self.line is not None else np.zeros(len(cuts), bool)
        word_starts = self.vocabulary.begins_word[text[1:]]
        for allowed in (line_starts & fits, word_starts & fits, word_starts, np.ones(len(cuts), bool)):
            if allowed.any():
                return int(random.choice(cuts[allowed]))
        raise AssertionError("a span has at least two tokens")

    def _other(self, row: int, length: int, random: np.random.Generator) -> np.ndarray:
        """At most `length` tokens of another document, or of another span if there is only one document.

        They begin as the true ones do, at a line or a word: where they begin tells nothing.
        """
        documents = self.spans.documents
        first, last = np.searchsorted(documents, [documents[row], documents[row] + 1])
        if last - first == len(documents):
            first, last = row, row + 1
        if last - first == len(documents):  # there is no other
            first = last = 0
        other = int(random.integers(len(documents) - (last - first)))
        other += last - first if other >= first else 0
        text = self.corpus.read(int(self.spans.begins[other]), int(self.spans.ends[other]))
        last = len(text) - length
        begin = self._cut(text, np.arange(1, len(text)) <= last, random) if last > 0 else 0
        return text[begin : begin + length]


class MaskedBatches:
    """Batches of rows of similar length. The position (epoch, batch) is the whole state."""

    unit = "row"

    def __init__(
        self,
        corpus: Documents,
        masker: Masker,
        *,
        row_length: int,
        max_tokens: int,
        seed: int = 0,
        pairs: str | None = None,
        line: int | None = None,
        together: int = 1,
    ) -> None:
        """row_length: maximum tokens per row. max_tokens: maximum per batch, padding counted. pairs: nsp, sop or None.

        line: the line-break token, the preferred place to cut pairs. together: batches per update, of mixed lengths.
        Raises ValueError for documents without a row.
        """
        self.corpus, self.masker, self.max_tokens, self.seed, self.together = corpus, masker, max_tokens, seed, together
        self._markers = 2 if pairs is None else 3
        self.spans = Spans.of(corpus, row_length - self._markers)
        self.skipped = self.spans.skipped
        if not len(self.spans.begins):
            raise ValueError(f"no document has a span of {_SHORTEST} tokens")
        vocabulary = masker.vocabulary
        self._pairs = None if pairs is None else Pairs(corpus, self.spans, vocabulary, order=pairs == "sop", line=line)
        lengths = self.spans.ends - self.spans.begins
        self._lengths = lengths + self._markers
        self._widths = np.minimum(-(-self._lengths // _MULTIPLE) * _MULTIPLE, row_length)
        self._groups = [np.flatnonzero(self._widths == width) for width in np.unique(self._widths)]
        self._planned = self._split(self._groups)
        sizes, counts = np.unique(lengths, return_counts=True)
        self.target_tokens = sum(masker.budget(int(size)) * int(count) for size, count in zip(sizes, counts))
        """Hidden tokens of an epoch."""

    def __len__(self) -> int:
        return len(self._planned)

    @property
    def shapes(self) -> int:
        """Different shapes of the batches of an epoch."""
        return len({(len(batch), self._widths[batch[0]]) for batch in self._planned})

    @property
    def padding_ratio(self) -> float:
        """Share of padding in an epoch, as planned."""
        return 1.0 - float(self._lengths.sum() / self._widths.sum())

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Row indices of each batch; they depend on (seed, epoch) only."""
        random = np.random.default_rng([self.seed, epoch])
        batches = self._split([random.permutation(group) for group in self._groups])
        widths = np.array([self._widths[batch[0]] for batch in batches])
        return [batches[number] for number in mixed_order(widths, self.together, epoch * len(batches), random)]

    def in_order(self) -> Sequence[np.ndarray]:
        """The same without shuffling: for validation."""
        return self._planned

    def largest(self) -> np.ndarray:
        """The rows of the batch with the most elements."""
        return max(self._planned, key=lambda batch: len(batch) * int(self._widths[batch[0]]))

    def batch(self, indices: np.ndarray, epoch: int = 0) -> MaskedBatch:
        """The MaskedBatch of these rows."""
        width = int(self._widths[indices].max())
        tokens = np.full((len(indices), width), PAD, np.int64)
        segments = np.zeros_like(tokens)
        lengths, sentences = np.empty(len(indices), np.int64), np.empty(len(indices), np.int64)
        positions, labels = [], []
        for index, number in enumerate(indices.tolist()):
            random = np.random.default_rng([self.seed, epoch, number])
            row, second, sentences[index] = self.row(number, random)
            masked = self.masker(row, random)
            lengths[index] = len(row)
            tokens[index, : len(row)] = masked.tokens
            segments[index, second : len(row)] = 1
            positions.append(masked.positions + index * width)
            labels.append(masked.labels)
        hidden = np.concatenate(labels)
        return MaskedBatch(
            tokens=torch.from_numpy(tokens),
            segments=None if self._pairs is None else torch.from_numpy(segments),
            lengths=torch.from_numpy(lengths),
            positions=torch.from_numpy(np.concatenate(positions)),
            labels=torch.from_numpy(hidden),
            sentence_labels=None if self._pairs is None else torch.from_numpy(sentences),
            source_tokens=int(lengths.sum()) - len(hidden),
        )

    def row(self, number: int, random: np.random.Generator) -> tuple[np.ndarray, int, int]:
        """The tokens of a row before masking, where its second segment begins, and its label (0 for one segment)."""
        begin, end = self.masker.vocabulary.begin, self.masker.vocabulary.end
        if self._pairs is None:
            text = self.corpus.read(int(self.spans.begins[number]), int(self.spans.ends[number]))
            row = np.array([begin, *text, end], np.int64)
            return row, len(row), 0
        first, second, label = self._pairs.pair(number, random)
        return np.array([begin, *first, end, *second, end], np.int64), len(first) + 2, label

    def _split(self, groups: list[np.ndarray]) -> list[np.ndarray]:
        batches = []
        for group in groups:
            rows = max(1, self.max_tokens // int(self._widths[group[0]]))
            batches += np.split(group, range(rows, len(group), rows))
        return batches
