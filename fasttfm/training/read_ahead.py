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


class ReadAhead:
    """Prefetches consecutive batches."""

    def __init__(
        self, batches: TrainingBatches, together: int, rank: int = 0, size: int = 1, ahead: int = _AHEAD
    ) -> None:
        """together: batches per update, shared by `size` ranks; ahead: batches to prefetch."""
        self._batches, self._together, self._ahead = batches, together, ahead
        self._rank, self._size = rank, size
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._coming: deque[tuple[Place, Future[TrainingBatch | None]]] = deque()
        self._order: tuple[int, Sequence[np.ndarray]] = (-1, [])  # used by the thread only

    def get(self, place: Place) -> tuple[TrainingBatch | None, Place]:
        """This rank's rows of the batch at a position (None: it has none), and the position after it.

        Prefetches the batches after it. Re-raises errors of the thread.
        """
        if self._coming and self._coming[0][0] != place:
            self.forget()
        while len(self._coming) <= self._ahead:
            coming = self._after(self._coming[-1][0]) if self._coming else place
            self._coming.append((coming, self._thread.submit(self._rows, coming)))
        return self._coming.popleft()[1].result(), self._after(place)

    def forget(self) -> None:
        """Discard the prefetched batches."""
        for _, future in self._coming:
            future.cancel()
        self._coming.clear()

    def close(self) -> None:
        """Discard the prefetched batches and join the thread; get() starts another."""
        self.forget()
        self._thread.shutdown(cancel_futures=True)
        self._thread = ThreadPoolExecutor(1, "read-ahead")

    def _after(self, place: Place) -> Place:
        """The next position."""
        epoch, batch = divmod(place.epoch * len(self._batches) + place.batch + 1, len(self._batches))
        return Place(epoch, batch, (place.number + 1) % self._together)

    def _rows(self, place: Place) -> TrainingBatch | None:
        """This rank's rows of a batch; runs in the thread."""
        if place.epoch != self._order[0]:
            self._order = place.epoch, self._batches.epoch(place.epoch)
        begin, end = self._share(place.number, self._size)
        if begin == end:  # with sampling, indexing the order draws the batch
            return None
        indices = self._order[1][place.batch]
        begin, end = self._share(place.number, len(indices))
        return self._batches.batch(indices[begin:end], place.epoch) if begin < end else None

    def _share(self, index: int, rows: int) -> tuple[int, int]:
        """This rank's rows [begin, end) of batch `index` of an update."""
        return share_of_rows(self._rank, self._size, index, self._together, rows)
