"""Attention on packed projections, padded and packed sequences: both routes against reference.py."""

import pytest
import torch
from biased_attention import biased_attention

from fasttfm import functional as F
from fasttfm import reference

from .agreement import agree

on_each_backend = pytest.mark.parametrize("backend", ["torch", "triton"])
self_and_cross = pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
CLOSE = {"atol": 2e-5, "rtol": 1e-4, "gradients": {"atol": 5e-5, "rtol": 1e-4}}
DROPPED = {"dropout_p": 0.3, "seed": torch.tensor([6]), "site": 2}
B, H, L, S, D = 2, 3, 9, 14, 16


def leaf_tensors(cross, dtype=torch.float32, keys=S, shared=1):
    """shared: query heads per key head."""
    shapes = [(B, keys, 2, H, D), (B, L, shared * H, D)] if cross else [(B, keys, 3, H, D)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def specification(packed_qkv, query=None, **options):
    parts = [part.transpose(1, 2) for part in packed_qkv.unbind(2)]
    q, k, v = parts if query is None else (query.transpose(1, 2), *parts)
    return reference.attention(q, k, v, **options)[0].transpose(1, 2).flatten(2)


@pytest.mark.sample(6)
@on_each_backend
@pytest.mark.parametrize(("cross", "shared"), [(False, 1), (True, 1), (True, 2)], ids=["self", "cross", "shared heads"])
@pytest.mark.parametrize("keys", [S, 150], ids=["short", "long"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_it_equals_the_reference_forward_and_backward(backend, cross, shared, keys, p):
    inputs = leaf_tensors(cross, keys=keys, shared=shared)
    options = {"key_lengths": torch.tensor([keys - 3, 0]), "causal": not cross} | (DROPPED if p else {})
    expected = specification(*inputs, **options)
    agree(lambda *x: F.packed_qkv_attention(*x, **options), expected, inputs, backend, **CLOSE)


@pytest.mark.parametrize("packed", [False, True])
@self_and_cross
def test_a_kernel_sums_the_bias_gradients(cross, packed):
    given = [x.detach().flatten(0, 1) if packed else x.detach() for x in leaf_tensors(cross)[::-1]]
    given = [x.requires_grad_() for x in given]
    biases = [torch.zeros(x.shape[2 - packed :].numel(), requires_grad=True) for x in given]
    options = {"starts": torch.tensor([0, L, 2 * L]), "longest": S} if packed else {"lengths": torch.tensor([S - 3, 4])}
    with F.backend("triton"):
        output = biased_attention(*given, biases=biases, p=0.3, seed=torch.tensor([6]), **options)
        gradients = torch.autograd.grad(output, [*given, *biases], torch.randn_like(output))
    for d, d_bias in zip(gradients[: len(given)], gradients[len(given) :], strict=True):
        torch.testing.assert_close(d_bias, d.flatten(0, 1 - packed).sum(0).flatten(), atol=1e-4, rtol=1e-4)


@on_each_backend
@self_and_cross
@pytest.mark.parametrize("kind", ["bool", "floats"])
def test_sequence_first_memory_with_a_mask(backend, cross, kind):
    """torch.nn's layout: neither output nor gradients are copied."""
    inputs = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in leaf_tensors(cross)]
    mask = torch.rand(B, 1, 1, S) < 0.6
    mask[0] = False  # a row with no key
    mask = mask if kind == "bool" else torch.randn(B, H, 1, S).masked_fill(~mask, -torch.inf)
    expected = specification(*inputs, mask=mask)
    actual, gradients = agree(lambda *x: F.packed_qkv_attention(*x, mask=mask), expected, inputs, backend, **CLOSE)
    assert all(g.stride() == x.stride() for g, x in zip(gradients, inputs, strict=True))
    assert actual.transpose(0, 1).is_contiguous() == (backend == "triton")


# ------------------------------------------------------------------------------------------------ packed sequences

SELF = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
"""Three sequences of 5, 0 and 7 tokens; two rows of padding follow."""
OTHER = torch.tensor([0, 3, 9, 20], dtype=torch.int32)
STARTS = {True: (SELF, OTHER, 7, 11), False: (SELF, SELF, 7, 7)}


def packed_leaves(cross):
    shapes = [(21, 2, H, D), (14, H, D)] if cross else [(14, 3, H, D)]
    return [torch.randn(shape).requires_grad_() for shape in shapes]


@on_each_backend
@self_and_cross
@pytest.mark.parametrize("options", [{}, {**DROPPED, "causal": True, "causal_offset": -2}], ids=["all keys", "causal"])
def test_packed_sequences_equal_varlen_attention_on_views(backend, cross, options):
    inputs = packed_leaves(cross)
    parts = inputs[0].unbind(1)
    expected = F.varlen_attention(*(*inputs[1:], *parts), *STARTS[cross], **options).flatten(1)

    def ours(packed_qkv, query=None):
        return F.varlen_packed_qkv_attention(packed_qkv, query, *STARTS[cross], **options)

    actual, _ = agree(ours, expected, inputs, backend, **CLOSE)
    assert not actual[12:].any()


@on_each_backend
@self_and_cross
def test_sequences_that_cover_all_rows_need_no_zeroing(backend, cross):
    cu_seqlens_k = STARTS[cross][1]
    inputs = [x.detach()[: int(s[-1])].requires_grad_() for x, s in zip(packed_leaves(cross), (cu_seqlens_k, SELF))]
    results = []
    for covered in (False, True):
        torch.use_deterministic_algorithms(covered)  # fills empty memory with NaN
        try:
            with F.backend(backend):
                output = F.varlen_packed_qkv_attention(*(*inputs, None)[:2], *STARTS[cross], covered=covered)
                results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, *results))
