"""Batches with subword sampling: windows of them are packed by the segmentations that are drawn for their pairs.

With subword sampling the lengths are known only when segmentations are drawn. Batches are planned for the mean length
of draws. An update has a batch of each part of the lengths (fasttfm.data.epochs); the batches of a part, a window of
them at a time, are then packed anew by what was drawn for their pairs, into as many batches again, of the same sizes.
What a window holds follows from (seed, epoch, part, window) alone: a rank draws for the parts that it computes,
whatever the others do. Where an update has fewer batches than there are ranks, those that share a batch draw for the
same pairs.

A window is drawn while the one before it is trained on, by processes: drawing is Python, and a thread of the training's
process would take turns with what launches its kernels.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from fasttfm.data.batches import Batch, TokenBatches, collate
from fasttfm.data.prepared import ParallelTokens
from fasttfm.data.sampled_windows import PairSampler, Sentences, Window
from fasttfm.data.sampling import sentence_keys
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.processes import WorkerPool

_PROBES = 2000
_MARGIN = 1.1
"""Batches are planned for the mean length of segmentations drawn for up to _PROBES pairs, and this much more, because
those of a window are packed less tightly than those of the whole corpus."""
_WINDOW = 128
"""Batches that are drawn and packed together, of all parts."""
_LEAST_WINDOW = 16
"""Of a part, at least so many."""
_KEPT = 3
"""Windows of a part that are kept: the one that is trained on, the next, and one that is looked at again."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A window as it is trained on."""

    order: list[np.ndarray]
    """Its batches, as arrays of pairs' numbers."""
    rows: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]
    """Of each pair its source, its target, and what its batch is padded to."""


