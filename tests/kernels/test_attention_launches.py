"""Launches of attention: the kernels of a call, their arguments, and integers that do not fit 32 bits."""

import pytest
import torch
from attention_once import gradient_of_mask
from biased_attention import biased_attention
from test_attention_kernels import ROUTES, seeded, take, tensors  # noqa: F401 (take: a fixture)

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.functional.attention.layout import by_head
from fasttfm.kernels import launch, masked_softmax
from fasttfm.kernels.attention import backward as attention_backward
from fasttfm.kernels.attention import forward as attention
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.attention import once
from fasttfm.kernels.attention import short as attention_short
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.jit import Launch
from fasttfm.kernels.proof.launch_log import LaunchLog
from fasttfm.kernels.tiles.attention import Tile


def test_heads_too_wide_for_the_kernels_use_cublas():
    assert attention_launch.route.shipped(attention_launch.chip(torch.device("cpu")), "fp16", 512, 64) == "softmax"
    with F.backend("triton"):
        q = torch.randn(1, 1, 3, 300)
        torch.testing.assert_close(F.attention(q, q, q), reference.attention(q, q, q)[0])


def calls_with_site(site):
    """One call of every plan that draws random numbers."""
    x, lse = torch.randn(1, 1, 4, 8), torch.zeros(1, 1, 4)
    weights, mask = torch.full((1, 1, 4, 4), 0.25), torch.zeros(4, 4)
    dropped = {"dropout_p": 0.1, "seed": torch.tensor([1]), "site": site}
    for kernel in ("flash", "short"):
        yield lambda kernel=kernel: once.forward(kernel, x, x, x, **dropped)
        yield lambda kernel=kernel: once.backward(kernel, x, x, x, x, x, lse, **dropped)
    yield lambda: gradient_of_mask(x, x, x, x, x, lse, mask, **dropped)
    seed = dropped["seed"]
    yield lambda: masked_softmax.Forward(weights, dropout_p=0.1)(weights, 1.0, seed=seed, site=site)
    yield lambda: masked_softmax.Backward(weights, 0.1)(weights, weights, 1.0, seed, site)


def test_a_site_that_does_not_fit_32_bits_is_refused_by_name():
    for call in calls_with_site(2**31):
        with pytest.raises(ValueError, match=r"site is 2,147,483,648; kernels take 32-bit integers") as said:
            call()
        assert "\n" not in str(said.value)
    for call in calls_with_site(2**31 - 1):
        call()


def test_a_packed_length_that_does_not_fit_32_bits_is_refused_by_name(monkeypatch):
    x, starts = by_head(torch.randn(4, 1, 8), 1), torch.tensor([0, 4])
    for kernel, kernels, table in (("flash", attention, "FORWARD"), ("short", attention_short, "SHORT_FORWARD")):
        monkeypatch.setattr(kernels, table, lambda *size: Tile(16, 16, 4))
        with pytest.raises(ValueError, match=r"S is 2,147,483,648"):
            once.forward(kernel, x, x, x, packed=(starts, starts, 4, 2**31))


@pytest.mark.parametrize("route", ROUTES)
def test_a_causal_offset_far_past_or_before_all_keys(take, route):  # noqa: F811
    """It must not overflow when it is added to a row index in 32 bits."""
    take(route)
    q, k, v = (torch.randn(1, 2, 18, 8) for _ in range(3))
    expected = F.attention(q, k, v)
    for far in (2**31 - 1, 2**40):
        torch.testing.assert_close(F.attention(q, k, v, causal=True, causal_offset=far), expected)
        assert not F.attention(q, k, v, causal=True, causal_offset=-far).any()


