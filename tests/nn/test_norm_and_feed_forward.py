"""LayerNorm and RMSNorm against torch.nn's; FeedForward and PositionalEncoding against their formulas."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fasttfm.nn
from fasttfm import reference

from .twins import compare, rand, share, twins

norms = pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 0.1}])
@pytest.mark.parametrize(
    ("normalized", "shape"),
    [(8, (8,)), (8, (3, 8)), (7, (2, 3, 7)), ((4, 6), (5, 4, 6)), ((2, 3, 5), (2, 3, 5)), (1, (4, 1)), (8, (0, 8))],
)
@norms
def test_a_norm(name: str, normalized: Any, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    if name == "RMSNorm":  # it has no bias
        options = {key: value for key, value in options.items() if key != "bias"}
    theirs, ours = twins(name, normalized, **options)
    compare(theirs, ours, rand(*shape))
    assert repr(ours) == repr(theirs)


def test_a_norm_of_non_contiguous_and_expanded_input() -> None:
    theirs, ours = twins("LayerNorm", 6)
    compare(theirs, ours, rand(6, 4, 3).permute(2, 1, 0))
    compare(theirs, ours, rand(6).expand(5, 6))
    x = torch.empty(3, 0)
    assert torch.equal(fasttfm.nn.LayerNorm(0)(x), nn.LayerNorm(0)(x))


@pytest.mark.parametrize("shape", [5, (4, 5), (3, 4, 5)])
@norms
def test_a_norm_keeps_the_layout_that_torch_nn_keeps(name: str, shape: Any) -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    theirs, ours = getattr(torch.nn, name)(shape)(x), getattr(fasttfm.nn, name)(shape)(x)
    assert ours.stride() == theirs.stride()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_default_eps_of_an_rms_norm(dtype: torch.dtype) -> None:
    x = torch.full((2, 8), 1e-4, dtype=dtype)  # its square is smaller than eps, except in float64
    theirs, ours = twins("RMSNorm", 8, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x))


# --------------------------------------------------------------------------------------------------------- FeedForward


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", torch.tanh, nn.ReLU()])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 5, 8), (0, 8)])
def test_feed_forward(shape: tuple[int, ...], activation: Any, bias: bool) -> None:
    function = {"relu": nn.ReLU(), "gelu": nn.GELU()}[activation] if isinstance(activation, str) else activation
    theirs: Any = nn.Module()
    torch.manual_seed(4)
    theirs.linear1, theirs.linear2 = nn.Linear(8, 12, bias=bias), nn.Linear(12, 8, bias=bias)
    theirs.forward = lambda x: theirs.linear2(function(theirs.linear1(x)))
    torch.manual_seed(4)
    ours = fasttfm.nn.FeedForward(8, 12, activation=activation, bias=bias)
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))
    share(theirs.double(), ours.double())
    compare(theirs, ours, rand(*shape))


def test_feed_forward_drops_the_hidden_activation() -> None:
    ours = fasttfm.nn.FeedForward(8, 12, dropout=0.5).double()
    x = rand(4, 8)
    torch.manual_seed(4)
    got = ours(x)
    torch.manual_seed(4)
    one, two, seed = ours.linear1, ours.linear2, fasttfm.functional.draw_seed()
    expected = reference.feed_forward(x, one.weight, one.bias, two.weight, two.bias, dropout_p=0.5, seed=seed)
    torch.testing.assert_close(got, expected)
    ours.eval()
    torch.testing.assert_close(ours(x), reference.feed_forward(x, one.weight, one.bias, two.weight, two.bias))


# -------------------------------------------------------------------------------------------------- PositionalEncoding

VARIANTS: dict[str, tuple[Callable[[int, int], float], Callable[[int], tuple[int, int]]]] = {
    "paper": (lambda position, i: position / 10000 ** (2 * i / 8), lambda i: (2 * i, 2 * i + 1)),
    "tensor2tensor": (lambda position, i: position / 10000 ** (i / 3), lambda i: (i, 4 + i)),
}
"""Angle of a position, and the columns of its sine and cosine."""


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_positions_are_those_of_the_formulas(variant: str, batch_first: bool) -> None:
    module, (angle, columns) = (
        fasttfm.nn.PositionalEncoding(8, 0.0, batch_first=batch_first, variant=variant),
        VARIANTS[variant],
    )
    x = torch.randn(2, 5, 8)
    added = (module(x) if batch_first else module(x.transpose(0, 1)).transpose(0, 1)) - x
    for position in range(5):
        for i in range(4):
            of_both = math.sin(angle(position, i)), math.cos(angle(position, i))
            assert added[1, position, columns(i)].tolist() == pytest.approx(of_both, abs=1e-6)


def test_pieces_continue_at_first_position() -> None:
    module = fasttfm.nn.PositionalEncoding(6, 0.0, batch_first=True)
    x = torch.randn(2, 5, 6)
    pieces = torch.cat([module(x[:, :2]), module(x[:, 2:], first_position=2)], dim=1)
    assert torch.equal(pieces, module(x))


def test_positions_are_no_weights_follow_dtype_and_input_and_are_dropped_in_training_only() -> None:
    module = fasttfm.nn.PositionalEncoding(32, 0.5)
    assert not list(module.parameters())
    assert not module.state_dict()
    x = torch.ones(64, 32)
    assert 0.4 < (module(x) == 0).float().mean() < 0.6
    assert (module.eval()(x) != 0).any(dim=1).all()
    assert module(x.bfloat16()).dtype == torch.bfloat16
    assert module.double()(x.double()).dtype == torch.float64


def test_a_sequence_longer_than_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="max_length"):
        fasttfm.nn.PositionalEncoding(8, max_length=4)(torch.zeros(5, 8))