class SampledBatches(TokenBatches):
    """The batches of training pairs whose text is segmented anew at every visit, from (seed, epoch, pair) alone."""

    most_sizes = 32  # a window has only a few batches of each

    def __init__(
        self,
        pairs: ParallelTokens,
        max_tokens: int,
        seed: int = 0,
        max_length: int | None = None,
        *,
        amount: float,
        tokenizers: tuple[Tokenizer, Tokenizer],
        together: int = 1,
        processes: int = 0,
    ) -> None:
        """amount: DataConfig.subword_sampling. tokenizers: of source and target. processes: which draw; 0: this one.

        The rest is TokenBatches'.
        """
        self.pairs, self.seed = pairs, seed
        self._sampler = PairSampler(tokenizers, amount)
        remedy = "run the same command again, which goes on from the last checkpoint"
        self._pool = WorkerPool(self._sampler, processes, remedy=remedy) if processes else None
        self._threads = ThreadPoolExecutor(max(1, processes), "sampling")
        longer = self._mean_lengthening() * _MARGIN
        super().__init__(pairs, max_tokens, seed, max_length, together=together, longer=longer)
        self._window_sizes = _with_larger(self._sizes, max_tokens)
        self._window_batches = max(_LEAST_WINDOW, _WINDOW // self.together)
        self._lock = threading.Lock()
        self._windows: dict[tuple[int, int, int], Future[_Drawn]] = {}
        """Of (epoch, part, window), oldest first."""

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """The batches of an epoch as arrays of pairs' numbers; a window is drawn when its first batch is asked for."""
        return _Windows(self, super().epoch(epoch), epoch)

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Batch:
        """The tensors of one element of epoch(), or of a part of it; of other pairs, as long as their draws are."""
        with self._lock:
            futures = [future for (each, *_), future in self._windows.items() if each == epoch and future.done()]
        for drawn in (future.result() for future in reversed(futures)):
            if int(indices[0]) in drawn.rows:
                rows = [drawn.rows[i] for i in indices.tolist()]
                return collate([row[0] for row in rows], [row[1] for row in rows], rows[0][2])
        return collate(*self._sampler.draw(*self._read(indices, epoch)))

    def window(self, planned: Sequence[np.ndarray], epoch: int, part: int, number: int) -> Sequence[np.ndarray]:
        """The batches of a window of a part, whose drawing begins now if it has not; that of the next one begins, too.

        planned: the epoch's batches as they were planned.
        """
        with self._lock:
            drawn = self._begin(planned, epoch, part, number)
            if self._pool is not None:
                self._begin(planned, epoch, part, number + 1)
        return drawn.result().order

    def places(self, epoch: int, part: int, window: int) -> range:
        """Return the places of a window's batches among those of an epoch."""
        first = (part - epoch * len(self)) % self.together
        size = self._window_batches * self.together
        return range(len(self))[first + window * size : first + (window + 1) * size : self.together]

    def window_of(self, epoch: int, place: int) -> tuple[int, int, int]:
        """Part and window that a batch of an epoch belongs to, and its place in that window."""
        part = (epoch * len(self) + place) % self.together
        number = (place - (part - epoch * len(self)) % self.together) // self.together
        return part, number // self._window_batches, number % self._window_batches

    def _begin(self, planned: Sequence[np.ndarray], *key: int) -> Future[_Drawn]:
        """Draw a window unless it is drawn; the lock is held."""
        epoch, part, number = key
        if (epoch, part, number) in self._windows:
            return self._windows[(epoch, part, number)]
        groups = [planned[place] for place in self.places(*key)]
        if not groups:
            return Future()  # past the end
        indices = np.sort(np.concatenate(groups))
        sides, keys = self._read(indices, epoch)
        places = [(np.searchsorted(indices, group), self.padded_to(group[0])) for group in groups]
        window = Window(sides=sides, keys=keys, planned=places, sizes=self._window_sizes, max_tokens=self.max_tokens)

        def draw() -> _Drawn:
            pack = PairSampler.pack
            packed = pack(self._sampler, window) if self._pool is None else self._pool.call(pack, window)
            rows = {
                int(indices[i]): (packed.sides[0][i], packed.sides[1][i], size)
                for group, size in packed.batches
                for i in group
            }
            order = np.random.default_rng([self.seed, *key]).permutation(len(groups))
            return _Drawn([indices[packed.batches[i][0]] for i in order], rows)

        for old in [each for each in self._windows if each[1] == part][: 1 - _KEPT]:
            del self._windows[old]
        self._windows[(epoch, part, number)] = self._threads.submit(draw)
        return self._windows[(epoch, part, number)]

    def _read(
        self, indices: np.ndarray, epoch: int
    ) -> tuple[tuple[Sentences, Sentences], tuple[np.ndarray, np.ndarray]]:
        """Both sides of pairs as SentencePiece segments them, and what decides their draws."""
        sides = [self.pairs.source(i) for i in indices], [self.pairs.target(i) for i in indices]
        return sides, (sentence_keys(self.seed, epoch, indices, 0), sentence_keys(self.seed, epoch, indices, 1))

    def _mean_lengthening(self) -> float:
        """Return how many times as long as SentencePiece's own the segmentations are, eos included."""
        probes = np.linspace(0, len(self.pairs) - 1, min(len(self.pairs), _PROBES)).astype(np.int64)
        drawn = sum(len(ids) + 1 for side in self._sampler.draw(*self._read(probes, 0)) for ids in side)
        own = self.pairs.source_lengths[probes] + self.pairs.target_lengths[probes] + 2
        return max(1.0, drawn / float(own.sum()))


class _Windows(Sequence[np.ndarray]):
    """An epoch's batches."""

    def __init__(self, batches: SampledBatches, planned: Sequence[np.ndarray], epoch: int) -> None:
        self._batches, self._planned, self._epoch = batches, planned, epoch

    def __len__(self) -> int:
        return len(self._planned)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[each] for each in range(len(self))[i]]
        place = range(len(self))[i]  # IndexError at the end, and -1 is the last
        part, window, within = self._batches.window_of(self._epoch, place)
        return self._batches.window(self._planned, self._epoch, part, window)[within]


def _with_larger(sizes: np.ndarray, max_tokens: int) -> np.ndarray:
    """sizes, one that holds all of them, and larger ones up to max_tokens for draws that are longer than planned."""
    larger, longest = [sizes.max(axis=0)], int(sizes.max())
    while longest < max_tokens:
        longest = min(2 * longest, max_tokens)
        larger.append(np.array([longest, longest]))
    if larger[-1].min() < max_tokens:
        larger.append(np.array([max_tokens, max_tokens]))
    return np.vstack([sizes, *larger])
