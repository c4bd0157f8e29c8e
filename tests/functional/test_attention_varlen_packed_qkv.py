"""Packed sequences of packed projections: the same numbers as varlen_attention() on views of them, on both routes."""

import pytest
import torch

from fasttfm import functional as F

from .agreement import agree
from .test_attention_packed_qkv import BACKENDS, CLOSE

H, D = 2, 16
SELF = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
"""Three sequences of 5, 0 and 7 tokens; two rows of filler follow."""
OTHER = torch.tensor([0, 3, 9, 20], dtype=torch.int32)


def leaf_tensors(cross):
    if cross:
        return [torch.randn(21, 2, H, D), torch.randn(14, H, D)]
    return [torch.randn(14, 3, H, D)]


def starts(cross):
    return (SELF, OTHER, 7, 11) if cross else (SELF, SELF, 7, 7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_it_equals_packed_attention_on_views(backend, cross, p):
    inputs = [x.requires_grad_() for x in leaf_tensors(cross)]
    packed_qkv, query = (*inputs, None)[:2]
    parts = packed_qkv.unbind(1)
    options = {"causal": not cross} | ({"dropout_p": p, "seed": torch.tensor([6]), "site": 2} if p else {})
    expected = F.varlen_attention(*(parts if query is None else (query, *parts)), *starts(cross), **options).flatten(1)

    def ours(packed_qkv, query=None):
        return F.varlen_packed_qkv_attention(packed_qkv, query, *starts(cross), **options)

    actual, _ = agree(ours, expected, inputs, backend, **CLOSE)
    assert not actual[12:].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_without_filler_nothing_is_zeroed_and_everything_written(backend, cross, monkeypatch):
    cu_seqlens_q, cu_seqlens_k, *longest = starts(cross)
    inputs = [x[: int(s[-1])].requires_grad_() for x, s in zip(leaf_tensors(cross), (cu_seqlens_k, cu_seqlens_q))]
    given = (*(*inputs, None)[:2], cu_seqlens_q, cu_seqlens_k, *longest)
    with F.backend(backend):
        expected = F.varlen_packed_qkv_attention(*given)
        probe = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, inputs, probe)
        torch.use_deterministic_algorithms(True)  # fills what is empty with numbers that are none
        try:
            actual = F.varlen_packed_qkv_attention(*given, covered=True)
            gradients = torch.autograd.grad(actual, inputs, probe)
        finally:
            torch.use_deterministic_algorithms(False)
    assert torch.equal(actual, expected)
    assert all(map(torch.equal, gradients, wanted))
