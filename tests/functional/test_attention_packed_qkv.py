"""Attention on projections as they lie in memory: both routes against reference.py, and one gradient memory."""

import pytest
import torch
from biased_attention import biased_attention

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.kernels.proof.launch_log import LaunchLog

from .agreement import agree

BACKENDS = ["torch", "triton"]
CLOSE = {"atol": 2e-5, "rtol": 1e-4, "gradients": {"atol": 5e-5, "rtol": 1e-4}}
B, H, L, S, D = 2, 3, 9, 14, 16


def leaf_tensors(cross, dtype=torch.float32, keys=S):
    if cross:
        return [torch.randn(B, keys, 2, H, D, dtype=dtype), torch.randn(B, L, H, D, dtype=dtype)]
    return [torch.randn(B, keys, 3, H, D, dtype=dtype)]


def specification(packed_qkv, query=None, **options):
    parts = [part.transpose(1, 2) for part in packed_qkv.unbind(2)]
    q, k, v = parts if query is None else (query.transpose(1, 2), *parts)
    return reference.attention(q, k, v, **options)[0].transpose(1, 2).flatten(2)


@pytest.mark.sample(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("keys", [S, 150], ids=["short", "long"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_it_equals_the_reference_forward_and_backward(backend, cross, keys, p):
    inputs = [x.requires_grad_() for x in leaf_tensors(cross, keys=keys)]
    options = {"key_lengths": torch.tensor([keys - 3, 0]), "causal": not cross}
    if p:
        options |= {"dropout_p": p, "seed": torch.tensor([6]), "site": 2}
    expected = specification(*inputs, **options)
    agree(lambda *x: F.packed_qkv_attention(*x, **options), expected, inputs, backend, **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_as_exact_as_apart(backend):
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
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_a_kernel_sums_the_gradients_of_the_projections_biases(cross, packed):
    given = leaf_tensors(cross)[::-1]
    given = [x.flatten(0, 1) if packed else x for x in given]
    given = [x.requires_grad_() for x in given]
    biases = [torch.zeros(x.shape[2 - packed :].numel(), requires_grad=True) for x in given]
    options = {"starts": torch.tensor([0, L, 2 * L]), "longest": S} if packed else {"lengths": torch.tensor([S - 3, 4])}
    with F.backend("triton"):
        output = biased_attention(*given, biases=biases, p=0.3, seed=torch.tensor([6]), **options)
        gradients = torch.autograd.grad(output, [*given, *biases], torch.randn_like(output))
    for d, d_bias in zip(gradients[: len(given)], gradients[len(given) :]):
        torch.testing.assert_close(d_bias, d.flatten(0, 1 - packed).sum(0).flatten(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keys", [S, 150], ids=["short", "long"])
def test_queries_of_more_heads_than_keys_have(backend, keys):
    inputs = [torch.randn(B, keys, 2, 2, D).requires_grad_(), torch.randn(B, L, 4, D).requires_grad_()]
    options = {"key_lengths": torch.tensor([keys - 3, 4]), "dropout_p": 0.3, "seed": torch.tensor([6])}
    expected = specification(*inputs, **options)
    agree(lambda *x: F.packed_qkv_attention(*x, **options), expected, inputs, backend, **CLOSE)


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_gradients_are_written_where_the_next_product_reads_them(cross):
    inputs = [x.requires_grad_() for x in leaf_tensors(cross)]
    with F.backend("triton"):
        out = F.packed_qkv_attention(*inputs)
        with LaunchLog() as log:
            gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(g.is_contiguous() for g in gradients)
    assert log.triton == {"attention.short._backward": 1}
    assert log.total - log.triton.total() <= 1  # ones_like


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("kind", ["bool", "floats"])
def test_a_mask_and_memory_with_the_positions_first(backend, cross, kind):
    """torch.nn's layout: nothing is copied on the way out, nor of the gradients."""
    inputs = [x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in leaf_tensors(cross)]
    mask = torch.rand(B, 1, 1, S) < 0.6
    mask[0] = False  # a row with no key
    mask = mask if kind == "bool" else torch.randn(B, H, 1, S).masked_fill(~mask, -torch.inf)
    expected = specification(*inputs, mask=mask)
    actual, gradients = agree(lambda *x: F.packed_qkv_attention(*x, mask=mask), expected, inputs, backend, **CLOSE)
    assert all(g.stride() == x.stride() for g, x in zip(gradients, inputs))
    assert actual.transpose(0, 1).is_contiguous() == (backend == "triton")


def test_a_mask_that_takes_a_gradient_is_refused():
    packed_qkv, mask = leaf_tensors(False)[0], torch.zeros(S, requires_grad=True)
    with pytest.raises(ValueError, match="packed_qkv_attention's mask takes no gradient"):
        F.packed_qkv_attention(packed_qkv, mask=mask)


def test_autocast_computes_in_its_precision():
    inputs = [x.requires_grad_() for x in leaf_tensors(True)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.packed_qkv_attention(*inputs)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in inputs)
