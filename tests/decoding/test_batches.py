"""Batches of similar length within a budget."""

from __future__ import annotations

import pytest
import torch

from fasttfm.decoding.batches import SHORTEST, length_batches, padded


def test_every_sequence_is_in_one_batch_and_batches_keep_to_the_budget():
    lengths = [7 * number % 50 + 1 for number in range(200)]
    batches = list(length_batches(lengths, 300))
    assert sorted(place for batch in batches for place in batch) == list(range(200))
    for batch in batches:
        assert len(batch) * max(lengths[place] for place in batch) <= 300
        assert len(batch) * SHORTEST <= 300
    longest = [max(lengths[place] for place in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True)
    padding = sum(len(batch) * width for batch, width in zip(batches, longest)) / sum(lengths)
    assert padding < 1.2


def test_a_sequence_beyond_the_budget_is_a_batch_of_its_own():
    assert list(length_batches([3, 1000, 5], 100)) == [[1], [2, 0]]
    assert list(length_batches([], 100)) == []


def test_padding_fills_up_to_the_longest():
    ids, lengths = padded([[5, 3], [7, 8, 9, 3]], torch.device("cpu"))
    assert ids.tolist() == [[5, 3, 0, 0], [7, 8, 9, 3]]
    assert lengths.tolist() == [2, 4]
    assert ids.dtype == torch.int64
    with pytest.raises(ValueError, match="no tokens"):
        padded([[5], []], torch.device("cpu"))
