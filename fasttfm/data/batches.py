"""Token-budget batches: pairs of like length together, a bounded padded size, and an order that needs no state.

Pairs are grouped by source length and sorted by target length within a group, upwards and downwards in turn so that
neighbours stay alike across the boundary. A group spans 1 to 6 source lengths, whatever leaves least padding: large
batches of a small corpus want wider groups. Consecutive pairs fill a batch while rows * width stays within max_tokens,
where width is the longer of the two padded sides. Only the lengths decide where a batch ends, so every epoch has
batches of the same shapes: the largest is known before training starts. What an epoch draws anew, from (seed, epoch)
alone, is which of the equally long pairs go together and the order of the batches.

With subword sampling the lengths are known only when segmentations are drawn. Batches are then planned for the mean
length of draws; an epoch draws a window of 64 batches at a time and packs its pairs by what was drawn into as many
batches again (of 29,000 pairs of image captions 7% padding; with batches of like lengths before drawing it was 27%).

Padding is what costs most when it is not looked after: with 60% padding an epoch took 250 s, with 5% 100 s
("Transformer Details Not Described in The Paper").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fasttfm.data.prepared import ParallelTokens
from fasttfm.data.sampling import SubwordSampler, sentence_keys
from fasttfm.data.tokenizer import BOS, EOS, PAD, Tokenizer

_GROUP_SPANS = (1, 2, 3, 4, 6)
_SAMPLING_PROBES = 2000
_SAMPLING_MARGIN = 1.1
"""With sampling, batches are planned for the mean length of segmentations drawn for up to _SAMPLING_PROBES pairs, and
this much more, because those of a window are packed less tightly than those of the whole corpus."""
_WINDOW = 64
"""Batches that are drawn and cut together with sampling."""
_GIVEN_UP = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Where the segmentations of a window do not fit into its batches, this share of the pairs, those that grew most, keeps
SentencePiece's own."""


@dataclass(frozen=True, slots=True)
class Batch:
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
    def padding_ratio(self) -> float:
        """The share of the two padded matrices that is padding."""
        return 1.0 - (self.source_tokens + self.target_tokens) / (self.source.numel() + self.target_in.numel())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch with its tensors on device; from pinned memory when it is a GPU and non_blocking."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor.pin_memory() if non_blocking else tensor).to(device, non_blocking=non_blocking)

        return replace(
            self,
            source=move(self.source),
            source_lengths=move(self.source_lengths),
            target_in=move(self.target_in),
            target_out=move(self.target_out),
            target_lengths=move(self.target_lengths),
        )


