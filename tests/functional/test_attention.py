"""The attention operators: masks, torch's signature and its fused kernel, a change of backend."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fasttfm import functional as F
from fasttfm import reference

from .agreement import agree

BACKENDS = ["torch", "triton"]
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)


def heads(*shape, dtype=torch.float32, **options):
    return torch.randn(*shape, dtype=dtype, **options)


def test_a_compiled_call_follows_a_change_of_backend():
    q = heads(1, 1, 5, 8, requires_grad=True)
    compiled = torch.compile(lambda x: F.attention(x, x, x), fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(reference.attention(q, q, q)[0].sum(), q)
    for backend in ("torch", "triton", "torch"):
        with F.backend(backend):
            torch.testing.assert_close(torch.autograd.grad(compiled(q).sum(), q), wanted)


# ------------------------------------------------------------------------------ torch's scaled_dot_product_attention

OF_TORCH = {
    **{f"leading {leading}": ((*leading, 5, 8), (*leading, 7, 8), {})
       for leading in ((2, 3), (4,), (), (2, 2, 3), (0, 2), (0,), (2, 0, 3))},
    "causal": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), {"is_causal": True}),
    "scale": ((4, 5, 8), (4, 7, 8), {"scale": 0.2}),
    "mask": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), {"attn_mask": torch.rand(5, 7) > 0.3}),
    "mask of floats": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), {"attn_mask": torch.randn(2, 3, 1, 7)}),
    "mask of batches": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), {"attn_mask": torch.rand(2, 1, 1, 5, 7) > 0.3}),
    "shared heads": ((2, 6, 5, 8), (2, 3, 7, 8), {"enable_gqa": True}),
    "one batch of keys": ((2, 6, 5, 8), (1, 6, 7, 8), {}),
}  # fmt: skip
"""Shapes of the query and of key and value, and options."""


@pytest.mark.parametrize("name", OF_TORCH)
def test_scaled_dot_product_attention_equals_torch(name):
    query, key, options = OF_TORCH[name]
    inputs = [heads(*shape, requires_grad=True) for shape in (query, key, key)]
    expected = scaled_dot_product_attention(*inputs, **options)
    agree(lambda *x: F.scaled_dot_product_attention(*x, **options), expected, inputs, atol=1e-5, rtol=1e-4)


def test_scaled_dot_product_attention_beyond_torch():
    q, k, none = heads(2, 2, 3, 5, 8), heads(2, 2, 3, 7, 8), heads(2, 2, 3, 0, 8)
    assert F.scaled_dot_product_attention(none, k, k).shape == (2, 2, 3, 0, 8)
    assert torch.equal(F.scaled_dot_product_attention(q, none, none), torch.zeros_like(q))
    no_heads = heads(2, 0, 5, 8)
    assert F.scaled_dot_product_attention(no_heads, no_heads, no_heads, enable_gqa=True).shape == (2, 0, 5, 8)
    q, k = heads(3, 1, 6, 5, 8), heads(1, 2, 3, 7, 8)
    expected = scaled_dot_product_attention(q.expand(3, 2, 6, 5, 8), *[k.expand(3, 2, 3, 7, 8)] * 2, enable_gqa=True)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k, enable_gqa=True), expected)


@pytest.mark.parametrize("shape", [(), (1,), (70,), (20, 1), (3, 20, 70), (2, 1, 1, 70), (2, 1, 20, 1)])
def test_torchs_kernel_with_masks_of_every_shape(shape):
    q, k, v = (torch.randn(2, 3, n, 8) for n in (20, 70, 70))
    for mask in (torch.rand(shape) < 0.7, torch.randn(shape)):
        actual = F.attention(q, k, v, mask=mask, causal=True, causal_offset=5)
        wide = mask if mask.dtype == torch.bool else mask.double()
        expected = F.attention(q.double(), k.double(), v.double(), mask=wide, causal=True, causal_offset=5)
        torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)
