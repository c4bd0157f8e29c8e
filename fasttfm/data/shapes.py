"""A small set of batch shapes: padded sizes for a corpus, and its division into batches.

Every new matrix shape is expensive: libraries prepare and cache code and memory for it. So a corpus gets at most SIZES
padded sizes (source, target), chosen from the histogram of its lengths: start with all lengths, then repeatedly remove
the size whose pairs lose least by moving to the next larger one. All batches of a size have the same number of rows;
leftover pairs, the longest ones, move to the next size, so only the largest size ends in a smaller batch. If lengths
are not known beforehand (validation, translation), they are rounded up to a fixed grid.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

SIZES = 64
"""Maximum number of padded sizes for a corpus."""
_MOST_CELLS = 600
"""Maximum number of initial sizes; the grid of lengths is made as coarse as this requires."""
_BLOCK = 1 << 16
"""Pairs per block: what is computed from them fits in a core's cache."""


def round_length(length: int, multiple: int = 1) -> int:
    """Round up to the grid: all lengths up to 16, then 8 per doubling (18, 20 … 32, 36, 40 … 64, 72 …).

    multiple: a power of two; restricts the grid to its multiples.
    """
    step = max(multiple, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


@dataclass(frozen=True, slots=True)
class Plan:
    """A division of pairs into batches."""

    order: np.ndarray
    """(pairs,) int32, or int64 if needed: pair indices, size by size."""
    bounds: np.ndarray
    """(batches + 1,) int64: batch b is order[bounds[b]:bounds[b + 1]]."""
    sizes: np.ndarray
    """(batches, 2) int64: padded source and target length of each batch."""

    @property
    def shapes(self) -> int:
        """Number of distinct (rows, source length, target length)."""
        return len(np.unique(np.column_stack([np.diff(self.bounds), self.sizes]), axis=0))

    @property
    def cells(self) -> np.ndarray:
        """(batches,) int64: elements of both padded sides."""
        return np.diff(self.bounds) * self.sizes.sum(axis=1)


def choose_sizes(source: np.ndarray, target: np.ndarray, max_tokens: int, most: int = SIZES) -> np.ndarray:
    """At most `most` padded sizes (K, 2), smallest first, that fit all pairs with little padding.

    source, target (pairs,): lengths, at most max_tokens; pairs with a length of 0 are skipped. K is 0 if none is left.
    """
    cells, counts = _cells(source, target, max_tokens)
    if not len(cells):
        return cells
    top = cells.max(axis=0)
    sizes = np.unique(np.vstack([cells, top]), axis=0)
    # (cells, sizes); infinite if the cell does not fit
    cost = np.where(_holds(sizes, cells), sizes.sum(axis=1).astype(np.float64), np.inf)
    while len(sizes) > most:
        best, second = np.partition(cost, 1, axis=1)[:, :2].T
        loss = np.where(np.isfinite(second), second - best, 0.0) * counts
        loss = np.bincount(cost.argmin(axis=1), weights=loss, minlength=len(sizes))
        loss[(sizes == top).all(axis=1)] = np.inf  # keep the size that fits everything
        least = int(loss.argmin())
        sizes, cost = np.delete(sizes, least, axis=0), np.delete(cost, least, axis=1)
    return sizes[np.argsort(sizes.sum(axis=1), kind="stable")]


def plan_batches(source: np.ndarray, target: np.ndarray, sizes: np.ndarray, max_tokens: int) -> Plan:
    """Batches of pairs padded to `sizes` (from choose_sizes), with rows * longer side <= max_tokens.

    source, target (pairs,): lengths; pairs with a length of 0 are skipped.
    """
    number = np.int32 if len(source) <= np.iinfo(np.int32).max else np.int64
    smallest = _smallest(source, target, sizes)
    counts = np.bincount(smallest, minlength=len(sizes) + 1)[: len(sizes)]
    order = np.empty(int(counts.sum()), number)
    moved: list[list[np.ndarray]] = [[] for _ in sizes]
    """Leftover pairs of smaller sizes, by the size they move to."""
    bounds, batch_sizes, placed = [0], [], 0
    for k, size in enumerate(sizes):
        rows = max_tokens // int(size.max())
        pairs = np.concatenate([np.flatnonzero(smallest == k).astype(number) if counts[k] else [], *moved[k]])
        pairs = pairs.astype(number)
        full = len(pairs) // rows * rows
        pairs, rest = _without_longest(pairs, source, target, full)
        following = _smallest(source[rest], target[rest], sizes[k + 1 :]) + k + 1
        for later in np.unique(following[following < len(sizes)]):
            moved[later].append(rest[following == later])
        pairs = np.concatenate([pairs, rest[following == len(sizes)]])
        order[placed : placed + len(pairs)] = pairs
        for begin in range(0, len(pairs), rows):
            bounds.append(placed + min(begin + rows, len(pairs)))
            batch_sizes.append(size)
        placed += len(pairs)
    return Plan(order, np.array(bounds), np.array(batch_sizes, np.int64).reshape(-1, 2))


def length_batches(
    lengths: Sequence[int] | np.ndarray, max_tokens: int, shortest: int = 1, *, alike: int | None = None
) -> list[list[int]]:
    """Batches (as indices) of sequences of similar length, longest first so that memory runs out at once or never.

    lengths: including special tokens. A batch has as many rows as max_tokens allows for its longest sequence, padded by
    round_length; a sequence longer than max_tokens forms its own batch. Sequences shorter than `shortest` count as that
    long: a short source whose output may be long needs caches for all of it. alike: pad to multiples of it, and batch
    only sequences with the same padded length.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    batches = []
    while order:
        padded = round_length(int(lengths[order[0]]), alike or 1)
        rows = max(1, max_tokens // max(padded, shortest))
        if alike is not None:
            shorter = (
                row for row in range(len(order[:rows])) if round_length(int(lengths[order[row]]), alike) < padded
            )
            rows = next(shorter, rows)
        batches.append(order[:rows])
        order = order[rows:]
    return batches


def _cells(source: np.ndarray, target: np.ndarray, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct (source, target) lengths on a grid, (C, 2) with C <= _MOST_CELLS, and the number of pairs of each."""
    longest = max(int(source.max(initial=0)), int(target.max(initial=0)))
    grid, cell_of = np.unique(_on_grid(np.arange(longest + 1), 1, max_tokens), return_inverse=True)  # 0 stays 0
    histogram = np.zeros(len(grid) ** 2, np.int64)
    for block in _blocks(len(source)):
        cells = cell_of[source[block]] * len(grid) + cell_of[target[block]]
        histogram += np.bincount(cells, minlength=len(histogram))
    present = np.flatnonzero(histogram)
    lengths = np.column_stack([grid[present // len(grid)], grid[present % len(grid)]])
    kept = (lengths > 0).all(axis=1)
    lengths, pairs = lengths[kept], histogram[present[kept]]
    coarse = 1
    while True:
        cells, cell = np.unique(_on_grid(lengths, coarse, max_tokens), axis=0, return_inverse=True)
        if len(cells) <= _MOST_CELLS:
            return cells, np.bincount(cell.reshape(-1), weights=pairs).astype(np.int64)
        coarse *= 2


def _on_grid(lengths: np.ndarray, coarse: int, most: int) -> np.ndarray:
    """round_length() of an array with multiple `coarse`, clipped to `most`."""
    doubling = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    step = np.maximum(coarse, 1 << np.maximum(0, doubling - 4))
    return np.minimum(-(-lengths // step) * step, most)


def _blocks(count: int) -> Iterator[slice]:
    """Slices that cover `count` elements, _BLOCK at a time."""
    return (slice(begin, begin + _BLOCK) for begin in range(0, count, _BLOCK))


def _holds(sizes: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """(pairs, sizes) bool: whether each (source, target) fits in each size."""
    return (sizes[None, :, 0] >= pairs[:, None, 0]) & (sizes[None, :, 1] >= pairs[:, None, 1])


def _smallest(source: np.ndarray, target: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Index of the smallest size that fits each pair; len(sizes) if none does, or if a side has length 0."""
    smallest = np.full(len(source), len(sizes), dtype=np.uint8 if len(sizes) < 256 else np.int64)
    for block in _blocks(len(source)):
        ours, theirs, found = source[block], target[block], smallest[block]
        for k in reversed(range(len(sizes))):
            found[(ours <= sizes[k, 0]) & (theirs <= sizes[k, 1])] = k
        found[(ours == 0) | (theirs == 0)] = len(sizes)
    return smallest


def _without_longest(
    pairs: np.ndarray, source: np.ndarray, target: np.ndarray, kept: int
) -> tuple[np.ndarray, np.ndarray]:
    """Split off the longest pairs (the last among equals): the `kept` others in order, and the rest."""
    if kept == len(pairs):
        return pairs, pairs[:0]
    lengths = source[pairs].astype(np.int64) + target[pairs]
    longest_kept = int(np.partition(lengths, kept)[kept])
    stays = lengths < longest_kept
    equal = np.flatnonzero(lengths == longest_kept)
    stays[equal[: kept - int(stays.sum())]] = True
    return pairs[stays], pairs[~stays]
