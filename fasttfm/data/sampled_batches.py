"""Batches of text that is drawn anew (subword sampling, case augmentation): a window is packed by the drawn lengths.

Batches are planned for the mean length of draws. The batches of a part of the lengths (fasttfm.data.epochs), a window
at a time, are then repacked by the drawn lengths into as many batches. A window follows from (seed, epoch, part,
window) alone, so a rank draws only for the parts that it computes. Worker processes draw the next window while this one
trains: drawing is Python, and a thread would compete with kernel launches for the interpreter.
"""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from fasttfm.data.batches import Batch, TokenBatches, collate
from fasttfm.data.case import CaseAugment, Sides
from fasttfm.data.epochs import MadeWhenAsked
from fasttfm.data.prepared import ParallelTokens
from fasttfm.data.sampling import SubwordSampler, sentence_keys
from fasttfm.data.shapes import length_batches, round_length
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.system.processes import WorkerPool

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
_GIVEN_UP = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of pairs, those that grew most, that keep SentencePiece's own segmentation where a window's do not fit into
its batches; tried in this order."""

Pairs = tuple[Sides, tuple[np.ndarray, np.ndarray]]
"""Pairs that are to be drawn, as SentencePiece gives them, and the sampling.sentence_keys of each side."""
Group = tuple[np.ndarray, Sequence[int]]
"""A batch: places of its pairs in their window (B,), and what source and target are padded to (2,)."""


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Case augmentation and subword sampling, as far as a run has them."""

    case: CaseAugment | None
    samplers: tuple[SubwordSampler, SubwordSampler] | None
    """Of source and target, the same object where the vocabulary is joint."""

    def draw(self, pairs: Pairs) -> Sides:
        """Source and target of each pair."""
        sides, keys = pairs
        if self.case is not None:
            sides = self.case.cased(sides, keys[0])
        if self.samplers is None:
            return sides
        source, target = (sampler.sample(ids, key) for sampler, ids, key in zip(self.samplers, sides, keys))
        return source, target


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A window as it is trained on."""

    order: list[np.ndarray]
    """Its batches, as arrays of pairs' numbers."""
    rows: dict[int, tuple[np.ndarray, np.ndarray, Sequence[int]]]
    """Of each pair its source, its target, and what its batch is padded to."""