class TokenBatches:
    """The batches of training pairs. Position (epoch, batch) is all the state there is, so resuming is exact.

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
        self.max_tokens = max_tokens
        self.seed = seed
        self._samplers = _samplers(tokenizers, sampling) if sampling and tokenizers is not None else None
        self._window: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
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
            raise ValueError(f"no pair is short enough for max_tokens={max_tokens} and max_length={max_length}")
        plans = [_plan(source_widths[kept], target_widths[kept], max_tokens, span) for span in _GROUP_SPANS]
        order, self._bounds, self._padded = min(plans, key=lambda plan: int(plan[2].sum()))
        self._sorted = kept[order]
        self._planned = int((source_widths + target_widths)[kept].sum())
        # Pairs of equal lengths are neighbours now; they get the same tie number and trade places each epoch.
        changes = (np.diff(source_widths[self._sorted]) != 0) | (np.diff(target_widths[self._sorted]) != 0)
        self._ties = np.concatenate([[0], np.cumsum(changes)])

    def __len__(self) -> int:
        """Batches in an epoch, the same for every epoch."""
        return len(self._bounds) - 1

    @property
    def padding_ratio(self) -> float:
        """The share of padding over all batches of an epoch, source and target together (as planned if sampling)."""
        return 1.0 - self._planned / float(self._padded.sum())

    @property
    def target_tokens(self) -> int:
        """Target tokens of an epoch, eos included, without padding."""
        return int((self.pairs.target_lengths + 1)[self._sorted].sum())

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """The batches of an epoch as arrays of pair indices, in training order; drawn from (seed, epoch) alone."""
        random = np.random.default_rng([self.seed, epoch])
        shuffled = random.permutation(len(self._sorted))
        regrouped = self._sorted[shuffled[np.argsort(self._ties[shuffled], kind="stable")]]
        batches = np.split(regrouped, self._bounds[1:-1])
        planned = [batches[i] for i in random.permutation(len(batches))]
        return planned if self._samplers is None else _Windows(self, planned, epoch)

    def largest(self) -> np.ndarray:
        """Pair indices of a batch of the largest padded size: run it first, and memory cannot run out later.

        With sampling the largest of the first window; no batch exceeds max_tokens on either side.
        """
        if self._samplers is not None:
            order = self.epoch(0)
            window = [order[i] for i in range(min(_WINDOW, len(order)))]
            return max(
                window, key=lambda indices: (batch := self.batch(indices)).source.numel() + batch.target_in.numel()
            )
        i = int(np.argmax(self._padded))
        return self._sorted[self._bounds[i] : self._bounds[i + 1]]

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Batch:
        """The tensors of one element of epoch(), to be asked for before the next element.

        epoch matters only with sampling: each visit draws anew.
        """
        if self._samplers is None:
            return collate([self.pairs.source(i) for i in indices], [self.pairs.target(i) for i in indices])
        keys = [(epoch, i) for i in indices.tolist()]
        if not all(key in self._window for key in keys):
            return collate(*self._drawn(indices, epoch))
        return collate([self._window[key][0] for key in keys], [self._window[key][1] for key in keys])

    def redraw(self, planned: Sequence[np.ndarray], epoch: int, window: int) -> list[np.ndarray]:
        """The pairs of planned batches in as many other batches, of like length by the segmentations drawn for them.

        Remembers these for batch(). What comes out depends on (seed, epoch) and which pairs there are, nothing else.
        """
        indices = np.sort(np.concatenate(planned))
        drawn, own = (
            self._drawn(indices, epoch),
            ([*map(self.pairs.source, indices)], [*map(self.pairs.target, indices)]),
        )
        lengths = np.array([[len(ids) for ids in side] for sides in (drawn, own) for side in sides])  # (4, pairs)
        growth = np.where(lengths[:2].max(axis=0) < self.max_tokens, (lengths[:2] - lengths[2:]).sum(axis=0), np.inf)
        most_grown = np.argsort(-growth, kind="stable")
        for share in _GIVEN_UP:
            stays = np.zeros(len(indices), dtype=bool)
            stays[most_grown[: max(math.ceil(share * len(indices)), int(np.isinf(growth).sum()))]] = True
            kept = [[old if keep else new for new, old, keep in zip(*sides, stays)] for sides in zip(drawn, own)]
            widths = [np.array([len(ids) + 1 for ids in side], dtype=np.int64) for side in kept]
            batches = _cut(widths[0], widths[1], self.max_tokens, len(planned))
            if batches is not None:
                break
        else:  # not even SentencePiece's own segmentations can be packed anew: as they were planned
            kept, batches = [*own], [np.searchsorted(indices, each) for each in planned]
        self._window = {(epoch, i): pair for i, pair in zip(indices.tolist(), zip(*kept))}
        order = np.random.default_rng([self.seed, epoch, window]).permutation(len(batches))
        return [indices[batches[i]] for i in order]

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

    def __init__(self, batches: TokenBatches, planned: list[np.ndarray], epoch: int) -> None:
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


def sorted_batches(
    source_lengths: Sequence[int] | np.ndarray,
    target_lengths: Sequence[int] | np.ndarray | None,
    max_tokens: int,
    max_rows: int | None = None,
) -> list[np.ndarray]:
    """Index arrays that cover all sentences once, longest first: for validation and translation.

    Longest first, so that memory runs out at the start if at all. Lengths are counted without eos; target_lengths is
    None when there is only a source. A sentence longer than max_tokens is a batch of its own. max_rows bounds the
    number of sentences in a batch.
    """
    sources = np.asarray(source_lengths, dtype=np.int64) + 1
    targets = sources if target_lengths is None else np.asarray(target_lengths, dtype=np.int64) + 1
    if len(sources) == 0:
        return []
    order = _length_order(sources, targets)[::-1]
    bounds = _pack(np.maximum(sources, targets)[order], max_tokens, max_rows)
    return np.split(order, bounds[1:-1])


def collate(source: Sequence[Sequence[int] | np.ndarray], target: Sequence[Sequence[int] | np.ndarray]) -> Batch:
    """One batch of pairs of ids, which carry neither bos nor eos."""
    source_ids, source_lengths = pad_source(source)
    target_lengths = np.array([len(ids) + 1 for ids in target], dtype=np.int64)
    target_in = np.full((len(target), int(target_lengths.max(initial=1))), PAD, dtype=np.int64)
    target_out = target_in.copy()
    target_in[:, 0] = BOS
    for row, ids in enumerate(target):
        target_in[row, 1 : len(ids) + 1] = ids
        target_out[row, : len(ids)] = ids
        target_out[row, len(ids)] = EOS
    return Batch(
        source=source_ids,
        source_lengths=source_lengths,
        target_in=torch.from_numpy(target_in),
        target_out=torch.from_numpy(target_out),
        target_lengths=torch.from_numpy(target_lengths),
        source_tokens=int(source_lengths.sum()),
        target_tokens=int(target_lengths.sum()),
    )


def pad_source(source: Sequence[Sequence[int] | np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Source ids (B, S) int64, each row its tokens then eos, and lengths (B,) int64 with eos."""
    lengths = np.array([len(ids) + 1 for ids in source], dtype=np.int64)
    padded = np.full((len(source), int(lengths.max(initial=1))), PAD, dtype=np.int64)
    for row, ids in enumerate(source):
        padded[row, : len(ids)] = ids
        padded[row, len(ids)] = EOS
    return torch.from_numpy(padded), torch.from_numpy(lengths)


