"""Attention in half precision: scores, softmax and the gradients of both are float32 on every route."""

import pytest
import torch
from torch.nn import functional as nnF

from fasttfm import functional as F
from fasttfm import reference

FLOOR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative to the largest magnitude: about one unit in the last place."""
DTYPES = pytest.mark.parametrize("dtype", FLOOR, ids=str)
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])


@DTYPES
@BACKENDS
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask"])
@pytest.mark.parametrize(("queries", "keys", "width"), [(3, 6, 8), (48, 70, 32)])
def test_the_error_is_at_most_twice_that_of_torch(queries, keys, width, masked, backend, dtype):
    """For numbers between -9 and 9, as torch's own tests have them."""
    shapes = [(4, 4, queries, width), *2 * [(4, 4, keys, width)], *[(queries, keys)] * masked]
    tensors = [torch.empty(shape).uniform_(-9, 9).to(dtype) for shape in shapes]

    def solve(function, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in tensors]
        output = function(*inputs[:3], *(x.detach() for x in inputs[3:]), is_causal=not masked)
        probe = torch.cos(1.7 * torch.arange(output.numel(), dtype=torch.float64)).view(output.shape)
        return output, *torch.autograd.grad((output.double() * probe).sum(), inputs[:3])

    exact = solve(nnF.scaled_dot_product_attention, torch.float64)
    of_torch = solve(nnF.scaled_dot_product_attention, dtype)
    with F.backend(backend):
        ours = solve(F.scaled_dot_product_attention, dtype)
    largest = max(x.abs().max().item() for x in exact)
    for name, x, y, z in zip(("output", "query", "key", "value"), ours, of_torch, exact, strict=True):
        error, allowed = ((each.double() - z).abs().max().item() for each in (x, y))
        assert error <= 2 * allowed + FLOOR[dtype] * largest, name


STARTS = torch.tensor([0, 40, 64])
CALLS = {
    "attention": lambda x: F.attention(x, x, x),
    "a negative scale": lambda x: F.attention(x, x, x, scale=-1.0),
    "lengths": lambda x: F.attention(x, x, x, key_lengths=torch.tensor([64, 9])),
    "a mask": lambda x: F.attention(x, x, x, mask=torch.zeros(64, 64)),
    "a window": lambda x: F.attention(x, x, x, causal=True, window=(5, None)),
    "a cap, slopes": lambda x: F.attention(x, x, x, softcap=1e5, alibi_slopes=torch.ones(2)),
    "sinks": lambda x: F.attention(x, x, x, sinks=torch.zeros(2)),
    "packed": lambda x: F.varlen_attention(*3 * [x[0].transpose(0, 1)], STARTS, STARTS, 40, 40),
    "packed, sinks": lambda x: F.varlen_attention(
        *3 * [x[0].transpose(0, 1)], STARTS, STARTS, 40, 40, sinks=torch.zeros(2)
    ),
    "joint": lambda x: F.packed_qkv_attention(torch.stack(3 * [x.transpose(1, 2)], 2)),
    "joint and packed": lambda x: F.varlen_packed_qkv_attention(
        torch.stack(3 * [x[0].transpose(0, 1)], 1), None, STARTS, STARTS, 40, 40
    ),
    "a cache": lambda x: F.attention_with_cache(x[:, :, :3], x.clone(), x.clone(), cache_lengths=64),
    "a cache, a window": lambda x: F.attention_with_cache(
        x[:, :, :3], x.clone(), x.clone(), cache_lengths=64, causal=True, window=(9, None)
    ),
}


@pytest.mark.sample(13)
@DTYPES
@BACKENDS
@pytest.mark.parametrize("size", [80, 320])
@pytest.mark.parametrize("call", CALLS)
def test_scores_beyond_the_range_of_float16_are_scores(call, size, backend, dtype):
    """Each score is 180 * 180 * sqrt(size), more than 65,504: weights are equal, and the output equals the values."""
    with F.backend(backend):
        x = torch.full((2, 2, 64, size), 180.0, dtype=dtype, requires_grad="cache" not in call)
        output = CALLS[call](x)
        torch.testing.assert_close(output, torch.full_like(output, 180.0), rtol=FLOOR[dtype], atol=0.0)
        if x.requires_grad:
            (gradient,) = torch.autograd.grad(output.float().sum(), x)
            assert gradient.isfinite().all()


@DTYPES
@BACKENDS
@pytest.mark.parametrize("given", [{}, {"softcap": 1e5}, {"sinks": torch.zeros(2)}], ids=str)
def test_weights_and_log_sum_exps_of_large_scores(given, backend, dtype):
    x = torch.full((1, 2, 64, 80), 180.0, dtype=dtype)
    score = 180.0 * 180.0 * 80**0.5
    capped = 1e5 * torch.tensor(score / 1e5).tanh().item() if "softcap" in given else score
    with F.backend(backend):
        weights = F.attention_weights(x, x, **given)
        _, lse = F.attention_with_cache(x, x.clone(), x.clone(), cache_lengths=64, return_lse=True, **given)
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 64))
    torch.testing.assert_close(lse, torch.full_like(lse, capped + 4.1589), rtol=2e-6, atol=0.0)


@DTYPES
@pytest.mark.parametrize("softcap", [0.0, 50.0, 1e-6])
def test_weights_under_autocast_come_from_scores_in_float32(softcap, dtype):
    x = 9.0 * torch.randn(2, 2, 40, 64)
    with torch.autocast("cpu", dtype):
        weights, output = F.attention_weights(x, x, softcap=softcap), F.attention(x, x, x, softcap=softcap)
    assert weights.dtype == output.dtype == dtype
    half = x.to(dtype).double()
    wanted, exact = reference.attention(half, half, half, softcap=softcap)
    torch.testing.assert_close(weights.double(), exact, rtol=2 * FLOOR[dtype], atol=1e-6)
    torch.testing.assert_close(output.double(), wanted, rtol=0.0, atol=4 * FLOOR[dtype] * wanted.abs().max().item())
