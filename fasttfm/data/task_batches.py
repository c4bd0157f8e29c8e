"""Batches of a task's examples: rows of like length together, a bounded padded size, an order that needs no state.

An example is one row (a text, a pair, a window) or several (the choices of a question) and what is right of it.
Examples are padded to a few sizes chosen for the data, as pairs for translation are, so that an epoch has few shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fasttfm.data.shapes import choose_sizes, length_batches, plan_batches, round_length
from fasttfm.data.task_inputs import Row
from fasttfm.data.tokenizer import PAD


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """B examples of C rows each, padded with 0 on the right; R = B * C, the rows of an example are neighbours."""

    tokens: Tensor
    """(R, S) int64."""
    segments: Tensor
    """(R, S) int64: 1 from the second text on, else 0."""
    lengths: Tensor
    """(R,) int64."""
    labels: Tensor
    """(B,) int64; or (B, 2): the places of an answer's first and last token."""
    source_tokens: int
    """Tokens without padding."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def target_tokens(self) -> int:
        """What the loss is summed over: examples."""
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and padded length."""
        return tuple(self.tokens.shape)

    @property
    def cells(self) -> int:
        """Places of the padded rows, and of the labels."""
        return self.tokens.numel() + len(self.labels)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TaskBatch:
        """The same batch with its tensors on device; from pinned memory when it is a GPU and non_blocking."""

        def move(tensor: Tensor) -> Tensor:
            return (tensor.pin_memory() if non_blocking else tensor).to(device, non_blocking=non_blocking)

        return replace(
            self, tokens=move(self.tokens), segments=move(self.segments), lengths=move(self.lengths),
            labels=move(self.labels),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Examples:
    """What a task consists of."""

    rows: Sequence[Sequence[Row]]
    """Of each example its rows, equally many of all."""
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


class TaskBatches:
    """The training batches of examples. Position (epoch, batch) is all the state there is, so resuming is exact.

    max_tokens: the largest padded tokens of a batch; examples that alone exceed it are left out, `skipped` counts them.
    Raises ValueError where none is left.
    """

    unit = "example"

    def __init__(self, examples: Examples, max_tokens: int, seed: int = 0) -> None:
        self.examples, self.max_tokens, self.seed = examples, max_tokens, seed
        lengths, budget = examples.lengths, max_tokens // examples.choices
        kept = np.flatnonzero(lengths <= budget)
        self.skipped = len(examples) - len(kept)
        """Examples left out for their length."""
        if not len(kept):
            raise ValueError(
                f"no example of at least {lengths.min() * examples.choices} tokens fits batches of {max_tokens}"
            )
        widths = lengths[kept]
        plan = plan_batches(widths, widths, choose_sizes(widths, widths, budget), budget)
        self.shapes = plan.shapes
        """Number of different (rows, length) in an epoch."""
        self._sorted, self._bounds, self._widths = kept[plan.order], plan.bounds, plan.sizes[:, 0]
        rows = np.diff(plan.bounds)
        self._padded = rows * self._widths * examples.choices
        self._ties = np.repeat(np.cumsum(np.append(False, np.diff(self._widths) != 0)), rows)
        self._width_of = np.zeros(len(examples), np.int64)
        self._width_of[self._sorted] = np.repeat(self._widths, rows)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._widths)

    @property
    def target_tokens(self) -> int:
        """Examples of an epoch."""
        return len(self._sorted)

    @property
    def padding_ratio(self) -> float:
        """The share of padding over all batches of an epoch."""
        real = sum(len(row.tokens) for index in self._sorted for row in self.examples.rows[index])
        return 1.0 - real / float(self._padded.sum())

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """The batches of an epoch as arrays of places, in training order; drawn from (seed, epoch) alone."""
        random = np.random.default_rng([self.seed, epoch])
        shuffled = random.permutation(len(self._sorted))
        regrouped = self._sorted[shuffled[np.argsort(self._ties[shuffled], kind="stable")]]
        batches = np.split(regrouped, self._bounds[1:-1])
        return [batches[i] for i in random.permutation(len(batches))]

    def largest(self) -> np.ndarray:
        """The places of a batch of the largest padded size."""
        i = int(np.argmax(self._padded))
        return self._sorted[self._bounds[i] : self._bounds[i + 1]]

    def batch(self, indices: np.ndarray, epoch: int = 0) -> TaskBatch:
        """The tensors of one element of epoch(), which are the same in every epoch."""
        return self.examples.batch(indices, int(self._width_of[indices[0]]))


def evaluation_batches(examples: Examples, max_tokens: int) -> list[tuple[np.ndarray, TaskBatch]]:
    """All examples, each with its place, in batches of like length: for validation and prediction."""
    groups = length_batches(examples.lengths, max_tokens // examples.choices)
    return [
        (np.array(group), examples.batch(group, round_length(int(examples.lengths[group].max())))) for group in groups
    ]
