"""Our kernels as torch's flash backend: registration, and torch's own operators on them."""

import pytest
import torch
from torch.nn import functional as nnF

from fasttfm import functional as F
from fasttfm.compat import sdpa
from fasttfm.errors import UserError

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl") or torch.cuda.is_available(),
    reason="this torch has no such registry, or the kernels are not in the interpreter",
)


@pytest.fixture
def on_the_cpu():
    """Registered for the CPU, where torch has no implementation."""
    handle = sdpa.activate("CPU")
    yield torch.ops.aten._scaled_dot_product_flash_attention
    handle.remove()


def heads(key_heads=4, length=19, keys=19):
    generator = torch.Generator().manual_seed(length)
    batch = 1 if length > 64 else 2
    shapes = ((batch, 4, length, 16), (batch, key_heads, keys, 16), (batch, key_heads, keys, 16))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def test_it_is_registered_activated_and_restored(monkeypatch):
    attention = torch.nn.attention
    monkeypatch.setattr(attention._registry, "_FLASH_ATTENTION_IMPLS", {})
    sdpa.register()
    assert attention.list_flash_attention_impls() == ["fasttfm"]
    assert attention.current_flash_attention_impl() is None
    operator = "aten::_scaled_dot_product_flash_attention"
    for name in (operator, f"{operator}_backward"):
        before = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        attention.activate_flash_attention_impl("fasttfm")
        assert attention.current_flash_attention_impl() == "fasttfm"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        attention.restore_flash_attention_impl()
        assert attention.current_flash_attention_impl() is None
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") == before


@pytest.mark.sample(3)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [5, 70])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_torchs_operators_equal_sdpa(on_the_cpu, causal, length, key_heads):
    inputs = heads(key_heads, length, length)
    expected = nnF.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=key_heads != 4, scale=0.3)
    output, lse, *_ = on_the_cpu(*inputs, 0.0, causal, False, scale=0.3)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(output, inputs, grad), torch.autograd.grad(expected, inputs, grad)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    scores = inputs[0] @ inputs[1].repeat_interleave(4 // key_heads, 1).transpose(2, 3) * 0.3
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1) & causal
    torch.testing.assert_close(lse, scores.masked_fill(hidden, -torch.inf).logsumexp(-1), rtol=1e-4, atol=1e-5)


def test_dropout_is_the_same_in_both_passes(on_the_cpu):
    inputs = heads()
    torch.manual_seed(3)
    output, *_, seed, _, _ = on_the_cpu(*inputs, 0.5, True, False)
    given = F.attention(*inputs, causal=True, dropout_p=0.5, seed=seed.view(torch.int64)[:1])
    torch.testing.assert_close(output, given)
    gradients = (torch.autograd.grad(each.square().sum(), inputs) for each in (output, given))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(on_the_cpu(*inputs, 0.5, True, False)[0], output)


@pytest.mark.parametrize("heads_last", [False, True])
def test_outputs_match_torchs_fake(on_the_cpu, heads_last):
    inputs = [x.detach() for x in heads()]
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs] if heads_last else inputs
    meta = [x.to("meta") for x in inputs]
    real, fake = (on_the_cpu(*given, 0.0, True, False) for given in (inputs, meta))
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    gradients = (
        backward(output[0], *given, *output[:6], 0.0, True, *output[6:8])
        for given, output in ((inputs, real), (meta, fake))
    )
    assert real[4:6] == tuple(map(int, fake[4:6]))
    for ours, theirs in [*zip(real[:2] + real[6:8], fake[:2] + fake[6:8], strict=True), *zip(*gradients, strict=True)]:
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


def test_unsupported_calls_are_refused_in_one_line(on_the_cpu, monkeypatch):
    query, key, value = heads()
    with pytest.raises(ValueError, match=r"^return_debug_mask is True: .*leave it False$"):
        on_the_cpu(query, key, value, 0.0, False, True)
    with pytest.raises(ValueError, match=r"^query .* and key .* must agree in batch, heads and head size"):
        sdpa.forward(query, key[:1], value)
    with pytest.raises(ValueError, match=r"^query is torch.float64 on cpu: no kernel takes it$"):
        sdpa.forward(*(x.double() for x in (query, key, value)))
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(UserError, match=r"^torch .* has no register_flash_attention_impl: upgrade it, or use"):
        sdpa.register()
