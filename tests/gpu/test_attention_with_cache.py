"""Attention over a KV cache on the device: pages, splits of a long sequence, CUDA graph capture, a beam search step."""

import pytest
import torch
from search_step import a_step, attend, specified

from fasttfm import functional as F
from fasttfm.reference_cache import attention_with_cache

from .test_kernels import DTYPES, FLOOR


def problem(device, dtype, queries=1):
    """Two sequences in pages of 24 rows, with four query heads per key head."""
    caches = torch.randn(2, 200, 2, 24, 64, device=device).to(dtype)
    new = torch.randn(2, 2, 2, queries, 64, device=device).to(dtype)
    table = torch.randperm(200, device=device).view(2, 100)
    lengths = torch.tensor([2300, 70], device=device)
    return {
        "query": torch.randn(2, 8, queries, 64, device=device).to(dtype), "key_cache": caches[0],
        "value_cache": caches[1], "key": new[0], "value": new[1], "cache_lengths": lengths, "block_table": table,
        "causal": True, "softcap": 20.0, "alibi_slopes": torch.rand(8, device=device),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 7])
def test_the_output_and_the_appended_cache_equal_the_reference(device, ieee, dtype, queries):
    given = problem(device, dtype, queries)
    tensors = {n: x.double() if torch.is_tensor(x) and x.dtype == dtype else x for n, x in given.items()}
    exact = attention_with_cache(**tensors)
    output = F.attention_with_cache(**given)
    assert (output - exact).abs().max() <= 4 * FLOOR[dtype] * exact.abs().max()
    assert torch.equal(given["value_cache"].double(), tensors["value_cache"])


def test_a_captured_step_reads_lengths_from_device_memory(device):
    given = problem(device, torch.float16)
    with torch.no_grad():
        F.attention_with_cache(**given)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = F.attention_with_cache(**given)
        for _ in range(3):
            given["cache_lengths"] += 1
            graph.replay()
            torch.testing.assert_close(output, F.attention_with_cache(**given))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 80])
def test_a_beam_search_step_over_ancestors(device, dtype, width):
    step = [x.to(device) for x in a_step([139, 64, 0, 17], 4, 8, width, dtype, 140)]
    output, written = attend(*step, heads=8)
    exact, expected = specified(*step, heads=8)
    assert (output - exact).abs().max() <= 4 * FLOOR[dtype] * exact.abs().max()
    assert torch.equal(written.nan_to_num(), expected.nan_to_num())
