"""Token-budget batches: pairs of like length together, a bounded padded size, and an order that needs no state.

Pairs are padded to a few dozen sizes that are chosen for the corpus (fasttfm.data.shapes), and consecutive pairs of a
size fill a batch while rows * width stays within max_tokens, where width is the longer of the two padded sides. Only
the lengths decide where a batch ends, so every epoch has batches of the same shapes: the largest is known before
training starts. What an epoch draws anew, from (seed, epoch) alone, is which of the pairs of a size go together and the
order of the batches.

With subword sampling the lengths are known only when segmentations are drawn. Batches are then planned for the mean
length of draws; an epoch draws a window of 128 batches at a time and packs its pairs by what was drawn into as many
batches again, of the same sizes (of 29,000 image captions 36 shapes with 11% padding).

Padding is what costs most when it is not looked after: with 60% padding an epoch took 250 s, with 5% 100 s
("Transformer Details Not Described in The Paper").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fasttfm.data.prepared import ParallelTokens
from fasttfm.data.sampling import SubwordSampler, sentence_keys
from fasttfm.data.shapes import SIZES, PlannedBatches, choose_sizes, plan_batches
from fasttfm.data.tensor_batch import TensorBatch
from fasttfm.data.tokenizer import BOS, EOS, PAD, Tokenizer

_SAMPLING_PROBES = 2000
_SAMPLING_MARGIN = 1.1
"""With sampling, batches are planned for the mean length of segmentations drawn for up to _SAMPLING_PROBES pairs, and
this much more, because those of a window are packed less tightly than those of the whole corpus."""
_SAMPLING_SIZES = 32
"""Most sizes with sampling: a window has only a few batches of each."""
_SAMPLING_THINNED = (1, 2, 3, 4, 6, 8)
"""A window may leave out sizes: it takes every one, every second one, and so on."""
_WINDOW = 128
"""Batches that are drawn and cut together with sampling."""
_GIVEN_UP = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Where the segmentations of a window do not fit into its batches, this share of the pairs, those that grew most, keeps
SentencePiece's own."""


@dataclass(frozen=True, slots=True)
class Batch(TensorBatch):
    """B pairs, padded with 0 on the right. Lengths and token counts include eos; bos is counted nowhere."""

    source: torch.Tensor
    """(B, S) int64: the tokens, then eos."""
    source_lengths: torch.Tensor
    """(B,) int64."""
    target_in: torch.Tensor
    """(B, L) int64: bos, then the tokens."""
    target_out: torch.Tensor
    """(B, L) int64: the tokens, then eos; target_out[:, t] is what follows target_in[:, :t + 1]."""
    target_lengths: torch.Tensor
    """(B,) int64."""
    source_tokens: int
    """Source tokens without padding."""
    target_tokens: int
    """Target tokens without padding: what the loss is summed over."""

    def __len__(self) -> int:
        return len(self.source)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, padded source length, padded target length: what a matrix product's shape follows from."""
        return len(self.source), self.source.shape[1], self.target_in.shape[1]

    @property
    def cells(self) -> int:
        """Places of the two padded matrices."""
        return self.source.numel() + self.target_in.numel()

    @property
    def padding_ratio(self) -> float:
        """The share of the two padded matrices that is padding."""
        return 1.0 - (self.source_tokens + self.target_tokens) / self.cells