class SampledBatches(TokenBatches):
    """The batches of training pairs whose text is drawn anew at every visit, from (seed, epoch, pair) alone."""

    most_sizes = 32  # of the plan, whose batches a window packs anew

    def __init__(
        self,
        pairs: ParallelTokens,
        max_tokens: int,
        seed: int = 0,
        max_length: int | None = None,
        *,
        amount: float,
        tokenizers: tuple[Tokenizer, Tokenizer],
        case: CaseAugment | None = None,
        together: int = 1,
        processes: int = 0,
    ) -> None:
        """amount: DataConfig.subword_sampling. tokenizers: of source and target. case: None leaves it as it is.
        processes: which draw; 0: this one.

        The rest is TokenBatches', errors of amount and tokenizers SubwordSampler's.
        """
        self.pairs, self.seed = pairs, seed
        samplers = {tokenizer: SubwordSampler(tokenizer, amount) for tokenizer in tokenizers} if amount else {}
        self._drawing = _Drawing(case, (samplers[tokenizers[0]], samplers[tokenizers[1]]) if amount else None)
        remedy = "run the same command again, which goes on from the last checkpoint"
        self._pool = WorkerPool(self._drawing, processes, remedy=remedy) if processes else None
        self._threads = ThreadPoolExecutor(max(1, processes), "sampling")
        longer = self._mean_lengthening() * _MARGIN
        super().__init__(pairs, max_tokens, seed, max_length, together=together, longer=longer)
        self._window_batches = max(_LEAST_WINDOW, _WINDOW // self.together)
        self._lock = threading.Lock()
        self._windows: dict[tuple[int, int, int], Future[_Drawn]] = {}
        """Of (epoch, part, window), oldest first."""

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """The batches of an epoch as arrays of pairs' numbers; a window is drawn when its first batch is asked for."""
        return MadeWhenAsked(len(self), partial(self._packed, super().epoch(epoch), epoch))

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Batch:
        """The tensors of one element of epoch(), or of a part of it; of other pairs, as long as their draws are."""
        with self._lock:
            futures = [future for (each, *_), future in self._windows.items() if each == epoch and future.done()]
        for drawn in (future.result() for future in reversed(futures)):
            if int(indices[0]) in drawn.rows:
                rows = [drawn.rows[i] for i in indices.tolist()]
                return collate([row[0] for row in rows], [row[1] for row in rows], rows[0][2])
        return collate(*self._drawing.draw(self._read(indices, epoch)))

    def _packed(self, planned: Sequence[np.ndarray], epoch: int, place: int) -> np.ndarray:
        """The batch at a place of an epoch. Drawing its window begins now if it has not, and that of the next, too.

        planned: the epoch's batches as they were planned.
        """
        part = (epoch * len(self) + place) % self.together
        first = (part - epoch * len(self)) % self.together
        """The first place of the part in this epoch."""
        number, within = divmod((place - first) // self.together, self._window_batches)
        with self._lock:
            drawn = self._begin(planned, first, epoch, part, number)
            if self._pool is not None:
                self._begin(planned, first, epoch, part, number + 1)
        return drawn.result().order[within]

    def _begin(self, planned: Sequence[np.ndarray], first: int, *key: int) -> Future[_Drawn]:
        """Draw a window unless it is drawn; the lock is held."""
        epoch, part, number = key
        if (epoch, part, number) in self._windows:
            return self._windows[(epoch, part, number)]
        size = self._window_batches * self.together
        places = range(len(self))[first + number * size : first + (number + 1) * size : self.together]
        if not places:
            return Future()  # past the end
        batches = [planned[place] for place in places]
        indices = np.sort(np.concatenate(batches))
        groups = [(np.searchsorted(indices, batch), self.padded_to(batch[0]).tolist()) for batch in batches]
        pairs = self._read(indices, epoch)

        def draw() -> _Drawn:
            given = pairs, groups, self.max_tokens
            sides, packed = pack(self._drawing, *given) if self._pool is None else self._pool.call(pack, *given)
            rows = {int(indices[i]): (sides[0][i], sides[1][i], size) for group, size in packed for i in group}
            order = np.random.default_rng([self.seed, *key]).permutation(len(packed))
            return _Drawn([indices[packed[i][0]] for i in order], rows)

        for old in [each for each in self._windows if each[1] == part][: 1 - _KEPT]:
            del self._windows[old]
        self._windows[(epoch, part, number)] = self._threads.submit(draw)
        return self._windows[(epoch, part, number)]

    def _read(self, indices: np.ndarray, epoch: int) -> Pairs:
        sides = [self.pairs.source(i) for i in indices], [self.pairs.target(i) for i in indices]
        return sides, (sentence_keys(self.seed, epoch, indices, 0), sentence_keys(self.seed, epoch, indices, 1))

    def _mean_lengthening(self) -> float:
        """Return how many times as long as SentencePiece's own the segmentations are, eos included."""
        probes = np.linspace(0, len(self.pairs) - 1, min(len(self.pairs), _PROBES)).astype(np.int64)
        drawn = sum(len(ids) + 1 for side in self._drawing.draw(self._read(probes, 0)) for ids in side)
        own = self.pairs.source_lengths[probes] + self.pairs.target_lengths[probes] + 2
        return max(1.0, drawn / float(own.sum()))


def pack(drawing: _Drawing, pairs: Pairs, planned: list[Group], max_tokens: int) -> tuple[Sides, list[Group]]:
    """Draw a window's pairs, and put them into as many batches of like length as were planned; in any process."""
    drawn, own = drawing.draw(pairs), pairs[0]
    lengths = np.array([[len(ids) + 1 for ids in side] for sides in (drawn, own) for side in sides])  # (4, pairs)
    growth = np.where(lengths[:2].max(axis=0) <= max_tokens, (lengths[:2] - lengths[2:]).sum(axis=0), np.inf)
    most_grown = np.argsort(-growth, kind="stable")
    for share in _GIVEN_UP:
        stays = np.zeros(len(growth), dtype=bool)
        stays[most_grown[: max(math.ceil(share * len(growth)), int(np.isinf(growth).sum()))]] = True
        widths = np.where(stays, lengths[2:], lengths[:2])  # (2, pairs)
        batches = length_batches(widths.max(axis=0), max_tokens)
        if len(batches) <= len(planned):
            source, target = (
                [old if keep else new for new, old, keep in zip(*each, stays)] for each in zip(drawn, own)
            )
            return (source, target), _padded(batches, widths, max_tokens, len(planned))
    return own, planned  # SentencePiece's own do not fit otherwise


def _padded(batches: list[list[int]], widths: np.ndarray, max_tokens: int, count: int) -> list[Group]:
    """The batches with what they are padded to; the largest are halved until there are `count`."""
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
