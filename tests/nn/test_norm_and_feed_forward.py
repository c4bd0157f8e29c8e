"""LayerNorm and RMSNorm against torch.nn's; FeedForward and PositionalEncoding against their formulas."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasttfm.nn
from fasttfm import reference

from .twins import compare, rand, share, twins


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 0.1}])
@pytest.mark.parametrize(
    ("normalized", "shape"),
    [(8, (8,)), (8, (3, 8)), (7, (2, 3, 7)), ((4, 6), (5, 4, 6)), ((2, 3, 5), (2, 3, 5)), (1, (4, 1)), (8, (0, 8))],
)
def test_layer_norm(normalized: Any, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    theirs, ours = twins("LayerNorm", normalized, **options)
    compare(theirs, ours, rand(*shape))


def test_layer_norm_of_non_contiguous_and_expanded_input() -> None:
    theirs, ours = twins("LayerNorm", 6)
    compare(theirs, ours, rand(6, 4, 3).permute(2, 1, 0))
    compare(theirs, ours, rand(6).expand(5, 6))


def test_layer_norm_of_an_empty_row() -> None:
    x = torch.empty(3, 0)
    assert torch.equal(fasttfm.nn.LayerNorm(0)(x), nn.LayerNorm(0)(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layer_norm_in_half_precision_is_at_least_as_near_as_torch(dtype: torch.dtype) -> None:
    theirs, ours = twins("LayerNorm", 64, dtype=torch.float32)
    x = torch.randn(16, 64) * 3 + 5
    exact = theirs(x)
    their_error, our_error = ((m.to(dtype)(x.to(dtype)).float() - exact).abs().max() for m in (theirs, ours))
    assert our_error <= 2 * their_error


# ------------------------------------------------------------------------------------------------ RMSNorm


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False}, {"eps": 0.1}])
@pytest.mark.parametrize(
    ("normalized", "shape"), [(8, (8,)), (7, (2, 3, 7)), ((4, 6), (5, 4, 6)), (1, (4, 1)), (8, (0, 8))]
)
def test_rms_norm(normalized: Any, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    theirs, ours = twins("RMSNorm", normalized, **options)
    compare(theirs, ours, rand(*shape))
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_default_eps_of_an_rms_norm(dtype: torch.dtype) -> None:
    x = torch.full((2, 8), 1e-4, dtype=dtype)  # its square is smaller than eps, except in float64
    theirs, ours = twins("RMSNorm", 8, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x))


# ------------------------------------------------------------------------------------------------ FeedForward


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", torch.tanh, nn.ReLU()])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 5, 8), (0, 8)])
def test_feed_forward(shape: tuple[int, ...], activation: Any, bias: bool) -> None:
    ours = fasttfm.nn.FeedForward(8, 12, activation=activation, bias=bias).double()
    function = {"relu": nn.ReLU(), "gelu": nn.GELU()}.get(activation if isinstance(activation, str) else "")

    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear1 = nn.Linear(8, 12, bias=bias)
            self.linear2 = nn.Linear(12, 8, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear2((function or activation)(self.linear1(x)))

    theirs = Theirs().double()
    share(theirs, ours)
    compare(theirs, ours, rand(*shape))


def test_feed_forward_starts_as_two_linear_layers() -> None:
    torch.manual_seed(4)
    expected = [*nn.Linear(8, 12).parameters(), *nn.Linear(12, 8).parameters()]
    torch.manual_seed(4)
    got = list(fasttfm.nn.FeedForward(8, 12).parameters())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


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


# ----------------------------------------------------------------------------------------- PositionalEncoding


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_formula_of_the_paper(batch_first: bool) -> None:
    module = fasttfm.nn.PositionalEncoding(6, 0.0, batch_first=batch_first)
    x = torch.randn(2, 5, 6)
    added = (module(x) if batch_first else module(x.transpose(0, 1)).transpose(0, 1)) - x
    for position in range(5):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            assert added[1, position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert added[1, position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_the_formula_of_tensor2tensor() -> None:
    module = fasttfm.nn.PositionalEncoding(8, 0.0, variant="tensor2tensor")
    x = torch.zeros(5, 8)
    added = module(x)
    for position in range(5):
        for i in range(4):
            angle = position / 10000 ** (i / 3)
            assert added[position, i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert added[position, 4 + i].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_pieces_continue_at_first_position() -> None:
    module = fasttfm.nn.PositionalEncoding(6, 0.0, batch_first=True)
    x = torch.randn(2, 5, 6)
    pieces = torch.cat([module(x[:, :2]), module(x[:, 2:], first_position=2)], dim=1)
    assert torch.equal(pieces, module(x))


def test_positions_are_no_weights_and_follow_dtype_and_input() -> None:
    module = fasttfm.nn.PositionalEncoding(6, 0.0)
    assert not list(module.parameters())
    assert not module.state_dict()
    assert module(torch.randn(3, 6).bfloat16()).dtype == torch.bfloat16
    assert module.double()(rand(3, 6)).dtype == torch.float64


def test_positional_encoding_drops_in_training_only() -> None:
    module = fasttfm.nn.PositionalEncoding(32, 0.5)
    x = torch.ones(64, 32)
    assert 0.4 < (module(x) == 0).float().mean() < 0.6
    module.eval()
    assert (module(x) != 0).any(dim=1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fasttfm.nn.PositionalEncoding(7), "d_model is 7"),
        (lambda: fasttfm.nn.PositionalEncoding(8, variant="learned"), "learned"),
        (lambda: fasttfm.nn.PositionalEncoding(8, dropout=1.5), r"1\.5"),
        (lambda: fasttfm.nn.PositionalEncoding(8, max_length=4)(torch.zeros(5, 8)), "max_length"),
        (lambda: fasttfm.nn.PositionalEncoding(8)(torch.zeros(5, 6)), r"\(5, 6\)"),
        (lambda: fasttfm.nn.FeedForward(8, 12, dropout=-0.1), r"-0\.1"),
        (lambda: fasttfm.nn.FeedForward(8, 12, activation="swish"), "swish"),
        (lambda: fasttfm.nn.FeedForward(8, 12)(torch.zeros(3, 7)), "7"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_norm_over_no_dimension_raises_what_torch_raises():
    messages = []
    x = torch.tensor(3.0)
    for norm in (torch.nn.LayerNorm(()), fasttfm.nn.LayerNorm(())):
        with pytest.raises(RuntimeError) as raised:
            norm(x)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("shape", [5, (4, 5), (3, 4, 5)])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_a_norm_keeps_the_layout_that_torch_nn_keeps(name: str, shape: Any) -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    theirs, ours = getattr(torch.nn, name)(shape)(x), getattr(fasttfm.nn, name)(shape)(x)
    assert ours.stride() == theirs.stride()
    torch.testing.assert_close(ours, theirs)
