"""Translations of each source token: IBM model 1, from prepared sentence pairs.

    P(target | source) = product over target tokens t of sum over source tokens s of P(t | s) / (number of s)

Every target token comes of one source token, or of none (NULL); expectation maximisation finds P(t | s).
Source: Brown et al. 1993, section 4.2; what fast_align and Marian's lexical shortlists begin with.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fasttfm.data.prepared import ParallelTokens

_LINKS = 4_000_000
"""Pairs of tokens that are looked at together: some 200 MB."""


@dataclass(frozen=True, slots=True)
class Lexicon:
    """P(target | source) of pairs that occur together, by source and falling."""

    sources: np.ndarray
    """(N,) int64"""
    targets: np.ndarray
    """(N,) int64"""
    probabilities: np.ndarray
    """(N,) float64"""

    def best(self, count: int) -> dict[int, np.ndarray]:
        """The likeliest targets of each source, at most so many, falling."""
        tokens, begins = np.unique(self.sources, return_index=True)
        ends = np.append(begins[1:], len(self.sources))
        return {
            int(token): self.targets[begin : min(end, begin + count)] for token, begin, end in zip(tokens, begins, ends)
        }


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Every source token of some sentence pairs with every target token of the same pair."""

    entries: np.ndarray
    """(L,) which pair of tokens it is: a key source * targets + target, then its place among the keys."""
    positions: np.ndarray
    """(L,) int32: the target position that it may explain."""
    count: int
    """Target positions."""


def estimate(pairs: ParallelTokens, source_size: int, target_size: int, iterations: int = 5) -> Lexicon:
    """The lexicon of all pairs; sizes: of the vocabularies. Takes about 20 bytes for every source and target token of
    one pair. ValueError for fewer than one iteration."""
    if iterations < 1:
        raise ValueError(f"{iterations} iterations: give at least 1")
    null = source_size
    chunks = [_links(pairs.part(*part), null, target_size) for part in _parts(pairs)]
    keys = np.unique(np.concatenate([np.unique(each.entries) for each in chunks] or [np.empty(0, np.int64)]))
    chunks = [
        _Chunk(np.searchsorted(keys, each.entries).astype(np.int32), each.positions, each.count) for each in chunks
    ]
    sources, targets = np.divmod(keys, target_size)
    probabilities = np.ones(len(keys))
    for _ in range(iterations):
        counts = np.zeros(len(keys))
        for each in chunks:
            shares = probabilities[each.entries]
            shares /= np.bincount(each.positions, shares, each.count)[each.positions]
            counts += np.bincount(each.entries, shares, len(keys))
        probabilities = counts / np.bincount(sources, counts, null + 1)[sources]
    known = np.flatnonzero(sources != null)
    order = known[np.lexsort((-probabilities[known], sources[known]))]
    return Lexicon(sources[order], targets[order], probabilities[order])


def token_counts(pairs: ParallelTokens, target_size: int) -> np.ndarray:
    """(V,) int64: how often each target token occurs."""
    counts = np.zeros(target_size, dtype=np.int64)
    for begin, end in _parts(pairs):
        some = pairs.part(begin, end)
        counts += np.bincount(np.concatenate([some.target(i) for i in range(len(some))]), minlength=target_size)
    return counts


def _parts(pairs: ParallelTokens) -> Iterator[tuple[int, int]]:
    """Ranges of pairs with about _LINKS pairs of tokens each."""
    links = np.cumsum(np.multiply(pairs.source_lengths + 1, pairs.target_lengths, dtype=np.int64))
    begin = 0
    while begin < len(links):
        before = links[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(links, before + _LINKS, side="right")))
        yield begin, end
        begin = end


def _links(pairs: ParallelTokens, null: int, target_size: int) -> _Chunk:
    sources = [np.append(pairs.source(i), null).astype(np.int64) for i in range(len(pairs))]
    targets = np.concatenate([pairs.target(i).astype(np.int64) for i in range(len(pairs))])
    lengths = np.array([len(each) for each in sources])
    per_position = np.repeat(lengths, pairs.target_lengths)  # source tokens that may explain each target position
    first = np.repeat(np.cumsum(lengths) - lengths, pairs.target_lengths)
    positions = np.repeat(np.arange(len(targets), dtype=np.int32), per_position)
    within = np.arange(len(positions)) - np.repeat(np.cumsum(per_position) - per_position, per_position)
    entries = np.concatenate(sources)[first[positions] + within] * target_size + targets[positions]
    return _Chunk(entries, positions, len(targets))
