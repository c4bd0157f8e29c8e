"""Batches for subword sampling: each window of the epoch is segmented anew, then packed by the sampled lengths.

Batches are planned for the mean sampled length. The batches of one part of the lengths (fasttfm.data.epochs) are then
repacked, window by window, into the same number of batches. A window depends on (seed, epoch, part, window) alone, so a
rank samples only the parts that it computes. Worker processes prepare the next windows while this one trains:
sampling is Python code, and a thread would compete with kernel launches for the interpreter.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from fasttfm.data.batches import Batch, TokenBatches, collate
from fasttfm.data.epochs import LazyBatches
from fasttfm.data.prepared import ParallelTokens
from fasttfm.data.sampling import SubwordSampler
from fasttfm.data.shapes import length_batches, round_length
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.system.processes import WorkerPool

_PROBES = 2000
_MARGIN = 1.1
"""Batches are planned for the mean sampled length of up to _PROBES pairs times this margin, because a window packs less
tightly than the whole corpus."""
_WINDOW = 128
"""Batches that are sampled and packed together, over all parts."""
_LEAST_WINDOW = 16
"""Minimum window of one part."""
AHEAD = 2
"""Windows of a part that workers prepare while another one trains."""
_FALLBACK_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of pairs (those that grew most) that keep SentencePiece's own segmentation if a window does not fit its
batches; tried in this order."""

Samplers = tuple[SubwordSampler, SubwordSampler]
"""For source and target; the same object for a joint vocabulary."""
Sides = list[list[np.ndarray]]
"""Ids of sources, and of targets, pair by pair."""
Group = tuple[np.ndarray, Sequence[int]]
"""A batch: indices of its pairs in their window (B,), and the padded source and target lengths (2,)."""
Rows = dict[int, tuple[np.ndarray, np.ndarray, Sequence[int]]]
"""Pair index -> source ids, target ids, padded size of its batch."""
Window = tuple[list[np.ndarray], Rows]
"""A sampled and packed window: its batches, as arrays of pair indices, and their rows."""


