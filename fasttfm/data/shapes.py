"""Few shapes of batches: to which sizes pairs are padded, and which pairs of a corpus are a batch.

A matrix product of a new shape is expensive: libraries prepare code and memory for every (rows, length) that they meet
and keep it. An epoch therefore has a few dozen shapes in place of one for nearly every batch.

For training, at most SIZES sizes (source, target) are chosen for the corpus. Every pair is padded to the smallest size
that holds it, and all batches of a size have the same number of rows, as many as the budget allows. Choosing starts
from all lengths that occur and gives up, again and again, the size whose pairs lose least by moving to the next that
holds them. The pairs that are left when a size has filled its batches, the longest ones, move to the next size too, so
that only the largest size ends in a batch with fewer rows. A training log says how many shapes and how much padding
that came to.

Where lengths are not known beforehand (validation, translation), a length is rounded up to a fixed grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SIZES = 64
"""Most sizes that are chosen for a corpus."""
_MOST_CELLS = 600
"""Choosing begins with no more sizes than this, of lengths rounded to a grid that is coarse enough."""


def round_length(length: int, multiple: int = 1) -> int:
    """The next length on the grid: every one up to 16, then 8 in each doubling (18, 20 … 32, 36, 40 … 64, 72 …).

    multiple: a power of two; only its multiples on the grid count.
    """
    step = max(multiple, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


@dataclass(frozen=True, slots=True)
class Plan:
    """Which pairs are a batch."""

    order: np.ndarray
    """(pairs,) int64: the pairs' places, size by size."""
    bounds: np.ndarray
    """(batches + 1,) int64: batch b is order[bounds[b]:bounds[b + 1]]."""
    sizes: np.ndarray
    """(batches, 2) int64: what source and target of each batch are padded to."""

    @property
    def shapes(self) -> int:
        """Number of different (rows, source length, target length)."""
        return len(np.unique(np.column_stack([np.diff(self.bounds), self.sizes]), axis=0))

    @property
    def cells(self) -> np.ndarray:
        """(batches,) int64: places of both padded sides."""
        return np.diff(self.bounds) * self.sizes.sum(axis=1)


class PlannedBatches:
    """The training batches of a plan. Position (epoch, batch) is all the state there is, so resuming is exact.

    Examples of a size trade places in every epoch, and the batches of all sizes are shuffled.
    """

    def __init__(self, plan: Plan, kept: np.ndarray, count: int, seed: int) -> None:
        """kept: the numbers of the examples that were planned, of `count` in all."""
        self.seed = seed
        self.shapes = plan.shapes
        """Number of different (rows, padded lengths) in an epoch, as planned."""
        self._sorted, self._bounds, self._cells = kept[plan.order], plan.bounds, plan.cells
        rows = np.diff(plan.bounds)
        # examples of a size are neighbours: they get the same tie number
        changes = np.append(False, (np.diff(plan.sizes, axis=0) != 0).any(axis=1))
        self._ties = np.repeat(np.cumsum(changes), rows)
        self._size_of = np.zeros((count, 2), dtype=np.int64)  # of each example's batch
        self._size_of[self._sorted] = np.repeat(plan.sizes, rows, axis=0)

    def __len__(self) -> int:
        """Batches in an epoch, the same for every epoch."""
        return len(self._bounds) - 1

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """The batches of an epoch as arrays of examples' numbers, in training order; from (seed, epoch) alone."""
        random = np.random.default_rng([self.seed, epoch])
        shuffled = random.permutation(len(self._sorted))
        regrouped = self._sorted[shuffled[np.argsort(self._ties[shuffled], kind="stable")]]
        batches = np.split(regrouped, self._bounds[1:-1])
        return [batches[i] for i in random.permutation(len(batches))]

    def largest(self) -> np.ndarray:
        """The examples of a batch of the largest padded size: run it first, and memory cannot run out later."""
        i = int(np.argmax(self._cells))
        return self._sorted[self._bounds[i] : self._bounds[i + 1]]


