"""torch.utils.flop_counter counts operators, forward and backward, like torch's own for the same work."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from fasttfm import functional as F

STARTS, OTHERS = torch.tensor([0, 4, 9]), torch.tensor([0, 3, 9])
TARGET = torch.tensor([3, 0, 5, 1, 2])
QUERY, KEY, VALUE = (2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 16)


def sequences(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = zip(q.tensor_split(STARTS[1:-1]), *(x.tensor_split(OTHERS[1:-1]) for x in (k, v)))
    return sum(scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in part)).sum() for part in parts)


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "attention": (F.attention, scaled_dot_product_attention, [QUERY, KEY, VALUE]),
    "attention, causal, dropped": (
        lambda *t: F.attention(*t, causal=True, dropout_p=0.5), scaled_dot_product_attention, [QUERY, KEY, VALUE],
    ),
    "shared heads": (
        F.attention, lambda *t: scaled_dot_product_attention(*t, enable_gqa=True), [QUERY, (2, 2, 6, 8), (2, 2, 6, 8)],
    ),
    "long rows": (F.attention, scaled_dot_product_attention, [(1, 2, 18, 8), (1, 2, 20, 8), (1, 2, 20, 8)]),
    "weights": (F.attention_weights, lambda q, k: q @ k.transpose(-2, -1), [QUERY, KEY]),
    "varlen": (lambda *t: F.varlen_attention(*t, STARTS, OTHERS, 5, 6), sequences, [(9, 2, 8)] * 3),
    "feed_forward": (
        lambda *tensors: F.feed_forward(*tensors, dropout_p=0.5), lambda x, a, b, c, d: linear(linear(x, a, b), c, d),
        [(2, 3, 8), (40, 8), (40,), (16, 40), (16,)],
    ),
    "linear_cross_entropy": (
        lambda x, w: F.linear_cross_entropy(x, w, TARGET)[0], lambda x, w: cross_entropy(linear(x, w), TARGET),
        [(5, 8), (9, 8)],
    ),
    "residual_layer_norm": (lambda x, r: F.residual_layer_norm(x, r, None, None)[0], torch.add, [(5, 8), (5, 8)]),
}  # fmt: skip


def counted(function: Callable[..., Tensor], tensors: list[Tensor], backward: bool) -> int:
    gradients, torchs = torch.set_grad_enabled(backward), sdpa_kernel(SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, gradients, torchs:
        output = function(*tensors)
        if backward:
            output.sum().backward()
    return counter.get_total_flops()


@pytest.mark.sample(9)
@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_operators_are_counted_as_torchs_own_work(name, route):
    ours, theirs, shapes = CASES[name]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with F.backend(route):
        assert counted(ours, tensors, False) == counted(theirs, tensors, False)
        got = counted(ours, tensors, True)
    expected = counted(theirs, tensors, True)
    if route == "triton" or name == "long rows":  # kernels recompute the scores, as torch's fused ones do
        assert expected <= got <= 1.25 * expected
    else:
        assert got == expected


def test_only_used_keys_of_a_cache_are_counted():
    query, cache = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 10, 8)
    with FlopCounterMode(display=False) as counter:
        F.attention_with_cache(query, cache, cache, cache_lengths=torch.tensor([7, 4]))
    assert counter.get_total_flops() == 2 * 4 * 3 * (7 + 4) * (8 + 8)
