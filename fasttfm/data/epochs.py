"""Epoch order: which pairs form a batch, and which batches form an update.

A batch holds pairs of similar length to save padding, but an update of several batches should look like a random sample
of the corpus. So the batches of an epoch are sorted by length and cut into as many parts as an update has batches;
every update takes one batch of each part, reshuffled each epoch. Leftover batches start the next epoch's first update.
Ranks take neighbouring batches of an update (fasttfm.training.workers.share_of_rows), so the shortest is placed beside
the longest: halves and quarters of an update cost about the same.
"""

from collections.abc import Callable, Sequence

import numpy as np

from fasttfm.data.shapes import Plan


class PlannedBatches:
    """The training batches of a plan. The only state is the position (epoch, batch), so resuming is exact.

    Each epoch shuffles the examples of each size and the order of the batches.
    """

    def __init__(self, plan: Plan, count: int, seed: int, together: int = 1) -> None:
        """count: number of examples, planned or not. together: batches per update."""
        self.seed = seed
        self.together = together if together < len(plan.sizes) else 1
        """Number of length parts; every update has a batch of each. 1 if an update is an epoch or more."""
        self.shapes = plan.shapes
        """Number of distinct planned shapes (rows, padded lengths) in an epoch."""
        self._sorted, self._bounds, self._cells = plan.order, plan.bounds, plan.cells
        self._widths = plan.sizes.sum(axis=1)
        # batches of a size are neighbours
        changes = np.flatnonzero((np.diff(plan.sizes, axis=0) != 0).any(axis=1)) + 1
        self._firsts = np.concatenate([[0], changes, [len(plan.sizes)]])
        """First batch of each size, then the number of batches."""
        self._sizes = plan.sizes[self._firsts[:-1]]
        self._size_of = np.zeros(count, np.uint8 if len(self._sizes) <= 256 else np.int32)
        for size in range(len(self._sizes)):
            self._size_of[self._sorted[self._span(size)]] = size

    def __len__(self) -> int:
        """Batches per epoch, the same in every epoch."""
        return len(self._bounds) - 1

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """The batches of an epoch as arrays of example indices, in training order; depends on (seed, epoch) alone.

        The examples of a size are shuffled on first access to one of its batches.
        """
        random = np.random.default_rng([self.seed, epoch])
        order = mixed_order(self._widths, self.together, epoch * len(self), random)
        shuffled: dict[int, np.ndarray] = {}

        def batch(position: int) -> np.ndarray:
            number = int(order[position])
            size = int(np.searchsorted(self._firsts, number, side="right")) - 1
            if size not in shuffled:
                shuffled[size] = self._sorted[self._span(size)].copy()
                np.random.default_rng([self.seed, epoch, size]).shuffle(shuffled[size])
            begin, end = self._bounds[number : number + 2] - self._bounds[self._firsts[size]]
            return shuffled[size][begin:end]

        return LazyBatches(len(order), batch)

    def padded_to(self, example: int) -> np.ndarray:
        """(2,) int64: padded source and target length of the example's batch."""
        return self._sizes[self._size_of[example]]

    def largest(self) -> np.ndarray:
        """The examples of a batch of the largest padded size: if it runs first, memory cannot run out later."""
        i = int(np.argmax(self._cells))
        return self._sorted[self._bounds[i] : self._bounds[i + 1]]

    def _span(self, size: int) -> slice:
        return slice(*self._bounds[self._firsts[size : size + 2]])


class LazyBatches(Sequence[np.ndarray]):
    """A sequence that computes each batch on access."""

    def __init__(self, count: int, compute: Callable[[int], np.ndarray]) -> None:
        self._count, self._compute = count, compute

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[each] for each in range(self._count)[i]]
        return self._compute(range(self._count)[i])  # range checks the bounds and resolves negative indices


def mixed_order(lengths: np.ndarray, together: int, first: int, random: np.random.Generator) -> np.ndarray:
    """A random order (batches,) int64 in which every update has one batch of each length part.

    lengths: per batch. together: batches per update. first: batches used before this epoch, so that an update that
    spans two epochs has all parts as well: update u of a run has the batches u * together to (u + 1) * together - 1.
    """
    count = len(lengths)
    shuffled = random.permutation(count)
    if not 1 < together < count:
        return shuffled
    ascending = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    part = side_by_side(together)[(first + np.arange(count)) % together]
    parts = np.split(ascending, np.cumsum(np.bincount(part, minlength=together))[:-1])
    order = np.empty(count, np.int64)
    order[np.argsort(part, kind="stable")] = np.concatenate([random.permutation(each) for each in parts])
    return order


def side_by_side(count: int) -> np.ndarray:
    """0 to count - 1, ordered so that halves and quarters have about the same sum: 0 7 3 4 1 6 2 5."""
    groups = [[number] for number in range(count)]
    while len(groups) > 1:
        half = len(groups) // 2
        middle = [groups[half]] if len(groups) % 2 else []
        groups = [low + high for low, high in zip(groups[:half], reversed(groups[-half:]))] + middle
    return np.array(groups[0])