def choose_sizes(source: np.ndarray, target: np.ndarray, max_tokens: int, most: int = SIZES) -> np.ndarray:
    """At most `most` sizes (K, 2) that hold all pairs of these lengths with little padding, smallest first."""
    cells, counts = _cells(source, target, max_tokens)
    top = cells.max(axis=0)
    sizes = np.unique(np.vstack([cells, top]), axis=0)
    # of each cell in each size; infinite where it does not fit
    cost = np.where(_holds(sizes, cells), sizes.sum(axis=1).astype(np.float64), np.inf)
    while len(sizes) > most:
        best, second = np.partition(cost, 1, axis=1)[:, :2].T
        loss = np.where(np.isfinite(second), second - best, 0.0) * counts
        loss = np.bincount(cost.argmin(axis=1), weights=loss, minlength=len(sizes))
        loss[(sizes == top).all(axis=1)] = np.inf  # the one that holds everything stays
        least = int(loss.argmin())
        sizes, cost = np.delete(sizes, least, axis=0), np.delete(cost, least, axis=1)
    return sizes[np.argsort(sizes.sum(axis=1), kind="stable")]


def plan_batches(source: np.ndarray, target: np.ndarray, sizes: np.ndarray, max_tokens: int) -> Plan:
    """Batches of pairs with these lengths, padded to sizes from choose_sizes: rows * longer side <= max_tokens."""
    smallest = _smallest(source, target, sizes)
    members = [np.flatnonzero(smallest == k) for k in range(len(sizes))]
    bounds, batch_sizes = [0], []
    for k, size in enumerate(sizes):
        rows = max_tokens // int(size.max())
        pairs = members[k]
        full = len(pairs) // rows * rows
        pairs = pairs[np.argsort(source[pairs] + target[pairs], kind="stable")]
        rest = pairs[full:]
        following = _smallest(source[rest], target[rest], sizes[k + 1 :]) + k + 1
        for later in np.unique(following[following > k]):
            members[later] = np.append(members[later], rest[following == later])
        members[k] = np.append(pairs[:full], rest[following == k])
        for begin in range(0, len(members[k]), rows):
            bounds.append(bounds[-1] + min(rows, len(members[k]) - begin))
            batch_sizes.append(size)
    return Plan(
        np.concatenate(members).astype(np.int64), np.array(bounds), np.array(batch_sizes, np.int64).reshape(-1, 2)
    )


def length_batches(
    lengths: Sequence[int] | np.ndarray, max_tokens: int, shortest: int = 1, *, alike: int | None = None
) -> list[list[int]]:
    """Places of sequences of similar length, longest first so that memory runs out at once or not at all.

    lengths: with everything that is padded counted. A batch has as many rows as max_tokens allows for its longest
    sequence, padded to round_length; a longer one than that is a batch of its own. A shorter sequence than `shortest`
    counts as that long: where its output may be long, each sentence takes caches for all of that. alike: lengths are
    padded to multiples of it, and all sequences of a batch to what each alone would be.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    batches = []
    while order:
        padded = round_length(int(lengths[order[0]]), alike or 1)
        rows = max(1, max_tokens // max(padded, shortest))
        if alike is not None:
            shorter = (
                row for row in range(len(order[:rows])) if round_length(int(lengths[order[row]]), alike) < padded
            )
            rows = next(shorter, rows)
        batches.append(order[:rows])
        order = order[rows:]
    return batches


def _cells(source: np.ndarray, target: np.ndarray, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The different (source, target) lengths on a grid, (C, 2) with C <= _MOST_CELLS, and how many pairs each has."""
    coarse = 1
    while True:
        rounded = []
        for lengths in (source, target):
            step = np.maximum(coarse, 1 << np.maximum(0, np.ceil(np.log2(lengths)).astype(np.int64) - 4))
            rounded.append(np.minimum(-(-lengths // step) * step, max_tokens))
        cells, counts = np.unique(np.column_stack(rounded), axis=0, return_counts=True)
        if len(cells) <= _MOST_CELLS:
            return cells, counts
        coarse *= 2


def _holds(sizes: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """(pairs, sizes) bool: whether each size holds each (source, target)."""
    return (sizes[None, :, 0] >= pairs[:, None, 0]) & (sizes[None, :, 1] >= pairs[:, None, 1])


def _smallest(source: np.ndarray, target: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The number of the smallest size that holds each pair, -1 where none does."""
    if not len(sizes) or not len(source):
        return np.full(len(source), -1, dtype=np.int64)
    cells, inverse = np.unique(np.column_stack([source, target]), axis=0, return_inverse=True)
    holds = _holds(sizes, cells)
    return np.where(holds.any(axis=1), holds.argmax(axis=1), -1)[inverse.reshape(-1)]