class TokenBatches(PlannedBatches):
    """The batches of training pairs.

    max_tokens: the largest rows * max(S, L) of a batch, eos counted. max_length: pairs with more tokens than this on
    a side (eos not counted), or that alone would exceed max_tokens, are skipped; `skipped` counts them.
    sampling: above 0, the training text is segmented anew at every visit (see DataConfig.subword_sampling), drawn from
    (seed, epoch, pair) alone; tokenizers then says with what, as (source, target).
    """

    def __init__(
        self,
        pairs: ParallelTokens,
        max_tokens: int,
        seed: int = 0,
        max_length: int | None = None,
        sampling: float = 0.0,
        tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
    ) -> None:
        if sampling and tokenizers is None:
            raise ValueError("sampling needs the tokenizers")
        self.pairs = pairs
        self.unit = "pair"
        self.max_tokens = max_tokens
        self.seed = seed  # what is drawn to learn the mean length depends on it
        self._samplers = _samplers(tokenizers, sampling) if sampling and tokenizers is not None else None
        self._window: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        # Widths as batches see them: with eos, and as long as sampled segmentations are on average.
        source_widths, target_widths = pairs.source_lengths + 1, pairs.target_lengths + 1
        fits = np.maximum(source_widths, target_widths) <= max_tokens
        if self._samplers is not None:
            longer = self._mean_lengthening() * _SAMPLING_MARGIN
            source_widths, target_widths = (
                np.maximum(widths, np.minimum(np.ceil(widths * longer).astype(np.int64), max_tokens))
                for widths in (source_widths, target_widths)
            )
        if max_length is not None:
            fits &= np.maximum(pairs.source_lengths, pairs.target_lengths) <= max_length
        kept = np.flatnonzero(fits)
        self.skipped = len(pairs) - len(kept)
        """Number of pairs left out for their length."""
        if len(kept) == 0:
            raise ValueError(f"no pair has at most {max_length} tokens on each side and fits batches of {max_tokens}")
        widths = source_widths[kept], target_widths[kept]
        self._sizes = choose_sizes(*widths, max_tokens, SIZES if self._samplers is None else _SAMPLING_SIZES)
        plan = plan_batches(*widths, self._sizes, max_tokens)
        if self._samplers is not None:
            self._sizes = _with_larger(self._sizes, max_tokens)
        self._planned = int(sum(side.sum() for side in widths))
        super().__init__(plan, kept, len(pairs), seed)

    @property
    def padding_ratio(self) -> float:
        """The share of padding over all batches of an epoch, source and target together (as planned if sampling)."""
        return 1.0 - self._planned / float(self._cells.sum())

    @property
    def target_tokens(self) -> int:
        """Target tokens of an epoch, eos included, without padding."""
        return int((self.pairs.target_lengths + 1)[self._sorted].sum())

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """As PlannedBatches; with sampling, the pairs of 128 batches at a time are then packed anew."""
        planned = super().epoch(epoch)
        return planned if self._samplers is None else _Windows(self, planned, epoch)

    def largest(self) -> np.ndarray:
        """As PlannedBatches; with sampling of the first window, and no batch exceeds max_tokens on either side."""
        if self._samplers is None:
            return super().largest()
        order = self.epoch(0)
        window = [order[i] for i in range(min(_WINDOW, len(order)))]
        return max(window, key=lambda indices: self.batch(indices).cells)

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Batch:
        """The tensors of one element of epoch(), to be asked for before the next element.

        epoch matters only with sampling: each visit draws anew.
        """
        if self._samplers is None:
            source, target = map(self.pairs.source, indices), map(self.pairs.target, indices)
            return collate([*source], [*target], self._size_of[indices[0]])
        keys = [(epoch, i) for i in indices.tolist()]
        if not all(key in self._window for key in keys):
            return collate(*self._drawn(indices, epoch))
        size = self._window[keys[0]][2]
        return collate([self._window[key][0] for key in keys], [self._window[key][1] for key in keys], size)

    def redraw(self, planned: Sequence[np.ndarray], epoch: int, window: int) -> list[np.ndarray]:
        """The pairs of planned batches in as many other batches, of like length by the segmentations drawn for them.

        Remembers these for batch(). What comes out depends on (seed, epoch) and which pairs there are, nothing else.
        """
        indices = np.sort(np.concatenate(planned))
        drawn = self._drawn(indices, epoch)
        unsampled = [*map(self.pairs.source, indices)], [*map(self.pairs.target, indices)]
        lengths = np.array([[len(ids) for ids in side] for sides in (drawn, unsampled) for side in sides])  # (4, pairs)
        growth = np.where(lengths[:2].max(axis=0) < self.max_tokens, (lengths[:2] - lengths[2:]).sum(axis=0), np.inf)
        most_grown = np.argsort(-growth, kind="stable")
        for share in _GIVEN_UP:
            stays = np.zeros(len(indices), dtype=bool)
            stays[most_grown[: max(math.ceil(share * len(indices)), int(np.isinf(growth).sum()))]] = True
            kept = [[old if keep else new for new, old, keep in zip(*sides, stays)] for sides in zip(drawn, unsampled)]
            widths = [np.array([len(ids) + 1 for ids in side], dtype=np.int64) for side in kept]
            batches = _cut(widths[0], widths[1], self._sizes, self.max_tokens, len(planned))
            if batches is not None:
                break
        else:  # not even SentencePiece's own segmentations can be packed anew: as they were planned
            kept = [*unsampled]
            batches = [(np.searchsorted(indices, each), self._size_of[each[0]]) for each in planned]
        self._window = {
            (epoch, int(indices[i])): (kept[0][i], kept[1][i], size) for group, size in batches for i in group
        }
        order = np.random.default_rng([self.seed, epoch, window]).permutation(len(batches))
        return [indices[batches[i][0]] for i in order]

    def _drawn(self, indices: np.ndarray, epoch: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """A segmentation of each pair's source and target, from (seed, epoch, pair)."""
        assert self._samplers is not None
        source, target = (
            sampler.sample([read(i) for i in indices], sentence_keys(self.seed, epoch, indices, side))
            for side, (sampler, read) in enumerate(zip(self._samplers, (self.pairs.source, self.pairs.target)))
        )
        return source, target

    def _mean_lengthening(self) -> float:
        """How many times as long as SentencePiece's own the segmentations are, eos included."""
        probes = np.linspace(0, len(self.pairs) - 1, min(len(self.pairs), _SAMPLING_PROBES)).astype(np.int64)
        drawn = sum(len(ids) + 1 for side in self._drawn(probes, 0) for ids in side)
        return max(1.0, drawn / float((self.pairs.source_lengths + self.pairs.target_lengths + 2)[probes].sum()))


class _Windows(Sequence[np.ndarray]):
    """An epoch's batches with sampling: each _WINDOW of them is drawn when the first of them is asked for."""

    def __init__(self, batches: TokenBatches, planned: Sequence[np.ndarray], epoch: int) -> None:
        self._batches, self._planned, self._epoch = batches, planned, epoch
        self._window = -1
        self._redrawn: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self._planned)

    def __getitem__(self, i):
        i = range(len(self._planned))[i]  # IndexError at the end, and -1 is the last
        if i // _WINDOW != self._window:
            self._window = i // _WINDOW
            planned = self._planned[self._window * _WINDOW :][:_WINDOW]
            self._redrawn = self._batches.redraw(planned, self._epoch, self._window)
        return self._redrawn[i % _WINDOW]


