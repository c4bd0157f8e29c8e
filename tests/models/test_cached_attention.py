"""Attention over a cache equals causal attention over all positions."""

import pytest
import torch

from fasttfm import reference
from fasttfm.functional import backend
from fasttfm.models.cache import AttentionCache


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
