"""Norms, residual connection, feed-forward network and embedding on PyTorch's route: against reference.py, and what
they keep for the backward pass.
"""

import pytest
import torch
from torch import nn

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.functional import residual_norm
from fasttfm.functional.operator import forget_plans

from .agreement import assert_same, saved_bytes, solve

SEED = torch.tensor([99])
HALVES = [torch.float16, torch.bfloat16]
ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu"]
PAIRS = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]
"""Dtypes of x and the residual stream."""
OF_NORMS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
OF_NETWORKS = OF_NORMS | {torch.float16: 5e-3, torch.bfloat16: 4e-2}
PARAMETERS = {"residual_layer_norm": 2, "residual_rms_norm": 1, "residual_add": 0}
JOINED = list(PARAMETERS)[:2]


def rows(shape, x=torch.float32, stream=torch.float32, parameters=2, dtype=None):
    """x, the residual stream, and parameters of this dtype, by default the wider one of x and float32."""
    dtype = dtype or (torch.float64 if x == torch.float64 else torch.float32)
    tensors = [torch.randn(shape, dtype=x), torch.randn(shape, dtype=stream)]
    return [t.requires_grad_() for t in (*tensors, *(torch.randn(shape[-1], dtype=dtype) for _ in range(parameters)))]


def network(dtype=torch.float32):
    shapes = [(3, 5, 16), (40, 16), (40,), (24, 40), (24,)]
    return [(torch.randn(s) * s[-1] ** -0.5).to(dtype).requires_grad_() for s in shapes]


def both(name, inputs, tolerance, *given, **options):
    """Assert that our function agrees with the reference, in outputs and gradients, and gives the same bits twice."""
    ours, again, theirs = (
        solve(lambda *x, m=module: getattr(m, name)(*x, *given, **options), inputs) for module in (F, F, reference)
    )
    assert_same(ours, theirs, tolerance)
    assert all(map(torch.equal, ours, again))


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize(("x", "stream"), PAIRS, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25, 1.0])
def test_norms_and_the_residual_connection_equal_the_reference(name, x, stream, dropout_p):
    inputs = rows((3, 5, 24), x, stream, PARAMETERS[name])
    both(name, inputs, OF_NORMS, dropout_p=dropout_p, seed=SEED, site=2)
    both(name, rows((0, 24), x, stream, PARAMETERS[name]), OF_NORMS, dropout_p=dropout_p, seed=SEED)
    if PARAMETERS[name]:
        both(name.removeprefix("residual_"), [inputs[0], *inputs[2:]], OF_NORMS)


def test_norms_without_parameters():
    both("rms_norm", rows((3, 24))[:1], OF_NORMS, None, 0.1)
    both("layer_norm", rows((3, 24), torch.bfloat16)[:1], OF_NORMS, None, None)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", OF_NETWORKS, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("biased", [True, False])
def test_the_feed_forward_network_equals_the_reference(dtype, dropout_p, activation, biased):
    inputs = [x if biased or x.dim() > 1 else None for x in network(dtype)]
    options = {"dropout_p": dropout_p, "seed": SEED, "site": 2, "activation": activation}
    both("feed_forward", inputs, OF_NETWORKS, **options)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("pad_id", [None, 0])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3, 1.0])
def test_the_embedding_equals_the_reference(positions, pad_id, dropout_p):
    tokens = torch.randint(0, 30, (3, 5))
    tokens[1, 3:] = 0
    inputs = [torch.randn(n, 12, dtype=torch.float64).requires_grad_() for n in (30, 9)[: 1 + positions]]
    options = {"scale": 3.5, "pad_id": pad_id, "first_position": 2, "dropout_p": dropout_p, "seed": SEED, "site": 4}
    ours, again, theirs = (
        solve(lambda *x, m=module: m.embed(tokens, *(*x, None)[:2], **options), inputs) for module in (F, F, reference)
    )
    torch.testing.assert_close(ours, theirs)
    assert all(map(torch.equal, ours, again))


# ----------------------------------------------------------------------------------------------------- half precision


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("joined", JOINED)
@pytest.mark.parametrize("route", ["torch", "triton"])
def test_parameters_in_half_precision(dtype, joined, route):
    with F.backend(route):
        both(joined, rows((4, 24), dtype, dtype, PARAMETERS[joined], dtype), OF_NORMS)


