"""The block-wise search for the largest values is topk."""

import pytest
import torch

from fasttfm.decoding.top_k import top_k


@pytest.mark.parametrize("width", [8, 64, 1023, 1024, 1087, 8000])
@pytest.mark.parametrize("k", [1, 5, 8])
def test_values_and_places_are_those_of_topk(width, k):
    values = torch.randn(7, width, generator=torch.Generator().manual_seed(width * k))
    for case in (values, values.t().contiguous().t()):
        for ours, theirs in zip(top_k(case, k), case.topk(k)):
            assert torch.equal(ours, theirs)


def test_the_last_of_an_uneven_row_is_found_and_masked_values_are_last():
    values = torch.full((2, 1000), -torch.inf)
    values[0, 999], values[0, 0], values[1, 130] = 1.0, 2.0, -5.0
    best, positions = top_k(values, 3)
    assert positions[0, :2].tolist() == [0, 999]
    assert positions[1, 0] == 130
    assert torch.isneginf(best[:, 2]).all()
