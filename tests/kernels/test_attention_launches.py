"""Launches of attention: the kernels of a call and what they are given."""

import pytest
import torch
from biased_attention import biased_attention
from test_attention_kernels import ROUTES, seeded, tensors

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.kernels import launch
from fasttfm.kernels.attention import backward as attention_backward
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.jit import Launch
from fasttfm.kernels.proof.launch_log import LaunchLog


@pytest.mark.parametrize("route", ROUTES)
def test_a_causal_offset_far_past_or_before_all_keys(take, route):
    """It must not overflow when it is added to a row index in 32 bits."""
    take(route)
    q, k, v = (torch.randn(1, 2, 18, 8) for _ in range(3))
    expected = F.attention(q, k, v)
    for far in (2**31 - 1, 2**40):
        torch.testing.assert_close(F.attention(q, k, v, causal=True, causal_offset=far), expected)
        assert not F.attention(q, k, v, causal=True, causal_offset=-far).any()


@pytest.mark.parametrize("route", ["short", "flash", "heads"])
def test_shared_keys_and_values_are_not_expanded(take, route, monkeypatch):
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
