"""Attention over a cache equals attention, with every kernel."""

import pytest
import torch

from fasttfm import reference
from fasttfm.functional import backend
from fasttfm.models.cache import AttentionCache, cached_attention


@pytest.mark.parametrize("rows", [1, 3, 700], ids=["one row", "few rows", "many rows"])
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_attention(dtype, with_lengths, rows):
    query = torch.randn(rows, 2, 4, 16, dtype=dtype).transpose(1, 2)
    keys, values = torch.randn(2, rows, 4, 20, 16, dtype=dtype)[:, :, :, :13]  # 13 of 20 positions are filled
    lengths = torch.randint(1, 14, (rows,)) if with_lengths else None
    with torch.no_grad():
        actual = cached_attention(query, keys, values, lengths)
    expected = reference.attention(*(x.double() for x in (query, keys, values)), key_lengths=lengths)[0]
    bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(actual, expected.to(dtype), rtol=bound, atol=bound)


@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("pieces", [(1,) * 7, (3, 1, 1, 2), (5, 2), (7,)], ids=str)
@torch.no_grad()
def test_new_positions_see_all_before_them_and_none_behind(pieces, route):
    inputs = torch.randn(3, 2, 3, 7, 16)
    kept, outputs = AttentionCache(grows=True), []
    with backend(route):
        for query, *keys_values in zip(*(x.split(pieces, dim=2) for x in inputs)):
            kept.update(*keys_values)
            outputs.append(kept.attend(query))
    expected = reference.attention(*inputs, causal=True)[0]
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-5)