@pytest.mark.parametrize("dtype", HALVES)
def test_parameter_gradients_of_rows_far_from_zero_are_those_of_their_values(dtype):
    """x * rstd - mean * rstd would cancel completely at a mean of 1e4."""
    x = (1e4 + torch.randn(512, 256)).to(dtype)
    weight, bias, grad = torch.randn(256), torch.randn(256), torch.randn(512, 256).to(dtype)

    def gradients(call, precision, inside):
        inputs = [t.to(p).requires_grad_() for t, p in ((x, precision), (weight, inside), (bias, inside))]
        return torch.autograd.grad(call(*inputs), inputs[1:], grad.to(precision))

    wanted = gradients(reference.layer_norm, torch.float64, torch.float64)
    actual = gradients(F.layer_norm, dtype, torch.float32)
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=2e-3, check_dtype=False)


@pytest.mark.parametrize("joined", JOINED)
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
def test_parameter_gradients_over_many_rows_are_summed_in_float32(joined, stream):
    x, residual, weight = rows((4096, 16), torch.bfloat16, stream, 1)

    def gradient(module, *inputs):
        y, _ = getattr(module, joined)(*inputs, *[None] * (PARAMETERS[joined] - 1))
        return torch.autograd.grad(y, weight, y.detach())[0]  # grows with every row

    exact = gradient(reference, x.double(), residual.double(), weight.double())
    torch.testing.assert_close(gradient(F, x, residual, weight).double(), exact.double(), rtol=5e-3, atol=0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_of_a_repeated_token_are_summed_in_float32(dtype):
    weight = torch.zeros(5, 8, dtype=dtype, requires_grad=True)
    y = F.embed(torch.full((4, 500), 3), weight)
    (gradient,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    assert gradient.dtype == dtype
    assert (gradient[3] == 2000).all()  # adding ones in bfloat16 would stop at 256


# ------------------------------------------------------------------------------------------------------ special calls


@pytest.mark.parametrize("biased", [False, True])
def test_torchs_own_norm_after_a_residual_equals_the_operator(biased, monkeypatch):
    """Which takes over at ADDED_NORM elements."""
    inputs = [*rows((3, 5, 24)), *([torch.randn(24).requires_grad_()] if biased else [])]

    def norm(x, residual, weight, bias, x_bias=None):
        return F.residual_layer_norm(x, residual, weight, bias, x_bias=x_bias)

    with F.backend("torch"):
        expected = solve(norm, inputs)
    for elements, name in ((residual_norm.ADDED_NORM, "NativeLayerNormBackward0"), (360, "residual_norm")):
        monkeypatch.setattr(residual_norm, "ADDED_NORM", elements)
        forget_plans()
        assert_same(solve(norm, inputs), expected, OF_NORMS)
        assert name in norm(*inputs)[0].grad_fn.name()


def test_a_gradient_may_come_from_either_output_alone():
    for position in (0, 1):
        inputs = rows((4, 24), torch.bfloat16)
        alone = [
            torch.autograd.grad(way(*inputs, dropout_p=0.3, seed=SEED)[position].double().cos().sum(), inputs[:2])
            for way in (F.residual_layer_norm, reference.residual_layer_norm)
        ]
        assert_same(*alone, OF_NORMS)


def test_an_embeddings_gradients_are_computed_if_needed_and_need_no_weight():
    tokens, weight, positions = torch.arange(15).view(3, 5), torch.randn(30, 12), torch.randn(9, 12)
    for needed in (weight, positions):
        leaf = needed.requires_grad_()
        y = F.embed(tokens, weight, positions, scale=2.0)
        with torch.no_grad():
            weight.zero_()
        y.sum().backward()
        assert leaf.grad.sum() == tokens.numel() * 12 * (2 if leaf is weight else 1)
        leaf.requires_grad_(False)
    assert not weight.grad[15:].any()


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_a_network_saves_its_input_and_its_hidden_values(dropout_p, activation, route):
    """4 M (N + H) bytes, a mask and a seed; torch.nn saves a second activation with a GELU, and its mask."""
    M, N, H = 64, 32, 128
    x, first, second = torch.randn(M, N, requires_grad=True), nn.Linear(N, H), nn.Linear(H, N)
    between = {"relu": nn.ReLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "silu": nn.SiLU()}[activation]
    options = {"dropout_p": dropout_p, "seed": SEED, "activation": activation}
    with F.backend(route):
        parameters = first.weight, first.bias, second.weight, second.bias
        ours = saved_bytes(lambda: F.feed_forward(x, *parameters, **options))
    mask = M * H // 8 if route == "triton" and activation == "relu" else 0
    if route == "torch" and activation != "relu" and dropout_p:
        mask = M * H
    assert ours == 4 * M * (N + H) + mask + (8 if dropout_p else 0)  # the seed is for a second derivative
    theirs = saved_bytes(lambda: nn.Sequential(first, between, nn.Dropout(dropout_p), second)(x))
    assert ours < theirs or (activation, dropout_p) == ("relu", 0.0)
