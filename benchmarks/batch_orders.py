"""Other ways to order a corpus than the trainer's: shards one after the other, and pairs of any length together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from fasttfm.data.batches import Batch, TokenBatches, collate
from fasttfm.data.prepared import ParallelTokens
from fasttfm.data.shapes import round_length


class ConsecutiveShards:
    """Equal parts of a corpus one after the other, as they stand in it: only the pairs within a part are mixed.

    Speaks as TokenBatches does.
    """

    def __init__(self, pairs: ParallelTokens, max_tokens: int, seed: int, shards: int) -> None:
        self.pairs, self.max_tokens = pairs, max_tokens
        bounds = np.linspace(0, len(pairs), shards + 1).astype(int).tolist()
        self._begins = bounds[:-1]
        self._shards = [
            TokenBatches(pairs.part(begin, end), max_tokens, seed) for begin, end in itertools.pairwise(bounds)
        ]

    def __len__(self) -> int:
        """Batches of an epoch."""
        return sum(map(len, self._shards))

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """The batches of an epoch, as TokenBatches.epoch() gives them."""
        return [
            batch + begin
            for begin, shard in zip(self._begins, self._shards, strict=True)
            for batch in shard.epoch(epoch)
        ]

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Batch:
        """The batch of these pairs, as TokenBatches.batch() gives it."""
        shard = int(np.searchsorted(self._begins, indices[0], "right")) - 1
        return self._shards[shard].batch(indices - self._begins[shard], epoch)


class RandomLengths:
    """Batches of pairs of any length, in random order, of as many tokens on their longer side as those of TokenBatches.

    Both sides are padded to their longest, which a batch of bucketed pairs need not do. Speaks as TokenBatches does.
    """

    def __init__(self, pairs: ParallelTokens, max_tokens: int, seed: int) -> None:
        self.pairs, self.max_tokens, self.seed = pairs, max_tokens, seed
        bucketed = TokenBatches(pairs, max_tokens, seed)
        self._count = len(bucketed)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._count

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """The batches of an epoch, as many as TokenBatches.epoch() gives."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.pairs))
        lengths = np.maximum(self.pairs.source_lengths, self.pairs.target_lengths)[order] + 1
        ends = np.cumsum(lengths)
        bounds = np.searchsorted(ends, np.linspace(0, ends[-1], self._count + 1)[1:-1])
        return [batch for batch in np.split(order, bounds) if len(batch)]

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Batch:
        """The batch of these pairs, as TokenBatches.batch() gives it."""
        sides = [self.pairs.source(i) for i in indices], [self.pairs.target(i) for i in indices]
        return collate(*sides, [round_length(max(map(len, side)) + 1) for side in sides])
