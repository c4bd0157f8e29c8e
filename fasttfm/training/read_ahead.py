"""A rank's batches in their order, made by a thread ahead of need.

Reading ids from the disk and padding them takes milliseconds a batch, for which the device would wait. What is made
follows from the position (epoch, batch, number in its update) alone, so that reading ahead changes nothing: who goes
back to an earlier position throws away what was made.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from fasttfm.training.protocols import TrainingBatch, TrainingBatches
from fasttfm.training.workers import share_of_rows

_AHEAD = 4
"""Batches that are made before they are needed."""


class Place(NamedTuple):
    """Place of a batch in an epoch."""

    epoch: int
    batch: int
    """In its epoch."""
    number: int
    """In its update."""


class Made(NamedTuple):
    """A batch that is ready."""

    rows: TrainingBatch | None
    """This rank's rows of it; None where it has none."""
    following: Place
    """The next batch; after the last of an epoch the first of the next one."""


class ReadAhead:
    """Gives batch after batch."""

    def __init__(
        self, batches: TrainingBatches, together: int, rank: int = 0, size: int = 1, ahead: int = _AHEAD
    ) -> None:
        """together: batches of an update, which `size` ranks divide. ahead: batches that are made beforehand."""
        self._batches, self._together, self._ahead = batches, together, ahead
        self._rank, self._size = rank, size
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._made: deque[Future[Made]] = deque()
        self._coming: Place | None = None
        """Place of the first of them."""
        # of the thread alone
        self._next = Place(0, 0, 0)
        self._order: tuple[int, Sequence[np.ndarray]] = (-1, [])

    def get(self, place: Place) -> Made:
        """The batch at a place; those after it are begun. Raises what making it has raised."""
        if place != self._coming or not self._made:
            self.forget()
            self._made.append(self._thread.submit(self._make, place))
        self._coming = None  # what fails is not gone on from
        made = self._made.popleft().result()
        self._coming = made.following
        while len(self._made) < self._ahead:
            self._made.append(self._thread.submit(self._make))
        return made

    def forget(self) -> None:
        """Throw away what was made."""
        for future in self._made:
            future.cancel()
        self._made.clear()

    def close(self) -> None:
        """Throw away what was made and wait for the thread's end. Whoever asks again begins another."""
        self.forget()
        self._thread.shutdown(cancel_futures=True)
        self._thread = ThreadPoolExecutor(1, "read-ahead")

    def _make(self, place: Place | None = None) -> Made:
        """The batch at a place, or the next one; in the thread."""
        place = place or self._next
        if place.epoch != self._order[0]:
            self._order = place.epoch, self._batches.epoch(place.epoch)
        order = self._order[1]
        number = (place.number + 1) % self._together
        is_last = place.batch + 1 == len(order)
        following = Place(place.epoch + 1, 0, number) if is_last else Place(place.epoch, place.batch + 1, number)
        self._next = following
        begin, end = self._share(place.number, self._size)
        if begin == end:  # with sampling, asking for the batch would draw it
            return Made(None, following)
        indices = order[place.batch]
        begin, end = self._share(place.number, len(indices))
        rows = self._batches.batch(indices[begin:end], place.epoch) if begin < end else None
        return Made(rows, following)

    def _share(self, index: int, rows: int) -> tuple[int, int]:
        """This rank's rows [begin, end) of an update's batch number `index`."""
        return share_of_rows(self._rank, self._size, index, self._together, rows)
