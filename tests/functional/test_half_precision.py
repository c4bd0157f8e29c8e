"""Attention in half precision: scores, softmax and the gradients of both are float32 on every route."""

import pytest
import torch

from fasttfm import functional as F

FLOOR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative to the largest magnitude: about one unit in the last place."""
DTYPES = pytest.mark.parametrize("dtype", FLOOR, ids=str)
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])


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
