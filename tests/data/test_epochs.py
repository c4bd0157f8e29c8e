"""Updates mix batches of all lengths and sources nearly as evenly as random pairs."""

import numpy as np
import pytest

from fasttfm.data.batches import TokenBatches
from fasttfm.data.epochs import mixed_order, side_by_side
from fasttfm.data.prepared import ParallelTokens


def two_sources(count: int = 12_000) -> tuple[ParallelTokens, np.ndarray]:
    """Short pairs from one source, and a tenth as many long ones from another."""
    random = np.random.default_rng(2)
    sources = (np.arange(count) % 11 == 10).astype(int)
    lengths = np.clip(random.gamma(4, np.where(sources, 7.0, 2.0)).astype(int), 1, 100)
    sides = [[[4] * length for length in lengths.tolist()] for _ in range(2)]
    return ParallelTokens.from_lists(*sides), sources


@pytest.mark.parametrize("together", [4, 8])
def test_updates_are_nearly_as_even_as_pairs_at_random(together: int):
    pairs, sources = two_sources()

    def deviation(updates) -> tuple[float, float]:
        lengths = [pairs.target_lengths[each].mean() for each in updates]
        weights = pairs.target_lengths
        shares = [np.average(sources[each], weights=weights[each]) for each in updates]
        return float(np.std(lengths)), float(np.std(shares))

    batches = TokenBatches(pairs, 4000 // together, seed=3, together=together)
    order = [batch for epoch in range(2) for batch in batches.epoch(epoch)]  # one update is of both epochs
    updates = [np.concatenate(order[i : i + together]) for i in range(0, len(order) - together + 1, together)]
    shuffled = np.random.default_rng(1).permutation(len(pairs))
    mixed, even = deviation(updates), deviation(np.array_split(shuffled, len(updates) // 2))
    whole = TokenBatches(pairs, 4000, seed=3)
    alone = deviation(whole.epoch(0))
    for ours, best, worst in zip(mixed, even, alone, strict=True):
        assert ours < 4 * best
        assert ours < worst / 4


def test_every_update_has_each_part_also_across_epochs():
    lengths = np.arange(50)
    stream = np.concatenate([mixed_order(lengths, 8, epoch * 50, np.random.default_rng(epoch)) for epoch in range(4)])
    for update in stream.reshape(25, 8):
        assert np.abs(np.sort(update) - (np.arange(8) + 0.5) * 50 / 8).max() < 7
    assert all(sorted(stream[50 * e : 50 * e + 50]) == list(range(50)) for e in range(4))


def test_halves_and_quarters_of_an_update_have_equal_sums():
    order = side_by_side(8)
    assert order.reshape(2, 4).sum(axis=1).tolist() == [14, 14]
    assert order.reshape(4, 2).sum(axis=1).tolist() == [7] * 4
