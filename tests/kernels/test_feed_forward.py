"""The feed-forward kernels in the interpreter against the reference, with every activation and by every route."""

import itertools

import pytest
import torch
from accuracy import compare_with_reference, solve
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shared_fixtures import examples

from fasttfm import functional, reference
from fasttfm.functional.backends import backend
from fasttfm.functional.feed_forward import ACTIVATIONS as FUNCTIONS
from fasttfm.kernels import feed_forward as kernel
from fasttfm.kernels import product
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.tiles.feed_forward import PRODUCT, ROUTE, of_two_results
from fasttfm.kernels.tiles.table import Tile

SEED, SITE = torch.tensor([-0x1234567890ABCDEF]), 4
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu"]
BY_ROUTE = pytest.mark.parametrize("route", ["fused", "cublas"])


def tensors(rows, width, hidden, out, dtype, *, bias=True, spread=1.0):
    """Inputs by name; spread: scale of x, for activations with more than a kink at 0."""
    generator = torch.Generator().manual_seed(rows + width + hidden)

    def draw(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale * shape[-1] ** -0.5).to(dtype)

    inputs = {"x": draw(rows, width, scale=spread), "weight1": draw(hidden, width), "weight2": draw(out, hidden)}
    return inputs | ({"bias1": draw(hidden), "bias2": draw(out)} if bias else {})


def way(function, **options):
    def call(x, weight1, weight2, bias1=None, bias2=None):
        return function(x, weight1, bias1, weight2, bias2, **options)

    return call


def forward(x, weight1, weight2, bias1=None, bias2=None, **options):
    """Plans and runs the forward pass."""
    seed = SEED if options.get("dropout_p") else None
    return kernel.Forward(x, weight1, weight2, **options)(x, weight1, bias1, weight2, bias2, seed, SITE)


def backward(dout, x, kept, bits, weight1, weight2, *, biases=True, **options):
    """Plans and runs the backward pass."""
    seed = SEED if options.get("dropout_p") else None
    plan = kernel.Backward(x, kept, bits, weight2, bias1=biases, bias2=biases, **options)
    return plan(dout, x, kept, bits, weight1, weight2, seed, SITE)


