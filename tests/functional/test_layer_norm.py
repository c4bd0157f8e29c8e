"""LayerNorm, RMSNorm and the residual connection as operators: the torch route, autograd, autocast."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fasttfm import functional, reference
from fasttfm.functional import residual_norm
from fasttfm.functional.backends import backend
from fasttfm.functional.operator import forget_plans

from .agreement import assert_same, solve

SEED = torch.tensor([99])
PAIRS = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]
"""Dtypes of x and the residual stream."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def leaf_tensors(shape, x_dtype=torch.float32, stream_dtype=torch.float32, parameter_dtype=None, parameters=2):
    wide = parameter_dtype or (torch.float64 if x_dtype == torch.float64 else torch.float32)
    tensors = [torch.randn(shape, dtype=dtype) for dtype in (x_dtype, stream_dtype)]
    return [t.requires_grad_() for t in (*tensors, *(torch.randn(shape[-1], dtype=wide) for _ in range(parameters)))]


@pytest.mark.parametrize("joined", ["residual_layer_norm", "residual_rms_norm", "residual_add"])
@pytest.mark.parametrize(("x", "stream"), PAIRS, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25, 1.0])
def test_the_pytorch_route_equals_the_reference(joined, x, stream, dropout_p):
    parameters = {"residual_layer_norm": 2, "residual_rms_norm": 1, "residual_add": 0}[joined]
    inputs = leaf_tensors((3, 5, 24), x, stream, parameters=parameters)
    options = {"dropout_p": dropout_p, "seed": SEED, "site": 2}
    assert_same(*(solve(getattr(module, joined), inputs, **options) for module in (functional, reference)), TOLERANCE)
    if parameters:
        alone, given = joined.removeprefix("residual_"), [inputs[0], *inputs[2:]]
        assert_same(*(solve(getattr(module, alone), given) for module in (functional, reference)), TOLERANCE)


def test_an_rms_norm_without_a_weight_adds_its_epsilon():
    x = leaf_tensors((3, 24))[:1]
    assert_same(
        *(solve(lambda x, m=module: m.rms_norm(x, None, 0.1), x) for module in (functional, reference)), TOLERANCE
    )


@pytest.mark.parametrize("biased", [False, True])
def test_torchs_own_norm_after_a_residual_equals_the_operator(biased, monkeypatch):
    """Which takes over at ADDED_NORM elements."""
    inputs = [*leaf_tensors((3, 5, 24)), *([torch.randn(24).requires_grad_()] if biased else [])]

    def norm(x, residual, weight, bias, x_bias=None):
        return functional.residual_layer_norm(x, residual, weight, bias, x_bias=x_bias)

    with backend("torch"):
        expected = solve(norm, inputs)
    assert_same(solve(norm, inputs), expected, TOLERANCE)
    assert norm(*inputs)[0].grad_fn.name() == "NativeLayerNormBackward0"
    monkeypatch.setattr(residual_norm, "ADDED_NORM", inputs[0].numel())
    forget_plans()
    assert_same(solve(norm, inputs), expected, TOLERANCE)
    assert "residual_norm" in norm(*inputs)[0].grad_fn.name()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("joined", "parameters"), [("residual_layer_norm", 2), ("residual_rms_norm", 1)])
@pytest.mark.parametrize("route", ["torch", "triton"])
def test_parameters_in_half_precision(dtype, joined, parameters, route):
    inputs = leaf_tensors((4, 24), dtype, dtype, dtype, parameters)
    with backend(route):
        actual = solve(getattr(functional, joined), inputs)
    assert_same(actual, solve(getattr(reference, joined), inputs), TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_are_float32(dtype):
    x = torch.randn(4, 24, dtype=dtype)
    for weight in (None, torch.ones(24, dtype=dtype), torch.ones(24)):
        call = x, None, None, weight, None, None, 1e-5, 0.0, 0, False, "torch"
        _, _, mean, rstd, _ = torch.ops.fasttfm.residual_norm(*call)
        assert mean.dtype == rstd.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameter_gradients_of_rows_far_from_zero_are_those_of_their_values(dtype):
    """x * rstd - mean * rstd would cancel completely at a mean of 1e4."""
    x = (1e4 + torch.randn(512, 256)).to(dtype)
    weight, bias, grad = torch.randn(256), torch.randn(256), torch.randn(512, 256).to(dtype)

    def gradients(call, precision, inside):
        inputs = [t.to(p).requires_grad_() for t, p in ((x, precision), (weight, inside), (bias, inside))]
        return torch.autograd.grad(call(*inputs), inputs[1:], grad.to(precision))

    wanted = gradients(reference.layer_norm, torch.float64, torch.float64)
    actual = gradients(functional.layer_norm, dtype, torch.float32)
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=2e-3, check_dtype=False)


@pytest.mark.parametrize("joined", ["residual_layer_norm", "residual_rms_norm"])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
def test_parameter_gradients_over_many_rows_of_half_precision_are_summed_in_float32(joined, stream):
    x, residual, weight, _ = leaf_tensors((4096, 16), torch.bfloat16, stream)
    none = (None,) if joined == "residual_layer_norm" else ()

    def parameter_gradient(module, x, residual, weight):
        y, _ = getattr(module, joined)(x, residual, weight, *none)
        return torch.autograd.grad(y, weight, y.detach())[0]  # grows with every row

    actual = parameter_gradient(functional, x, residual, weight)
    exact = parameter_gradient(reference, x.double(), residual.double(), weight.double())
    torch.testing.assert_close(actual.double(), exact, rtol=5e-3, atol=0)


def test_a_gradient_may_come_from_either_output_alone():
    for position in (0, 1):
        inputs = leaf_tensors((4, 24), torch.bfloat16, torch.float32)
        alone = [
            torch.autograd.grad(way(*inputs, dropout_p=0.3, seed=SEED)[position].double().cos().sum(), inputs[:2])
            for way in (functional.residual_layer_norm, reference.residual_layer_norm)
        ]
        assert_same(*alone, TOLERANCE)


# ---------------------------------------------------------------------------------------------- as a torch operator


def test_autocast_keeps_the_dtype_of_the_residual_stream():
    x, residual, weight, bias = leaf_tensors((3, 16), torch.bfloat16, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, s = functional.residual_layer_norm(x, residual, weight, bias)
        z = functional.layer_norm(residual, weight, bias)
    assert (y.dtype, s.dtype, z.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_no_rows():
    inputs = leaf_tensors((0, 16))
    for route in ("torch", "triton"):
        with backend(route):
            actual = solve(functional.residual_layer_norm, inputs, dropout_p=0.5, seed=SEED)
        assert actual[0].shape == (0, 16)
        assert not actual[4].any()
        assert actual[4].shape == (16,)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_of_an_absent_device(device):
    with FakeTensorMode():
        x, residual = torch.empty(3, 16, dtype=torch.bfloat16, device=device), torch.empty(3, 16, device=device)
        weight, seed = torch.empty(16, device=device), torch.empty(1, dtype=torch.int64, device=device)
        y, s = functional.residual_layer_norm(x, residual, weight, weight, dropout_p=0.1, seed=seed)
        z = functional.feed_forward(y, y.new_empty(8, 16), None, y.new_empty(16, 8), None, dropout_p=0.1, seed=seed)
    assert (y.dtype, s.dtype, z.shape, z.device.type) == (torch.bfloat16, torch.float32, (3, 16), device)
