"""Prefetching of a rank's batches in a thread.

Reading ids from disk and padding them takes milliseconds per batch, for which the device would wait. A batch depends
only on its position (epoch, batch, number in its update), so prefetching changes no result: going back to an earlier
position discards the prefetched batches.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from fasttfm.training.protocols import TrainingBatch, TrainingBatches
from fasttfm.training.workers import share_of_rows

_AHEAD = 4
"""Batches to prefetch."""


class Place(NamedTuple):
    """Position of a batch."""

    epoch: int
    batch: int
    """In the epoch."""
    number: int
    """In the update."""


class Made(NamedTuple):
    """A batch that is ready."""

    rows: TrainingBatch | None
    """This rank's rows, or None."""
    following: Place
    """Of the next batch."""


class ReadAhead:
    """Prefetches consecutive batches."""

    def __init__(
        self, batches: TrainingBatches, together: int, rank: int = 0, size: int = 1, ahead: int = _AHEAD
    ) -> None:
        """together: batches per update, shared by `size` ranks; ahead: batches to prefetch."""
        self._batches, self._together, self._ahead = batches, together, ahead
        self._rank, self._size = rank, size
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._made: deque[Future[Made]] = deque()
        self._coming: Place | None = None
        """Position of the first prefetched batch."""
        # used by the thread only
        self._next = Place(0, 0, 0)
        self._order: tuple[int, Sequence[np.ndarray]] = (-1, [])

    def get(self, place: Place) -> Made:
        """The batch at a position; prefetches those after it. Re-raises errors of the thread."""
        if place != self._coming or not self._made:
            self.forget()
            self._made.append(self._thread.submit(self._make, place))
        self._coming = None  # restart after an error
        made = self._made.popleft().result()
        self._coming = made.following
        while len(self._made) < self._ahead:
            self._made.append(self._thread.submit(self._make))
        return made

    def forget(self) -> None:
        """Discard the prefetched batches."""
        for future in self._made:
            future.cancel()
        self._made.clear()

    def close(self) -> None:
        """Discard the prefetched batches and join the thread; get() starts another."""
        self.forget()
        self._thread.shutdown(cancel_futures=True)
        self._thread = ThreadPoolExecutor(1, "read-ahead")

    def _make(self, place: Place | None = None) -> Made:
        """The batch at a position, or the next one; runs in the thread."""
        place = place or self._next
        if place.epoch != self._order[0]:
            self._order = place.epoch, self._batches.epoch(place.epoch)
        order = self._order[1]
        number = (place.number + 1) % self._together
        is_last = place.batch + 1 == len(order)
        following = Place(place.epoch + 1, 0, number) if is_last else Place(place.epoch, place.batch + 1, number)
        self._next = following
        begin, end = self._share(place.number, self._size)
        if begin == end:  # with sampling, indexing the order draws the batch
            return Made(None, following)
        indices = order[place.batch]
        begin, end = self._share(place.number, len(indices))
        rows = self._batches.batch(indices[begin:end], place.epoch) if begin < end else None
        return Made(rows, following)

    def _share(self, index: int, rows: int) -> tuple[int, int]:
        """This rank's rows [begin, end) of batch `index` of an update."""
        return share_of_rows(self._rank, self._size, index, self._together, rows)
