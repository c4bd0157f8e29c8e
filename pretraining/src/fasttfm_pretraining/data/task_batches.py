"""Batches of task examples: rows of similar length, bounded padded size, stateless order.

An example is one row (a text, a pair, a window) or several (the choices of a question), with a label. Examples are
padded to a few lengths chosen for the data, as translation pairs are, so that an epoch has few shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fasttfm.data.epochs import PlannedBatches
from fasttfm.data.shapes import choose_sizes, length_batches, plan_batches, round_length
from fasttfm.data.tensor_batch import TensorBatch
from fasttfm.data.tokenizer import PAD
from fasttfm_pretraining.data.task_inputs import Row


@dataclass(frozen=True, slots=True)
class TaskBatch(TensorBatch):
    """B examples of C rows each, padded with 0 on the right; R = B * C, the rows of an example are adjacent."""

    tokens: Tensor
    """(R, S) int64."""
    segments: Tensor
    """(R, S) int64: 0 in the first text, 1 in the second."""
    lengths: Tensor
    """(R,) int64."""
    labels: Tensor
    """(B,) int64; or (B, 2): positions of an answer's first and last token."""
    source_tokens: int
    """Tokens without padding."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def target_tokens(self) -> int:
        """Number of terms of the loss: examples."""
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and padded length."""
        return tuple(self.tokens.shape)

    @property
    def cells(self) -> int:
        """Elements of the padded rows and of the labels."""
        return self.tokens.numel() + len(self.labels)


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples of a task."""

    rows: Sequence[Sequence[Row]]
    """Rows of each example, the same number for all."""
    labels: np.ndarray
    """(N,) or (N, 2) int64."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def choices(self) -> int:
        """Rows of an example."""
        return len(self.rows[0])

    @property
    def lengths(self) -> np.ndarray:
        """(N,) int64: of each example's longest row."""
        return np.array([max(len(row.tokens) for row in rows) for rows in self.rows], np.int64)

    def batch(self, indices: Sequence[int] | np.ndarray, width: int | None = None) -> TaskBatch:
        """The examples of indices, padded to width or to the longest row."""
        rows = [row for index in indices for row in self.rows[index]]
        lengths = np.array([len(row.tokens) for row in rows], np.int64)
        tokens = np.full((len(rows), width or int(lengths.max(initial=1))), PAD, np.int64)
        segments = np.zeros_like(tokens)
        for number, row in enumerate(rows):
            tokens[number, : len(row.tokens)] = row.tokens
            segments[number, row.second : len(row.tokens)] = 1
        labels = self.labels[np.asarray(indices, np.int64)]
        return TaskBatch(
            tokens=torch.from_numpy(tokens),
            segments=torch.from_numpy(segments),
            lengths=torch.from_numpy(lengths),
            labels=torch.from_numpy(labels),
            source_tokens=int(lengths.sum()),
        )


class TaskBatches(PlannedBatches):
    """The training batches of examples. None is wider than the longest example: a model may have no more positions.

    max_tokens: maximum padded tokens of a batch; longer single examples are left out and counted in `skipped`.
    Raises ValueError if none is left.
    """

    unit = "example"

    def __init__(self, examples: Examples, max_tokens: int, seed: int = 0, *, together: int = 1) -> None:
        """together: batches per update, of mixed lengths."""
        self.examples, self.max_tokens = examples, max_tokens
        lengths, budget = examples.lengths, max_tokens // examples.choices
        kept = lengths <= budget
        self.skipped = len(examples) - int(kept.sum())
        """Examples left out for their length."""
        if not kept.any():
            raise ValueError(
                f"no example of at least {lengths.min() * examples.choices} tokens fits batches of {max_tokens}"
            )
        widths = np.where(kept, lengths, 0)
        plan = plan_batches(widths, widths, choose_sizes(widths, widths, int(widths.max())), budget)
        super().__init__(plan, len(examples), seed, together)

    @property
    def target_tokens(self) -> int:
        """Examples of an epoch."""
        return len(self._sorted)

    @property
    def padding_ratio(self) -> float:
        """The share of padding over all batches of an epoch."""
        real = sum(len(row.tokens) for index in self._sorted for row in self.examples.rows[index])
        padded = self._cells.sum() // 2 * self.examples.choices  # planned as pairs of equal sides
        return 1.0 - real / float(padded)

    def batch(self, indices: np.ndarray, epoch: int = 0) -> TaskBatch:
        """Tensors of one element of epoch(); they are the same in every epoch."""
        return self.examples.batch(indices, int(self.padded_to(indices[0])[0]))


def evaluation_batches(examples: Examples, max_tokens: int) -> list[tuple[np.ndarray, TaskBatch]]:
    """All examples with their indices, in batches of similar length, for validation and prediction."""
    lengths = examples.lengths
    groups = length_batches(lengths, max_tokens // examples.choices)
    widths = [min(round_length(int(lengths[group].max())), int(lengths.max())) for group in groups]
    return [(np.array(group), examples.batch(group, width)) for group, width in zip(groups, widths)]