def by_launches(first, second, **options):
    """The network as a differentiable function, with a route for each pass."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight1, bias1, weight2, bias2):
            out, *kept = forward(x, weight1, weight2, bias1, bias2, route=first, **options)
            ctx.save_for_backward(x, *kept, weight1, weight2)
            return out

        @staticmethod
        def backward(ctx, dout):
            return backward(dout.contiguous(), *ctx.saved_tensors, route=second, **options)

    return Function.apply


def check(inputs, dropout_p=0.0, activation="relu", routes=None):
    """Compares the operator, or the launches of two routes, with the reference."""
    options = {"dropout_p": dropout_p, "seed": SEED, "site": SITE, "activation": activation}
    ours = way(functional.feed_forward, **options)
    if routes is not None:
        ours = way(by_launches(*routes, dropout_p=dropout_p, activation=activation))
    compare_with_reference(ours, way(reference.feed_forward, **options), inputs)


@settings(max_examples=examples(20))
@given(
    rows=st.sampled_from([1, 3, 33]),
    width=st.sampled_from([1, 17, 32, 40]),
    hidden=st.sampled_from([1, 31, 64, 70]),
    out=st.sampled_from([1, 24, 33]),
    dtype=st.sampled_from(DTYPES),
    dropout_p=st.sampled_from([0.0, 0.1, 0.5]),
    bias=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS),
)
@example(0, 16, 40, 24, torch.float32, 0.1, True, "relu")
@example(0, 16, 40, 24, torch.float32, 0.1, True, "gelu")
@example(5, 16, 40, 24, torch.float32, 1.0, True, "relu")
def test_feed_forward_equals_the_reference_for_any_shape(rows, width, hidden, out, dtype, dropout_p, bias, activation):
    check(tensors(rows, width, hidden, out, dtype, bias=bias, spread=3.0), dropout_p, activation)


@pytest.mark.sample(9)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routes", [*itertools.product(["fused", "cublas"], repeat=2)], ids=" ".join)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_route_forward_and_backward_equals_the_reference(routes, dtype, activation):
    check(tensors(37, 40, 72, 24, dtype, spread=3.0), 0.25, activation, routes)


@BY_ROUTE
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_more_tiles_than_a_group_has_and_programs_with_several_tiles(route, activation, monkeypatch):
    """Groups have 8 tiles of rows; here are 10 by 5 of columns. Two programs sum rows, of two blocks of columns."""
    monkeypatch.setattr(product, "PRODUCT", lambda *size: Tile(16, 32, 4, 1, 16))
    monkeypatch.setattr(product, "gate_programs", lambda chip, M: 2)
    check(tensors(150, 24, 140, 40, torch.float32), 0.2, activation, (route, route))


@BY_ROUTE
def test_nan_propagates(route):
    inputs = tensors(3, 16, 40, 24, torch.float32)
    inputs["x"][1, 3] = torch.nan
    out, *kept = forward(**inputs, route=route)
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()
    dx, *_ = backward(torch.ones_like(out), inputs["x"], *kept, inputs["weight1"], inputs["weight2"], route=route)
    assert dx.isfinite().all()  # the gradient of out is finite


def test_hidden_values_that_round_to_zero_pass_no_gradient():
    """A value below the smallest of float16 is stored as 0, and its bit must be 0 too."""
    x = torch.full((1, 8), 2.0**-13, dtype=torch.float16)
    weight1 = torch.full((32, 8), 2.0**-16, dtype=torch.float16)  # hidden would be 2**-26
    weight2 = torch.ones(8, 32, dtype=torch.float16)
    out, hidden, bits = forward(x, weight1, weight2, route="fused")
    assert not out.any()
    assert not hidden.any()
    assert not bits.any()


def test_expanded_and_transposed_inputs_and_gradients():
    inputs = tensors(12, 16, 40, 24, torch.float32)
    inputs["x"] = torch.randn(16, 1, 5).expand(16, 3, 5).permute(1, 2, 0)
    inputs["weight1"] = torch.randn(16, 40).t()
    inputs["weight2"] = torch.randn(40, 24).t()
    inputs["bias1"] = torch.randn(1).expand(40)
    check(inputs, dropout_p=0.2)
    with backend("triton"):
        results = solve(way(functional.feed_forward), inputs, weigh=lambda outputs: outputs[0].sum())
    exact = solve(way(reference.feed_forward), inputs, weigh=lambda outputs: outputs[0].sum())
    torch.testing.assert_close(results, exact, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- GELU


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_an_activation_and_its_derivative_are_accurate_from_far_left_to_far_right(activation):
    """In the tails of the normal distribution, where it cancels, and at zero."""
    u = torch.tensor([[-1e4, -30.0, -6.0, -4.0, -1.0, -1e-3, -0.0, 0.0, 1e-6, 0.5, 3.0, 5.0, 9.0, 40.0, 1e4]])
    exact = u.double().requires_grad_()
    expected = FUNCTIONS[activation](exact)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    options = {"activation": activation, "route": "fused"}
    ones, eye = torch.ones(1, 15), torch.eye(15)
    out, before, bits = forward(u, eye, eye, **options)
    assert torch.equal(before, u)
    torch.testing.assert_close(out.double(), expected.detach(), rtol=2e-6, atol=1e-6)
    dx, *_ = backward(ones, u, before, bits, eye, eye, biases=False, **options)
    torch.testing.assert_close(dx.double(), slope, rtol=2e-6, atol=1e-6)


# -------------------------------------------------------------------------------------------------- tiles and routes


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_tiles_have_whole_words_of_bits_and_as_many_rows_for_two_results(chip):
    for kind, size in itertools.product(("fp32", "fp16", "bf16"), ("large", "small")):
        tile = PRODUCT(chip, kind, size)
        assert tile.columns % 32 == 0
        assert of_two_results(tile).rows == tile.rows  # else a bias gradient would have another number of partial sums


def test_cublas_is_used_where_triton_cannot_use_matrix_units():
    for chip, kind, each in itertools.product(("sm_60", "sm_75"), ("fp32", "fp16"), ("forward", "backward+bits")):
        assert ROUTE(CHIPS[chip], kind, each) == "cublas"