def _plan(
    source: np.ndarray, target: np.ndarray, max_tokens: int, span: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Order of the pairs, bounds of the batches in it, and the padded size (both sides) of each batch."""
    order = _length_order(source, target, span)
    source, target = source[order], target[order]
    bounds = _pack(np.maximum(source, target), max_tokens)
    starts = bounds[:-1]
    padded = np.diff(bounds) * (np.maximum.reduceat(source, starts) + np.maximum.reduceat(target, starts))
    return order, bounds, padded


def _cut(source: np.ndarray, target: np.ndarray, max_tokens: int, count: int) -> list[np.ndarray] | None:
    """Places of all pairs in exactly `count` batches of nearly equal size; None where max_tokens is too little."""
    order, bounds, _ = min(
        (_plan(source, target, max_tokens, span) for span in _GROUP_SPANS), key=lambda plan: int(plan[2].sum())
    )
    if len(bounds) - 1 > count:
        return None
    widths = np.maximum(source, target)[order]
    least, most = int(widths.max()), max_tokens  # a smaller budget than most that needs no more batches
    while least < most:
        middle = (least + most) // 2
        tried = _pack(widths, middle)
        if len(tried) - 1 <= count:
            most, bounds = middle, tried
        else:
            least = middle + 1
    batches = np.split(order, bounds[1:-1])
    while len(batches) < count:
        largest = max(range(len(batches)), key=lambda i: len(batches[i]))
        batches[largest : largest + 1] = np.array_split(batches[largest], 2)
    return batches


def _length_order(source: np.ndarray, target: np.ndarray, span: int = 1) -> np.ndarray:
    """Indices grouped by source length (span lengths to a group), then by target length up and down in turn."""
    # Turns follow the rank of the group, not its parity, since some lengths may not occur.
    rank = np.unique(source // span, return_inverse=True)[1]
    return np.lexsort((source, np.where(rank % 2 == 0, target, -target), rank))


def _pack(widths: np.ndarray, max_tokens: int, max_rows: int | None = None) -> np.ndarray:
    """Bounds (batches + 1,) of consecutive runs with rows * max(widths of the run) <= max_tokens, at least 1 row."""
    bounds = [0]
    limit = max_tokens if max_rows is None else min(max_tokens, max_rows)
    while bounds[-1] < len(widths):
        start = bounds[-1]
        window = widths[start : start + min(limit, max(1, max_tokens // int(widths[start])))]
        padded = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)
        bounds.append(start + max(1, int(np.searchsorted(padded, max_tokens, side="right"))))
    return np.array(bounds, dtype=np.int64)


def _samplers(tokenizers: tuple[Tokenizer, Tokenizer], amount: float) -> tuple[SubwordSampler, SubwordSampler]:
    source = SubwordSampler(tokenizers[0], amount)
    return source, source if tokenizers[1] is tokenizers[0] else SubwordSampler(tokenizers[1], amount)
