"""Rotary positions: the specification against Hugging Face's models, both backends against the specification."""

import inspect

import pytest
import torch

from fasttfm import functional as F
from fasttfm import reference

P = 40
on_each_backend = pytest.mark.parametrize("backend", ["torch", "triton"])


def tables(size, dtype=torch.float32):
    return F.rotary_tables(P, size, dtype=dtype)


def test_the_specification_and_its_tables_equal_llamas():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    q, k = (torch.randn(2, h, 9, 16, dtype=torch.float64, requires_grad=True) for h in (4, 2))
    positions = torch.stack([torch.arange(9), torch.randperm(P)[:9]])
    cos, sin = tables(16, torch.float64)
    theirs = llama.apply_rotary_pos_emb(q, k, *(torch.cat([t, t], -1)[positions] for t in (cos, sin)))
    for x, expected in zip((q, k), theirs, strict=True):
        actual, probe = reference.rotary(x, cos, sin, positions), torch.randn_like(expected)
        torch.testing.assert_close(actual, expected, atol=1e-14, rtol=1e-12)
        gradients = (torch.autograd.grad(y, x, probe)[0] for y in (actual, expected))
        torch.testing.assert_close(*gradients, atol=1e-14, rtol=1e-12)
    embedding = llama.LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))
    for ours, table in zip(tables(16), embedding(torch.zeros(1), torch.arange(P)[None]), strict=True):
        torch.testing.assert_close(ours, table[0, :, :8], atol=2e-5, rtol=0)  # theirs multiplies in float32


def test_interleaved_pairs_equal_gpt_js():
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    x = torch.randn(2, 9, 4, 16, dtype=torch.float64)  # (B, L, H, D) there
    cos, sin = (t[None, :9] for t in tables(16, torch.float64))
    expected = gptj.apply_rotary_pos_emb(x, sin, cos).transpose(1, 2)
    actual = reference.rotary(x.transpose(1, 2), cos[0], sin[0], interleaved=True)
    torch.testing.assert_close(actual, expected, atol=1e-14, rtol=1e-12)


@pytest.mark.sample(8)
@on_each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("D", "R"), [(16, 16), (24, 10), (6, 2), (130, 66), (260, 260)])
def test_it_equals_the_specification_forward_and_backward(backend, dtype, interleaved, D, R):
    """On heads in memory order (B, L, H, D); both compute in float32."""
    x, cos_sin = torch.randn(2, 7, 3, D).to(dtype).transpose(1, 2).requires_grad_(), tables(R)
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 8e-3}
    for positions in (None, torch.arange(5, 12, dtype=torch.int32), torch.randint(0, P, (2, 7))):
        expected = reference.rotary(x, *cos_sin, positions, interleaved=interleaved)
        probe = torch.randn(expected.shape).to(dtype)
        (wanted,) = torch.autograd.grad(expected, x, probe)
        with F.backend(backend):
            actual = F.rotary(x, *cos_sin, positions, interleaved=interleaved)
            (gradient,) = torch.autograd.grad(actual, x, probe)
        torch.testing.assert_close((actual, gradient), (expected, wanted), **close)
        assert actual.transpose(1, 2).is_contiguous()


@on_each_backend
def test_packed_sequences_take_their_own_positions(backend):
    x, (cos, sin) = torch.randn(9, 2, 8), tables(8)
    with F.backend(backend):
        packed = F.rotary(x, cos, sin, torch.cat([torch.arange(4), torch.arange(5)]))
        single = [F.rotary(part.transpose(0, 1)[None], cos, sin)[0].transpose(0, 1) for part in x.split([4, 5])]
        for shape in ((0, 2, 3, 8), (2, 2, 0, 8), (2, 0, 3, 8)):
            assert F.rotary(torch.zeros(shape), cos, sin).shape == shape
    assert torch.equal(packed, torch.cat(single))
    assert packed.is_contiguous()


def test_an_unchecked_position_out_of_range_gives_zeros(monkeypatch):
    """As on a GPU, where values are not checked."""
    monkeypatch.setitem(inspect.unwrap(F.rotary).__globals__, "values_are_checked", lambda positions: False)
    with F.backend("triton"):
        turned = F.rotary(torch.ones(1, 1, 3, 8), *tables(8), torch.tensor([1, P, -1]))
    assert turned[0, 0, 0].all()
    assert not turned[0, 0, 1:].any()
