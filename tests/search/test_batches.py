"""Padded batches of a search."""

import pytest
import torch

from fasttfm.search.batches import padded


def test_padding_fills_up_to_a_length_on_the_grid():
    ids, lengths = padded([[5, 3], [7, 8, 9, 3]], torch.device("cpu"))
    assert ids.tolist() == [[5, 3, 0, 0], [7, 8, 9, 3]]
    assert lengths.tolist() == [2, 4]
    assert ids.dtype == torch.int64
    ids, lengths = padded([[5] * 17, [3]], torch.device("cpu"))
    assert (ids.shape, lengths.tolist()) == ((2, 18), [17, 1])
    assert int((ids != 0).sum()) == 18
    with pytest.raises(ValueError, match="no tokens"):
        padded([[5], []], torch.device("cpu"))
