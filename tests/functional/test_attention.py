"""The attention operators: half precision, autocast, torch.compile, torch's signature and its fused kernel."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.functional.attention import products

from .agreement import agree

BACKENDS = ["torch", "triton"]


def heads(*shape, dtype=torch.float32, **options):
    return torch.randn(*shape, dtype=dtype, **options)


@pytest.mark.parametrize("keys", [5, 15, 16, 33])
def test_padding_of_short_rows_changes_nothing(keys):
    q, k, v = (heads(40, 8, n, 16, requires_grad=True) for n in (keys, keys, keys))
    expected, _ = reference.attention(q, k, v, causal=True)
    agree(lambda *x: F.attention(*x, causal=True), expected, (q, k, v), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 2, 18, 20), (1, 2, 1, 20), (18, 1), ()])
def test_the_gradient_of_an_additive_mask_has_its_shape_and_dtype(backend, shape):
    q, k, v = heads(2, 2, 18, 16), heads(2, 2, 20, 16), heads(2, 2, 20, 16)
    mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(reference.attention(q, k, v, mask=mask.float())[0].square().sum(), mask)
    with F.backend(backend):
        for output in (F.attention(q, k, v, mask=mask), F.attention_weights(q, k, mask=mask) @ v):
            (actual,) = torch.autograd.grad(output.square().sum(), mask)
            assert actual.dtype == torch.float64
            torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "hide",
    [
        {"key_lengths": torch.tensor([2])},
        {"mask": torch.tensor([True, True, False, False])},
        {"mask": torch.tensor([0.0, 0.0, -torch.inf, -torch.inf])},
        {"causal": True, "causal_offset": 1},
    ],
    ids=["lengths", "bool", "additive", "causal"],
)
def test_hidden_keys_whose_float16_scores_overflow_stay_hidden(backend, hide):
    """An overflow to inf plus the mask's -inf would be NaN."""
    q = torch.full((1, 1, 1, 8), 200.0, dtype=torch.float16, requires_grad=True)
    k = torch.tensor([0.25, 0.25, 3e4, -3e4], dtype=torch.float16).view(1, 1, 4, 1).expand(1, 1, 4, 8).clone()
    k.requires_grad_()
    v = torch.tensor([1.0, 2.0, 7.0, 8.0], dtype=torch.float16).view(1, 1, 4, 1).expand(1, 1, 4, 8)
    with F.backend(backend):
        output = F.attention(q, k, v, scale=1.0, **hide)
        gradients = torch.autograd.grad(output.sum(), (q, k))
        weights = F.attention_weights(q, k, scale=1.0, **hide)
    assert weights.flatten().tolist() == [0.5, 0.5, 0.0, 0.0]
    torch.testing.assert_close(output, torch.full_like(output, 1.5))
    assert all(torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("width", [64, 48, 272])
def test_float16_products_beyond_its_range_are_scaled_before_they_overflow(backend, width, sign):
    """Q K^T is at least 73,728, scaled 9,216: the softmax equals float32's. Heads of 272 take matrix products and
    masked_softmax.py."""
    q, k = torch.full((1, 1, 1, width), 48.0), torch.full((1, 1, 3, width), 32.0)
    k[0, 0, 1] = 31.75
    v, scale = heads(1, 1, 3, width), sign * width**-0.5
    leaf_tensors = [x.half().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in leaf_tensors]
    expected, _ = reference.attention(*exact, scale=scale)
    wanted = torch.autograd.grad(expected.sum(), exact)
    with F.backend(backend):
        for output in (
            F.attention(*leaf_tensors, scale=scale),
            F.attention_weights(*leaf_tensors[:2], scale=scale) @ leaf_tensors[2],
        ):
            torch.testing.assert_close(output.double(), expected, atol=2e-3, rtol=2e-3)
            for actual, want in zip(torch.autograd.grad(output.sum(), leaf_tensors), wanted, strict=True):
                torch.testing.assert_close(actual.double(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_joining_the_heads_is_a_view(backend):
    with F.backend(backend):
        output = F.attention(heads(2, 3, 5, 8), heads(2, 3, 6, 8), heads(2, 3, 6, 16))
    assert output.transpose(1, 2).is_contiguous()


def test_backends_drop_the_same_weights():
    q, k = heads(2, 2, 9, 8), heads(2, 2, 30, 8)
    v = torch.eye(30).expand(2, 2, 30, 30)
    outputs = []
    for backend in BACKENDS:
        with F.backend(backend):
            outputs.append(F.attention(q, k, v, dropout_p=0.3, seed=torch.tensor([8]), site=1))
    assert torch.equal(outputs[0] != 0, outputs[1] != 0)


# ------------------------------------------------------------------------------------------------- inside PyTorch


def test_a_compiled_call_follows_a_change_of_backend():
    q = heads(1, 1, 5, 8, requires_grad=True)
    compiled = torch.compile(lambda x: F.attention(x, x, x), fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(reference.attention(q, q, q)[0].sum(), q)
    for backend in ("torch", "triton", "torch"):
        with F.backend(backend):
            torch.testing.assert_close(torch.autograd.grad(compiled(q).sum(), q), wanted)


def test_autocast_casts_the_products_and_not_the_mask():
    q, k, v = (heads(2, 2, 5, 8, requires_grad=True) for _ in range(3))
    mask = heads(5, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = F.attention(q, k, v.half(), mask=mask)
        weights = F.attention_weights(q, k, mask=mask)
        packed = F.varlen_attention(q[0], k[0], v[0], torch.tensor([0, 2]), torch.tensor([0, 2]), 2, 2)
    assert output.dtype == weights.dtype == packed.dtype == torch.bfloat16
    low = [x.bfloat16() for x in (q, k, v)]
    torch.testing.assert_close(output, F.attention(*low, mask=mask), atol=0.06, rtol=0.05)
    gradients = torch.autograd.grad(output.float().sum(), (q, k, mask))
    assert [g.dtype for g in gradients] == [torch.float32] * 3


# ------------------------------------------------------------------------------ torch's scaled_dot_product_attention


@pytest.mark.parametrize("leading", [(2, 3), (4,), (), (2, 2, 3), (0, 2), (0,), (2, 0, 3)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}])
def test_scaled_dot_product_attention_equals_torch(leading, options):
    q, k, v = (heads(*leading, n, 8) for n in (5, 7, 7))
    torch.testing.assert_close(
        F.scaled_dot_product_attention(q, k, v, **options), scaled_dot_product_attention(q, k, v, **options)
    )


def test_scaled_dot_product_attention_of_no_queries_and_of_no_keys():
    q, k, none = heads(2, 2, 3, 5, 8), heads(2, 2, 3, 7, 8), heads(2, 2, 3, 0, 8)
    assert F.scaled_dot_product_attention(none, k, k).shape == (2, 2, 3, 0, 8)
    assert torch.equal(F.scaled_dot_product_attention(q, none, none), torch.zeros_like(q))
    no_heads = heads(2, 0, 5, 8)
    assert F.scaled_dot_product_attention(no_heads, no_heads, no_heads, enable_gqa=True).shape == (2, 0, 5, 8)


def test_scaled_dot_product_attention_takes_torchs_masks():
    q, k, v = (heads(2, 2, 3, n, 8) for n in (5, 7, 7))
    for mask in (torch.rand(5, 7) > 0.3, torch.randn(2, 3, 1, 7), torch.rand(2, 1, 1, 5, 7) > 0.3):
        torch.testing.assert_close(
            F.scaled_dot_product_attention(q, k, v, mask), scaled_dot_product_attention(q, k, v, mask)
        )
    with pytest.raises(RuntimeError, match="both given"):
        F.scaled_dot_product_attention(q, k, v, torch.ones(5, 7, dtype=torch.bool), is_causal=True)


@pytest.mark.parametrize("mask", [torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scaled_dot_product_attention_takes_the_mask_dtypes_of_torch(dtype, mask):
    q, given = torch.ones(1, 2, 5, 8, dtype=dtype), torch.ones(5, 5).to(mask)
    try:
        expected = scaled_dot_product_attention(q, q, q, given)
    except RuntimeError:
        with pytest.raises(ValueError, match=r"attn_mask has dtype .*bool"):
            F.scaled_dot_product_attention(q, q, q, given)
    else:
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, given), expected)
        return
    if mask.is_floating_point:
        with torch.autocast("cpu", torch.bfloat16):
            assert F.scaled_dot_product_attention(q, q, q, given).isfinite().all()


@pytest.mark.parametrize(
    ("query", "mask"),
    [((5, 8), (1, 5, 5)), ((4, 5, 8), (3, 5, 5)), ((4, 5, 8), (5, 4)), ((2, 3, 4, 5, 8), (2, 1, 5, 5))],
)
def test_scaled_dot_product_attention_refuses_masks_that_do_not_broadcast(query, mask):
    x = torch.randn(query)
    with pytest.raises(ValueError, match=r"attn_mask \(.* does not broadcast to \("):
        F.scaled_dot_product_attention(x, x, x, torch.ones(mask, dtype=torch.bool))


def test_scaled_dot_product_attention_shares_heads_and_broadcasts():
    q, k = heads(2, 6, 5, 8, requires_grad=True), heads(2, 3, 7, 8, requires_grad=True)
    expected = scaled_dot_product_attention(q, k, k, enable_gqa=True)
    agree(lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True), expected, (q, k))
    one = heads(1, 6, 7, 8)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, one, one), scaled_dot_product_attention(q, one, one))
    with pytest.raises(ValueError, match="multiple of the heads"):
        F.scaled_dot_product_attention(q, heads(2, 4, 7, 8), heads(2, 4, 7, 8), enable_gqa=True)
    with pytest.raises(ValueError, match="which need equally many"):
        F.scaled_dot_product_attention(q, k, heads(2, 2, 7, 8), enable_gqa=True)
    deep = heads(3, 1, 6, 5, 8), heads(1, 2, 3, 7, 8)
    torch.testing.assert_close(
        F.scaled_dot_product_attention(deep[0], deep[1], deep[1], enable_gqa=True),
        scaled_dot_product_attention(
            deep[0].expand(3, 2, 6, 5, 8), *[deep[1].expand(3, 2, 3, 7, 8)] * 2, enable_gqa=True
        ),
    )


def test_calls_that_torchs_kernel_does_not_support(monkeypatch):
    monkeypatch.setattr(products, "fused_forward", None)  # calling it would fail
    q, k, v = torch.randn(3, 1, 2, 64, 8).unbind()
    F.attention(q, k, v, dropout_p=0.5)
    F.attention(q, k, v, mask=torch.zeros(64, 64, requires_grad=True))
    F.attention(q, k, v[..., :4])
    F.attention(q[:, :, :3], k, v)
    F.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert F.attention(q, k, v).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(), (1,), (70,), (20, 1), (3, 20, 70), (2, 1, 1, 70), (2, 1, 20, 1)])
def test_torchs_kernel_with_masks_of_every_shape(shape):
    q, k, v = (torch.randn(2, 3, n, 8) for n in (20, 70, 70))
    for mask in (torch.rand(shape) < 0.7, torch.randn(shape)):
        actual = F.attention(q, k, v, mask=mask, causal=True, causal_offset=5)
        wide = mask if mask.dtype == torch.bool else mask.double()
        expected = F.attention(q.double(), k.double(), v.double(), mask=wide, causal=True, causal_offset=5)
        torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)
