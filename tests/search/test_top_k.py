"""Top-k: values descending, equal values in index order."""

import pytest
import torch

from fasttfm.cpu import step_passes
from fasttfm.search.top_k import top_k

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def by_rule(values: torch.Tensor, k: int) -> list[list[int]]:
    return [sorted(range(len(row)), key=lambda place: -row[place])[:k] for row in values.tolist()]  # stable


@pytest.mark.sample(15)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 64, 1024, 1217, 8000])  # by blocks from 1024 on; 1217 leaves a tail
@pytest.mark.parametrize("k", [1, 5, 8])
def test_equal_values_are_ordered_by_index(width, k, dtype):
    draw = torch.Generator().manual_seed(width * k)
    levels = torch.randn(40, generator=draw)
    few = [levels[:count][torch.randint(count, (7, width), generator=draw)] for count in (1, 3, 40)]
    rare = torch.full((7, width), -torch.inf).index_fill_(1, torch.tensor([width - 1, width // 2, 3]), 0.0)
    differ = torch.randn(7, width, generator=draw)
    zeros, columns = torch.zeros(7, width).copysign(differ), differ.t().contiguous().t()
    for values in (*few, rare, differ, torch.cat([differ, few[1]]), zeros, columns):
        values = values.to(dtype)
        best, places = top_k(values, k)
        assert places.tolist() == by_rule(values, k)
        assert torch.equal(best, values.gather(1, places))
    assert top_k(few[1], width)[1].tolist() == by_rule(few[1], width)


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("width", [8, 8000])
def test_nan_is_largest_and_other_devices_are_not_read(width, k):
    values = torch.zeros(3, width)
    values[1, 2:] = torch.nan
    assert top_k(values, k)[0].isnan().tolist() == [[False] * k, [True] * k, [False] * k]
    # A meta tensor has no values to read.
    assert [part.shape for part in top_k(values.to("meta"), k)] == [(3, k), (3, k)]


@pytest.mark.skipif(not step_passes.usable(), reason="numba is not installed")
@pytest.mark.parametrize("k", [1, 5])
def test_the_compiled_pass_finds_the_likeliest_anywhere(k):
    logits = torch.randn(7, 1000, generator=torch.Generator().manual_seed(k))
    logits[1] = logits[1].round()
    logits[2] = logits[2] * 1e-9  # equal as log-probabilities
    best, tokens = step_passes.likeliest(logits, k, lambda values: None)
    expected = logits.log_softmax(1)
    torch.testing.assert_close(best, expected.gather(1, tokens))
    assert tokens.tolist() == by_rule(expected, k)
