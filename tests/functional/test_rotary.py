"""Rotary positions: the specification against Hugging Face's models, both backends against the specification."""

import inspect

import pytest
import torch

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.kernels.rotary import Rotation

BACKENDS = ["torch", "triton"]
P = 40


def heads(B, H, L, D, dtype=torch.float32):
    """(B, H, L, D) in memory order (B, L, H, D)."""
    return torch.randn(B, L, H, D).to(dtype).transpose(1, 2).requires_grad_()


def tables(size, dtype=torch.float32):
    return F.rotary_tables(P, size, dtype=dtype)


def test_the_specification_equals_llamas():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = (torch.randn(2, h, 9, 16, dtype=torch.float64, requires_grad=True) for h in (4, 2))
    positions = torch.stack([torch.arange(9), torch.randperm(P)[:9]])
    cos, sin = tables(16, torch.float64)
    theirs = llama.apply_rotary_pos_emb(q, k, *(torch.cat([t, t], -1)[positions] for t in (cos, sin)))
    for x, expected in zip((q, k), theirs, strict=True):
        actual = reference.rotary(x, cos, sin, positions)
        torch.testing.assert_close(actual, expected, atol=1e-14, rtol=1e-12)
        probe = torch.randn_like(expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(y, x, probe)[0] for y in (actual, expected)), atol=1e-14, rtol=1e-12
        )


def test_interleaved_pairs_equal_gpt_js():
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    x = torch.randn(2, 9, 4, 16, dtype=torch.float64)  # (B, L, H, D) there
    cos, sin = (t[None, :9] for t in tables(16, torch.float64))
    expected = gptj.apply_rotary_pos_emb(x, sin, cos).transpose(1, 2)
    actual = reference.rotary(x.transpose(1, 2), cos[0], sin[0], interleaved=True)
    torch.testing.assert_close(actual, expected, atol=1e-14, rtol=1e-12)


def test_tables_equal_llamas():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    embedding = llama.LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))
    expected = embedding(torch.zeros(1), torch.arange(P)[None])
    for ours, theirs in zip(tables(16), expected, strict=True):
        torch.testing.assert_close(ours, theirs[0, :, :8], atol=2e-5, rtol=0)  # theirs multiplies in float32
    with pytest.raises(ValueError, match="even"):
        F.rotary_tables(4, 7)


@pytest.mark.sample(8)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("D", "R"), [(16, 16), (24, 10), (6, 2), (130, 66), (260, 260)])
def test_it_equals_the_specification_forward_and_backward(backend, dtype, interleaved, D, R):
    """Both compute in float32."""
    x, cos_sin = heads(2, 3, 7, D, dtype=dtype), tables(R)
    for positions in (None, torch.arange(5, 12, dtype=torch.int32), torch.randint(0, P, (2, 7))):
        expected = reference.rotary(x, *cos_sin, positions, interleaved=interleaved)
        probe = torch.randn(expected.shape).to(dtype)
        (wanted,) = torch.autograd.grad(expected, x, probe)
        with F.backend(backend):
            actual = F.rotary(x, *cos_sin, positions, interleaved=interleaved)
            (gradient,) = torch.autograd.grad(actual, x, probe)
        close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 8e-3}
        torch.testing.assert_close(actual, expected, **close)
        torch.testing.assert_close(gradient, wanted, **close)
        assert actual.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_inverse_rotation_and_the_second_derivative(backend):
    x, (cos, sin) = heads(1, 2, 5, 8), tables(8)
    with F.backend(backend):
        turned = F.rotary(x, cos, sin)
        torch.testing.assert_close(F.rotary(turned, cos, -sin), x)
        probe = torch.randn_like(turned).requires_grad_()
        (gradient,) = torch.autograd.grad(turned, x, probe, create_graph=True)
        torch.testing.assert_close(*torch.autograd.grad(gradient.sum(), probe), F.rotary(torch.ones_like(x), cos, sin))


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_take_their_own_positions(backend):
    x, (cos, sin) = torch.randn(9, 2, 8), tables(8)
    positions = torch.cat([torch.arange(4), torch.arange(5)])
    with F.backend(backend):
        packed = F.rotary(x, cos, sin, positions)
        single = [F.rotary(part.transpose(0, 1)[None], cos, sin)[0].transpose(0, 1) for part in x.split([4, 5])]
    torch.testing.assert_close(packed, torch.cat(single), atol=0, rtol=0)
    assert packed.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 2, 0, 8), (2, 0, 3, 8)])
def test_empty_tensors(backend, shape):
    with F.backend(backend):
        assert F.rotary(torch.zeros(shape), *tables(8)).shape == shape


def test_an_unchecked_position_out_of_range_gives_zeros(monkeypatch):
    """As on a GPU, where values are not checked."""
    monkeypatch.setitem(inspect.unwrap(F.rotary).__globals__, "values_are_checked", lambda positions: False)
    with F.backend("triton"):
        turned = F.rotary(torch.ones(1, 1, 3, 8), *tables(8), torch.tensor([1, P, -1]))
    assert turned[0, 0, 0].all()
    assert not turned[0, 0, 1:].any()


def test_positions_whose_stride_does_not_fit_32_bits_are_read_by_torch_and_refused_by_the_kernel():
    """The launcher cuts integers off at 32 bits."""
    x, (cos, sin), near = torch.randn(1, 2, 4, 8), tables(8), torch.arange(3, 7)
    far = near.as_strided((1, 4), (1 << 31, 1))
    with F.backend("triton"):
        torch.testing.assert_close(F.rotary(x, cos, sin, far), F.rotary(x, cos, sin, near))
    with pytest.raises(ValueError, match=r"rotary: position_strides is 2,147,483,648; kernels take 32-bit integers"):
        Rotation(x, cos, far)(x, cos, sin, far)


@pytest.mark.parametrize(
    "given",
    [
        *({"base": base} for base in (0.0, -1.0, 1e-40, float("nan"), float("inf"))),
        {"factor": float("nan")},
        *({"bands": bands} for bands in ((0, 1.0, 4.0), (-3, 1.0, 4.0), (float("nan"), 1.0, 4.0))),
        *({"bands": bands} for bands in ((3, float("-inf"), 4.0), (3, 1.0, float("inf")), (3, 1.0, float("nan")))),
    ],
)
def test_tables_of_numbers_that_give_no_angles_are_refused_by_name(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))}="):
        F.rotary_tables(4, 8, **given)


X = torch.zeros(2, 3, 4, 8)
COS = torch.zeros(9, 4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X[0, 0], COS, COS), "floats .B, H, L, D."),
        ((X, COS, COS[:5]), "R from 2 to the head size 8"),
        ((X, COS, COS.half()), "of one dtype"),
        ((X[..., :4], COS, COS), "R from 2 to the head size 4"),
        ((X, COS, COS.clone().requires_grad_()), "take no gradient"),
        ((X[0], COS, COS), "packed x .* needs positions"),
        ((X, COS[:3], COS[:3]), "4 positions and the tables 3"),
        ((X, COS, COS, torch.arange(5)), "int32 or int64"),
        ((X, COS, COS, torch.zeros(4)), r"int32 or int64 \(4,\) or \(1, 4\) or \(2, 4\)"),
        ((X, COS, COS, torch.zeros(4, dtype=torch.int64, device="meta")), "must be on x's device"),
    ],
)
def test_wrong_arguments_are_named(args, message):
    with pytest.raises(ValueError, match=message):
        F.rotary(*args)