def collate(
    source: Sequence[Sequence[int] | np.ndarray],
    target: Sequence[Sequence[int] | np.ndarray],
    size: Sequence[int] | np.ndarray | None = None,
) -> Batch:
    """One batch of pairs of ids, which carry neither bos nor eos, padded to size (S, L) or to the longest of each."""
    source_ids, source_lengths = pad_sentences(source, None if size is None else int(size[0]))
    target_out, target_lengths = pad_sentences(target, None if size is None else int(size[1]))
    target_in = np.full(target_out.shape, PAD, dtype=np.int64)
    target_in[:, 0] = BOS
    for row, ids in enumerate(target):
        target_in[row, 1 : len(ids) + 1] = ids
    return Batch(
        source=source_ids,
        source_lengths=source_lengths,
        target_in=torch.from_numpy(target_in),
        target_out=target_out,
        target_lengths=target_lengths,
        source_tokens=int(source_lengths.sum()),
        target_tokens=int(target_lengths.sum()),
    )


def pad_sentences(
    source: Sequence[Sequence[int] | np.ndarray], width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B, S) int64, each row a sentence's tokens then eos, and lengths (B,) int64 with eos; S: width or longest."""
    lengths = np.array([len(ids) + 1 for ids in source], dtype=np.int64)
    padded = np.full((len(source), int(lengths.max(initial=1)) if width is None else width), PAD, dtype=np.int64)
    for row, ids in enumerate(source):
        padded[row, : len(ids)] = ids
        padded[row, len(ids)] = EOS
    return torch.from_numpy(padded), torch.from_numpy(lengths)


def _cut(
    source: np.ndarray, target: np.ndarray, sizes: np.ndarray, max_tokens: int, count: int
) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Places of all pairs in exactly `count` batches, each with its size; None where max_tokens is too little."""
    # with fewer sizes fewer pairs move to a larger one than theirs to fill its batches: what pays depends on the pairs
    plans = [plan_batches(source, target, sizes[::-keep][::-1], max_tokens) for keep in _SAMPLING_THINNED]
    plan = min(plans, key=lambda plan: (max(len(plan.sizes), count), int(plan.cells.sum())))
    batches = list(zip(np.split(plan.order, plan.bounds[1:-1]), plan.sizes))
    if len(batches) > count:
        batches = _exact(source, target, max_tokens)
    if len(batches) > count:
        return None
    while len(batches) < count:
        cells = [len(group) * size.max() if len(group) > 1 else 0 for group, size in batches]
        largest = int(np.argmax(cells))
        group, size = batches[largest]
        batches[largest : largest + 1] = [(half, size) for half in np.array_split(group, 2)]
    return batches


def _exact(source: np.ndarray, target: np.ndarray, max_tokens: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """As few batches as possible, each as long as its longest pair: for when sizes take too much."""
    order = np.argsort(np.maximum(source, target), kind="stable")[::-1]
    batches = []
    while len(order):
        group = order[: max_tokens // int(max(source[order[0]], target[order[0]]))]
        batches.append((group, np.array([source[group].max(), target[group].max()])))
        order = order[len(group) :]
    return batches


def _with_larger(sizes: np.ndarray, max_tokens: int) -> np.ndarray:
    """sizes, and larger ones up to max_tokens for draws that are longer than what was planned for."""
    larger, longest = [], int(sizes.max())
    while longest < max_tokens:
        longest = min(2 * longest, max_tokens)
        larger.append([longest, longest])
    return np.vstack([sizes, *map(np.atleast_2d, larger)])


def _samplers(tokenizers: tuple[Tokenizer, Tokenizer], amount: float) -> tuple[SubwordSampler, SubwordSampler]:
    source = SubwordSampler(tokenizers[0], amount)
    return source, source if tokenizers[1] is tokenizers[0] else SubwordSampler(tokenizers[1], amount)