class SampledBatches(TokenBatches):
    """Training batches that segment each pair anew at every visit, from (seed, epoch, pair) alone."""

    most_sizes = 32  # of the plan; windows are repacked anyway

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
        """amount: DataConfig.subword_sampling. tokenizers: of source and target. processes: sampling workers; 0 samples
        in this process.

        The other arguments are TokenBatches'. Raises the errors of SubwordSampler.
        """
        self.pairs, self.seed = pairs, seed
        by_tokenizer = {tokenizer: SubwordSampler(tokenizer, amount) for tokenizer in tokenizers}
        self._samplers = by_tokenizer[tokenizers[0]], by_tokenizer[tokenizers[1]]
        remedy = "run the same command again to resume from the last checkpoint"
        self._pool = WorkerPool(self._samplers, processes, remedy=remedy) if processes else None
        self._threads = ThreadPoolExecutor(max(1, processes), "sampling")
        longer = self._mean_lengthening() * _MARGIN
        super().__init__(pairs, max_tokens, seed, max_length, together=together, longer=longer)
        self._window_batches = max(_LEAST_WINDOW, _WINDOW // self.together)
        self._lock = threading.Lock()
        self._windows: dict[tuple[int, int, int], Future[Window]] = {}
        """(epoch, part, window) -> its result, oldest first."""

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """The batches of an epoch as arrays of pair indices; a window is sampled on first access to its batches."""
        return LazyBatches(len(self), partial(self._packed, super().epoch(epoch), epoch))

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Batch:
        """The tensors of (part of) a batch of epoch(). Other pairs are padded to their longest segmentation."""
        with self._lock:
            futures = [future for (each, *_), future in self._windows.items() if each == epoch and future.done()]
        for _, rows in (future.result() for future in reversed(futures)):
            if int(indices[0]) in rows:
                sources, targets, sizes = zip(*(rows[i] for i in indices.tolist()))
                return collate(sources, targets, sizes[0])
        source, target = sample(self._samplers, *self._read(indices, epoch))
        return collate(source, target)

    def _packed(self, planned: Sequence[np.ndarray], epoch: int, position: int) -> np.ndarray:
        """The batch at this position of the epoch; starts sampling its window and, with workers, the next ones.

        planned: the epoch's batches before packing.
        """
        part = (epoch * len(self) + position) % self.together
        first = (part - epoch * len(self)) % self.together  # the part's first position in this epoch
        number, within = divmod((position - first) // self.together, self._window_batches)
        with self._lock:
            window = self._start(planned, first, epoch, part, number)
            if self._pool is not None:
                for later in range(number + 1, number + 1 + AHEAD):
                    self._start(planned, first, epoch, part, later)
        return window.result()[0][within]

    def _start(self, planned: Sequence[np.ndarray], first: int, *key: int) -> Future[Window]:
        """The result of a window, cached or begun now; the caller holds the lock."""
        epoch, part, number = key
        if (epoch, part, number) in self._windows:
            return self._windows[(epoch, part, number)]
        size = self._window_batches * self.together
        positions = range(len(self))[first + number * size : first + (number + 1) * size : self.together]
        if not positions:
            return Future()  # past the end
        batches = [planned[position] for position in positions]
        indices = np.sort(np.concatenate(batches))
        groups = [(np.searchsorted(indices, batch), self.padded_to(batch[0]).tolist()) for batch in batches]
        args = *self._read(indices, epoch), groups, self.max_tokens

        def compute() -> Window:
            sides, packed = pack(self._samplers, *args) if self._pool is None else self._pool.call(pack, *args)
            rows = {int(indices[i]): (sides[0][i], sides[1][i], size) for group, size in packed for i in group}
            order = np.random.default_rng([self.seed, *key]).permutation(len(packed))
            return [indices[packed[i][0]] for i in order], rows

        for old in [each for each in self._windows if each[1] == part][: -1 - AHEAD]:
            del self._windows[old]
        self._windows[(epoch, part, number)] = self._threads.submit(compute)
        return self._windows[(epoch, part, number)]

    def _read(self, indices: np.ndarray, epoch: int) -> tuple[Sides, list[tuple[int, ...]]]:
        """SentencePiece's segmentations of pairs, and the key of each pair's samples."""
        sides = [[self.pairs.source(i) for i in indices], [self.pairs.target(i) for i in indices]]
        return sides, [(self.seed, epoch, i) for i in indices.tolist()]

    def _mean_lengthening(self) -> float:
        """Sampled length over SentencePiece's own length, eos included, as a mean over the probes; at least 1."""
        probes = np.linspace(0, len(self.pairs) - 1, min(len(self.pairs), _PROBES)).astype(np.int64)
        sampled = sum(len(ids) + 1 for side in sample(self._samplers, *self._read(probes, 0)) for ids in side)
        own = self.pairs.source_lengths[probes] + self.pairs.target_lengths[probes] + 2
        return max(1.0, sampled / float(own.sum()))


def sample(samplers: Samplers, own: Sides, keys: list[tuple[int, ...]]) -> Sides:
    """A segmentation of each source and each target."""
    return [[samplers[n].sample(ids, *key, n) for ids, key in zip(side, keys)] for n, side in enumerate(own)]


def pack(
    samplers: Samplers, own: Sides, keys: list[tuple[int, ...]], planned: list[Group], max_tokens: int
) -> tuple[Sides, list[Group]]:
    """Sample a window and pack it by length into as many batches as were planned; runs in any process."""
    sampled = sample(samplers, own, keys)
    lengths = np.array([[len(ids) + 1 for ids in side] for sides in (sampled, own) for side in sides])  # (4, pairs)
    growth = np.where(lengths[:2].max(axis=0) <= max_tokens, (lengths[:2] - lengths[2:]).sum(axis=0), np.inf)
    place = np.argsort(np.argsort(-growth, kind="stable"))  # 0: grew most
    for share in _FALLBACK_SHARES:
        stays = (place < share * len(growth)) | np.isinf(growth)
        widths = np.where(stays, lengths[2:], lengths[:2])  # (2, pairs)
        batches = length_batches(widths.max(axis=0), max_tokens)
        if len(batches) <= len(planned):
            sides = [[old if keep else new for new, old, keep in zip(*side, stays)] for side in zip(sampled, own)]
            return sides, _padded(batches, widths, max_tokens, len(planned))
    return own, planned  # not even SentencePiece's own segmentations fit by length


def _padded(batches: list[list[int]], widths: np.ndarray, max_tokens: int, count: int) -> list[Group]:
    """The batches with their padded sizes; the largest are halved until there are `count`."""
    groups: list[Group] = []
    for batch in batches:
        longest = widths[:, batch].max(axis=1).tolist()
        groups.append((np.array(batch), [min(max_tokens, round_length(length)) for length in longest]))
    while len(groups) < count:
        cells = [len(group) * max(size) if len(group) > 1 else 0 for group, size in groups]
        largest = int(np.argmax(cells))
        group, size = groups[largest]
        groups[largest : largest + 1] = [(half, size) for half in np.array_split(group, 2)]
    return groups
