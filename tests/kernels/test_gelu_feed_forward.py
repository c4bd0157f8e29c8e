"""The feed-forward kernels with GELU in the interpreter against the reference, by every route."""

import pytest
import torch
from accuracy import compare_with_reference
from test_feed_forward import DTYPES, SEED, SITE, backward, by_launches, forward, way
from test_feed_forward import tensors as feed_forward_tensors

from fasttfm import reference
from fasttfm.kernels import product
from fasttfm.kernels.tiles.table import Tile

FORMS = ["gelu", "gelu_tanh"]


def tensors(*size):
    """Inputs of the ReLU tests, further from 0."""
    inputs = feed_forward_tensors(*size)
    return inputs | {"x": 3 * inputs["x"]}


def check(function, inputs, dropout_p, activation):
    options = {"dropout_p": dropout_p, "seed": SEED, "site": SITE, "activation": activation}
    compare_with_reference(way(function), way(reference.feed_forward, **options), inputs)


@pytest.mark.parametrize("activation", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("route", ["fused", "cublas"])
def test_both_routes_equal_the_reference(route, dtype, activation):
    launched = by_launches(route, route, dropout_p=0.25, activation=activation)
    check(launched, tensors(37, 40, 72, 24, dtype), 0.25, activation)


@pytest.mark.parametrize("activation", FORMS)
def test_gelu_and_its_derivative_are_accurate_from_far_left_to_far_right(activation):
    """In the tails of the normal distribution, where it cancels, and at zero."""
    u = torch.tensor([[-1e4, -30.0, -6.0, -4.0, -1.0, -1e-3, -0.0, 0.0, 1e-6, 0.5, 3.0, 5.0, 9.0, 40.0, 1e4]])
    exact = u.double().requires_grad_()
    expected = torch.nn.functional.gelu(exact, approximate="tanh" if activation == "gelu_tanh" else "none")
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    options = {"activation": activation, "route": "fused"}
    ones, eye = torch.ones(1, 15), torch.eye(15)
    out, before, bits = forward(u, eye, eye, **options)
    assert torch.equal(before, u)
    torch.testing.assert_close(out.double(), expected.detach(), rtol=2e-6, atol=1e-6)
    dx, *_ = backward(ones, u, before, bits, eye, eye, biases=False, **options)
    torch.testing.assert_close(dx.double(), slope, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float16, 0.8), (torch.bfloat16, 1.05)], ids=str)
def test_the_error_of_gelu_of_every_16_bit_number_is_little_more_than_its_rounding(dtype, allowed):
    """Half precision uses a shorter polynomial. Errors are in units in the last place; torch's GELU in float16 has up
    to 2. The interpreter truncates bfloat16 where a chip rounds, and computes wrong subnormals."""
    u = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    limits = torch.finfo(dtype)
    u = torch.where(u.isfinite() & (u.abs() > 4 * limits.tiny), u, 0)
    eye = torch.eye(512, dtype=dtype)
    result = forward(u.view(-1, 512), eye, eye, activation="gelu", route="cublas")[0].flatten().double()
    exact = u.double() * torch.special.ndtr(u.double())
    unit = torch.exp2(exact.abs().clamp(min=limits.tiny).log2().floor()) * limits.eps
    error = (result - exact).abs()
    assert (error / unit)[u >= -4.5].max() < allowed
    assert error[u < -4.5].max() < 6e-8


@pytest.mark.parametrize("route", ["fused", "cublas"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 1.0])
def test_hidden_is_dropped_exactly_where_the_reference_drops_in_both_passes(route, dropout_p):
    """With an identity as weight2, the output equals hidden, and the gradient of weight2 shows it recomputed."""
    x, weight1, eye = torch.ones(19, 8), torch.ones(130, 8), torch.eye(130)
    options = {"activation": "gelu", "dropout_p": dropout_p, "route": route}
    keep = reference.keep_mask((1, 19, 130), dropout_p, SEED, SITE)[0]
    out, before, bits = forward(x, weight1, eye, **options)
    assert torch.equal(before, torch.full((19, 130), 8.0))
    assert torch.equal(out != 0, keep)
    *_, dweight2, _ = backward(torch.eye(19, 130), x, before, bits, weight1, eye, biases=False, **options)
    assert torch.equal(dweight2[:19] != 0, keep)


def test_both_passes_compute_the_same_hidden_bit_by_bit():
    """With identities, dW2 is hidden of the backward pass and out is hidden of the forward pass."""
    inputs = tensors(32, 40, 64, 64, torch.bfloat16)
    eye = torch.eye(64, dtype=torch.bfloat16)
    x, weight1 = inputs["x"], inputs["weight1"]
    out, *kept = forward(x, weight1, eye, inputs["bias1"], activation="gelu")
    *_, dweight2, _ = backward(eye[:32].contiguous(), x, *kept, weight1, eye, biases=False, activation="gelu")
    assert torch.equal(dweight2[:32], out)


def test_more_tiles_than_a_group_has_and_programs_with_several_tiles(monkeypatch):
    monkeypatch.setattr(product, "PRODUCT", lambda *size: Tile(16, 32, 4, 1, 16))
    monkeypatch.setattr(product, "gate_programs", lambda chip, M: 2)
    for route in ("fused", "cublas"):
        launched = by_launches(route, route, dropout_p=0.2, activation="gelu_tanh")
        check(launched, tensors(150, 24, 70, 40, torch.float32), 0.2, "gelu_tanh")
