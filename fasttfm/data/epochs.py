"""The order of an epoch: the pairs of each batch, and updates whose batches are of all lengths.

Batches hold pairs of like length to save padding; an update of several batches should still look like a random sample
of the corpus. The batches of an epoch are sorted by length and cut into as many parts as an update has batches, and
every update takes one batch of each part, redrawn in every epoch. What is left over begins the next epoch's first
update. Ranks take neighbouring batches of an update (fasttfm.training.workers.share_of_rows), so the shortest stands
beside the longest: halves and quarters of an update cost about the same.
"""

from collections.abc import Callable, Sequence

import numpy as np

from fasttfm.data.shapes import Plan


class PlannedBatches:
    """The training batches of a plan. Position (epoch, batch) is all the state there is, so resuming is exact.

    Examples of a size trade places in every epoch, and the batches come in another order.
    """

    def __init__(self, plan: Plan, count: int, seed: int, together: int = 1) -> None:
        """count: examples there are, planned or not. together: batches of an update."""
        self.seed = seed
        self.together = together if together < len(plan.sizes) else 1
        """Parts of the lengths, each of which every update has a batch of; one where an update is an epoch or more."""
        self.shapes = plan.shapes
        """Number of different (rows, padded lengths) in an epoch, as planned."""
        self._sorted, self._bounds, self._cells = plan.order, plan.bounds, plan.cells
        self._widths = plan.sizes.sum(axis=1)
        # batches of a size are neighbours
        changes = np.flatnonzero((np.diff(plan.sizes, axis=0) != 0).any(axis=1)) + 1
        self._firsts = np.concatenate([[0], changes, [len(plan.sizes)]])
        """Of each size its first batch, and the number of batches."""
        self._sizes = plan.sizes[self._firsts[:-1]]
        self._size_of = np.zeros(count, np.uint8 if len(self._sizes) <= 256 else np.int32)
        for size in range(len(self._sizes)):
            self._size_of[self._sorted[self._span(size)]] = size

    def __len__(self) -> int:
        """Batches in an epoch, the same for every epoch."""
        return len(self._bounds) - 1

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """The batches of an epoch as arrays of examples' numbers, in training order; from (seed, epoch) alone.

        The examples of a size change places when the first batch of it is asked for.
        """
        random = np.random.default_rng([self.seed, epoch])
        order = mixed_order(self._widths, self.together, epoch * len(self), random)
        mixed: dict[int, np.ndarray] = {}

        def batch(place: int) -> np.ndarray:
            number = int(order[place])
            size = int(np.searchsorted(self._firsts, number, side="right")) - 1
            if size not in mixed:
                mixed[size] = self._sorted[self._span(size)].copy()
                np.random.default_rng([self.seed, epoch, size]).shuffle(mixed[size])
            begin, end = self._bounds[number : number + 2] - self._bounds[self._firsts[size]]
            return mixed[size][begin:end]

        return MadeWhenAsked(len(order), batch)

    def padded_to(self, example: int) -> np.ndarray:
        """(2,) int64: source and target length that an example's batch is padded to."""
        return self._sizes[self._size_of[example]]

    def largest(self) -> np.ndarray:
        """The examples of a batch of the largest padded size: run it first, and memory cannot run out later."""
        i = int(np.argmax(self._cells))
        return self._sorted[self._bounds[i] : self._bounds[i + 1]]

    def _span(self, size: int) -> slice:
        return slice(*self._bounds[self._firsts[size : size + 2]])


class MadeWhenAsked(Sequence[np.ndarray]):
    """Batches of which each is made when it is asked for."""

    def __init__(self, count: int, make: Callable[[int], np.ndarray]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[each] for each in range(self._count)[i]]
        return self._make(range(self._count)[i])  # IndexError at the end, and -1 is the last


def mixed_order(lengths: np.ndarray, together: int, first: int, random: np.random.Generator) -> np.ndarray:
    """An order (batches,) int64 of batches of these lengths in which every update has batches of all lengths.

    together: batches of an update. first: batches that were used up before the epoch, so that an update that two epochs
    share has them, too: the numbers first, first + 1, ... of a run from a multiple of `together` on are an update.
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
    """0 to count - 1 in an order whose halves and quarters have about the same sum: 0 7 3 4 1 6 2 5."""
    groups = [[number] for number in range(count)]
    while len(groups) > 1:
        half = len(groups) // 2
        middle = [groups[half]] if len(groups) % 2 else []
        groups = [low + high for low, high in zip(groups[:half], reversed(groups[-half:]))] + middle
    return np.array(groups[0])