@pytest.mark.parametrize("route", ["short", "flash", "heads"])
def test_shared_keys_and_values_are_not_expanded(take, route, monkeypatch):  # noqa: F811
    """Kernels get the key heads as they are, and gradients have as many heads."""
    take(route)
    seen = []
    launch = Launch.__call__
    monkeypatch.setattr(Launch, "__call__", lambda self, *args: seen.append(args[1:3]) or launch(self, *args))
    query, key, value = (x.requires_grad_() for x in tensors(torch.float32, 1, 4, 5, 7, 16, 16).values())
    key, value = (x[:, :2].detach().requires_grad_() for x in (key, value))
    results = []
    for attend in (F.attention, lambda *x: reference.attention(*x)[0]):
        output = attend(query, key, value)
        results.append((output, *torch.autograd.grad(output.cos().sum(), (query, key, value))))
    assert {k.data_ptr() for k, _ in seen} == {key.data_ptr()}
    assert {v.data_ptr() for _, v in seen} == {value.data_ptr()}
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("chip", "batch", "heads", "key_heads", "queries", "keys", "width", "launches"),
    [
        ("sm_80", 54, 8, 8, 200, 200, 64, 1),  # two whole waves of 216 programs
        ("sm_80", 55, 8, 8, 200, 200, 64, 2),  # 440: the third wave would be almost empty
        ("sm_80", 54, 8, 8, 200, 513, 64, 2),
        ("sm_80", 54, 8, 8, 513, 200, 64, 2),
        ("sm_80", 108, 8, 4, 256, 256, 64, 1),  # 512 queries read a key head
        ("sm_80", 108, 8, 4, 257, 256, 64, 2),
        ("sm_80", 54, 8, 8, 200, 200, 72, 2),
        ("sm_89", 32, 8, 8, 200, 200, 32, 1),
        ("sm_90", 33, 8, 8, 200, 200, 64, 2),
    ],
)
def test_backward_is_one_launch_if_heads_fill_the_chip_and_the_cache_holds_their_gradients(
    chip, batch, heads, key_heads, queries, keys, width, launches, monkeypatch
):
    monkeypatch.setattr(attention_launch, "chip", lambda device: CHIPS[chip])
    query = torch.empty(batch, heads, queries, width, dtype=torch.bfloat16, device="meta")
    key = torch.empty(batch, key_heads, keys, width, dtype=torch.bfloat16, device="meta")
    call = attention_launch.prepare(query, key, key, dropout_p=0.1, seed=torch.zeros(1, dtype=torch.int64))
    assert attention_backward.count_launches(call) == launches
    masked = attention_launch.prepare(query, key, key, mask=torch.ones(queries, keys, dtype=torch.bool, device="meta"))
    assert attention_backward.count_launches(masked) == 2


def heads_of(x):
    """(B, L, n, H, D) as n tensors (B, H, L, D)."""
    return (part.transpose(1, 2) for part in x.unbind(2))


WAYS = {
    "separate": lambda x, **o: F.attention(*heads_of(x), **o),
    "packed_qkv": F.packed_qkv_attention,
    "causal": lambda x, **o: F.packed_qkv_attention(x, causal=True, **o),
    "biases": lambda x, dropout_p, seed, **_: biased_attention(x, biases=[x.new_zeros(192)], p=dropout_p, seed=seed),
    "shared": lambda x, **o: F.attention(x[:, :, :2, 0].transpose(1, 2), *2 * [x[:, :, 2].transpose(1, 2)], **o),
    "packed": lambda x, **o: F.varlen_attention(*x.flatten(0, 1).unbind(1), *2 * [STARTS], 100, 100, **o),
}
STARTS = torch.tensor([0, 100, 150])


@pytest.mark.parametrize(
    ("chip", "way", "rows", "width", "p", "launches"),
    [
        ("sm_90", "separate", 100, 64, 0.1, 2),
        ("sm_90", "packed_qkv", 65, 64, 0.1, 2),
        ("sm_90", "causal", 128, 40, 0.1, 2),
        ("sm_90", "biases", 100, 64, 0.1, 1),
        ("sm_90", "shared", 100, 64, 0.1, 1),
        ("sm_90", "packed", 100, 64, 0.1, 1),
        ("sm_90", "separate", 64, 64, 0.1, 1),
        ("sm_90", "separate", 100, 64, 0.0, 1),
        ("sm_80", "separate", 100, 64, 0.1, 1),
    ],
)
def test_backward_of_padded_rows_of_65_to_128_keys_with_dropout_uses_the_kernels_for_long_rows_on_sm_90(
    chip, way, rows, width, p, launches, monkeypatch
):
    """Except for bias gradients, whose sums only the kernel for short rows computes."""
    for module in (launch, attention_launch):
        monkeypatch.setattr(module, "chip", lambda device: CHIPS[chip])
    x = torch.randn(2, rows, 3, 1, width, dtype=torch.bfloat16).requires_grad_()
    with F.backend("triton"):
        output = WAYS[way](x, **seeded(p))
        with LaunchLog() as log:
            output.sum().backward()
    two = {"attention.backward._backward_queries": 1, "attention.backward._backward_keys": 1}
    ours = {name: count for name, count in log.triton.items() if name.startswith("attention.")}
    assert ours == (two if launches == 2 else {"attention.short._backward": 1})
