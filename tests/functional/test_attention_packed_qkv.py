"""Attention on packed projections, padded and packed sequences: both routes against reference.py."""

import pytest
import torch
from biased_attention import biased_attention

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.kernels.proof.launch_log import LaunchLog

from .agreement import agree

on_each_backend = pytest.mark.parametrize("backend", ["torch", "triton"])
self_and_cross = pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
CLOSE = {"atol": 2e-5, "rtol": 1e-4, "gradients": {"atol": 5e-5, "rtol": 1e-4}}
B, H, L, S, D = 2, 3, 9, 14, 16


def leaf_tensors(cross, dtype=torch.float32, keys=S, shared=1):
    """shared: query heads per key head."""
    if cross:
        return [torch.randn(B, keys, 2, H, D, dtype=dtype), torch.randn(B, L, shared * H, D, dtype=dtype)]
    return [torch.randn(B, keys, 3, H, D, dtype=dtype)]


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
    inputs = [x.requires_grad_() for x in leaf_tensors(cross, keys=keys, shared=shared)]
    options = {"key_lengths": torch.tensor([keys - 3, 0]), "causal": not cross}
    if p:
        options |= {"dropout_p": p, "seed": torch.tensor([6]), "site": 2}
    expected = specification(*inputs, **options)
    agree(lambda *x: F.packed_qkv_attention(*x, **options), expected, inputs, backend, **CLOSE)


@on_each_backend
def test_half_precision_has_the_bits_of_separate_tensors(backend):
    packed_qkv = leaf_tensors(False, torch.bfloat16)[0].requires_grad_()
    with F.backend(backend):
        actual = F.packed_qkv_attention(packed_qkv, causal=True)
        separate = (
            F.attention(*(x.transpose(1, 2) for x in packed_qkv.unbind(2)), causal=True).transpose(1, 2).flatten(2)
        )
        probe = torch.randn_like(actual)
        assert torch.equal(actual, separate)
        assert torch.equal(*(torch.autograd.grad(out, packed_qkv, probe)[0] for out in (actual, separate)))


@pytest.mark.parametrize("packed", [False, True])
@self_and_cross
def test_a_kernel_sums_the_bias_gradients(cross, packed):
    given = leaf_tensors(cross)[::-1]
    given = [x.flatten(0, 1) if packed else x for x in given]
    given = [x.requires_grad_() for x in given]
    biases = [torch.zeros(x.shape[2 - packed :].numel(), requires_grad=True) for x in given]
    options = {"starts": torch.tensor([0, L, 2 * L]), "longest": S} if packed else {"lengths": torch.tensor([S - 3, 4])}
    with F.backend("triton"):
        output = biased_attention(*given, biases=biases, p=0.3, seed=torch.tensor([6]), **options)
        gradients = torch.autograd.grad(output, [*given, *biases], torch.randn_like(output))
    for d, d_bias in zip(gradients[: len(given)], gradients[len(given) :], strict=True):
        torch.testing.assert_close(d_bias, d.flatten(0, 1 - packed).sum(0).flatten(), atol=1e-4, rtol=1e-4)


@self_and_cross
def test_the_kernel_writes_contiguous_gradients_in_one_launch(cross):
    inputs = [x.requires_grad_() for x in leaf_tensors(cross)]
    with F.backend("triton"):
        out = F.packed_qkv_attention(*inputs)
        with LaunchLog() as log:
            gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(g.is_contiguous() for g in gradients)
    assert log.triton == {"attention.short._backward": 1}
    assert log.total - log.triton.total() <= 1  # ones_like


@on_each_backend
@self_and_cross
@pytest.mark.parametrize("kind", ["bool", "floats"])
def test_sequence_first_memory_with_a_mask(backend, cross, kind):
    """torch.nn's layout: neither output nor gradients are copied."""
    inputs = [x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in leaf_tensors(cross)]
    mask = torch.rand(B, 1, 1, S) < 0.6
    mask[0] = False  # a row with no key
    mask = mask if kind == "bool" else torch.randn(B, H, 1, S).masked_fill(~mask, -torch.inf)
    expected = specification(*inputs, mask=mask)
    actual, gradients = agree(lambda *x: F.packed_qkv_attention(*x, mask=mask), expected, inputs, backend, **CLOSE)
    assert all(g.stride() == x.stride() for g, x in zip(gradients, inputs, strict=True))
    assert actual.transpose(0, 1).is_contiguous() == (backend == "triton")


def test_autocast_computes_in_its_precision():
    inputs = [x.requires_grad_() for x in leaf_tensors(True)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.packed_qkv_attention(*inputs)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in inputs)


# ------------------------------------------------------------------------------------------------ packed sequences

SELF = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
"""Three sequences of 5, 0 and 7 tokens; two rows of padding follow."""
OTHER = torch.tensor([0, 3, 9, 20], dtype=torch.int32)


def packed_leaves(cross):
    if cross:
        return [torch.randn(21, 2, H, D), torch.randn(14, H, D)]
    return [torch.randn(14, 3, H, D)]


def starts(cross):
    return (SELF, OTHER, 7, 11) if cross else (SELF, SELF, 7, 7)


@on_each_backend
@self_and_cross
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_packed_sequences_equal_varlen_attention_on_views(backend, cross, p):
    inputs = [x.requires_grad_() for x in packed_leaves(cross)]
    packed_qkv, query = (*inputs, None)[:2]
    parts = packed_qkv.unbind(1)
    options = {"causal": not cross} | ({"dropout_p": p, "seed": torch.tensor([6]), "site": 2} if p else {})
    expected = F.varlen_attention(*(parts if query is None else (query, *parts)), *starts(cross), **options).flatten(1)

    def ours(packed_qkv, query=None):
        return F.varlen_packed_qkv_attention(packed_qkv, query, *starts(cross), **options)

    actual, _ = agree(ours, expected, inputs, backend, **CLOSE)
    assert not actual[12:].any()


@on_each_backend
@self_and_cross
def test_sequences_that_cover_all_rows_need_no_zeroing(backend, cross):
    cu_seqlens_q, cu_seqlens_k, *longest = starts(cross)
    inputs = [x[: int(s[-1])].requires_grad_() for x, s in zip(packed_leaves(cross), (cu_seqlens_k, cu_seqlens_q))]
    given = (*(*inputs, None)[:2], cu_seqlens_q, cu_seqlens_k, *longest)
    with F.backend(backend):
        expected = F.varlen_packed_qkv_attention(*given)
        probe = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, inputs, probe)
        torch.use_deterministic_algorithms(True)  # fills empty memory with NaN
        try:
            actual = F.varlen_packed_qkv_attention(*given, covered=True)
            gradients = torch.autograd.grad(actual, inputs, probe)
        finally:
            torch.use_deterministic_algorithms(False)
    assert torch.equal(actual, expected)
    assert all(map(torch.equal, gradients, wanted))
