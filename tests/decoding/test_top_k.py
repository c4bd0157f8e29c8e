"""The block-wise search for the largest values is topk."""

import pytest
import torch

from fasttfm.cpu import step_passes
from fasttfm.decoding.top_k import top_k


@pytest.mark.parametrize("width", [8, 64, 1023, 1024, 1087, 8000])
@pytest.mark.parametrize("k", [1, 5, 8])
def test_values_and_places_are_those_of_topk(width, k):
    values = torch.randn(7, width, generator=torch.Generator().manual_seed(width * k))
    for case in (values, values.t().contiguous().t()):
        for ours, theirs in zip(top_k(case, k), case.topk(k)):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("width", [1000, 1025])  # 40 and 1 behind the last block
def test_the_last_of_an_uneven_row_is_found_and_masked_values_are_last(width):
    values = torch.full((2, width), -torch.inf)
    values[0, width - 1], values[0, 0], values[1, 130] = 1.0, 2.0, -5.0
    best, positions = top_k(values, 3)
    assert positions[0, :2].tolist() == [0, width - 1]
    assert positions[1, 0] == 130
    assert torch.isneginf(best[:, 2]).all()


@pytest.mark.skipif(not step_passes.usable(), reason="numba is not installed")
@pytest.mark.parametrize("k", [1, 5])
def test_the_compiled_pass_finds_the_likeliest_wherever_they_stand(k):
    logits = torch.randn(7, 1000, generator=torch.Generator().manual_seed(k))
    best, tokens = step_passes.likeliest(logits, k, lambda values: None)
    expected, places = logits.log_softmax(1).topk(k)
    torch.testing.assert_close(best, expected)
    assert torch.equal(tokens, places)
