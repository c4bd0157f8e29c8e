"""The specification of LayerNorm, residual connection and feed-forward network against torch.nn, in float64."""

import pytest
import torch
from torch import nn

from fasttfm import reference

SEED = torch.tensor([42])


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def gradients(output, inputs):
    weights = torch.cos(torch.arange(output.numel(), dtype=torch.float64)).view(output.shape)
    return torch.autograd.grad((output * weights).sum(), inputs, retain_graph=True)


def assert_same(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for mine, other in zip(gradients(ours, inputs), gradients(theirs, inputs)):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-1])
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_is_torchs(eps, affine):
    norm = nn.LayerNorm(13, eps=eps, elementwise_affine=affine, dtype=torch.float64)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = double(3, 5, 13)
    ours = reference.layer_norm(x, norm.weight, norm.bias, eps)
    assert_same(ours, norm(x), [x, *norm.parameters()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layer_norm_of_half_precision_is_rounded_once(dtype):
    x, weight, bias = torch.randn(4, 40).to(dtype), torch.randn(40), torch.randn(40)
    exact = nn.functional.layer_norm(x.double(), (40,), weight.double(), bias.double())
    assert torch.equal(reference.layer_norm(x, weight, bias), exact.to(dtype))


@pytest.mark.parametrize("eps", [1e-6, 1e-1])
@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_is_torchs(eps, affine):
    norm = nn.RMSNorm(13, eps=eps, elementwise_affine=affine, dtype=torch.float64)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = double(3, 5, 13)
    assert_same(reference.rms_norm(x, norm.weight, eps), norm(x), [x, *norm.parameters()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_of_half_precision_is_rounded_once(dtype):
    x, weight = torch.randn(4, 40).to(dtype), torch.randn(40)
    exact = nn.functional.rms_norm(x.double(), (40,), weight.double(), 1e-6)
    assert torch.equal(reference.rms_norm(x, weight, 1e-6), exact.to(dtype))


def test_residual_rms_norm_is_dropout_sum_and_rms_norm():
    x, residual, weight = double(4, 6, 10), double(4, 6, 10), double(10)
    keep = reference.keep_mask((1, 24, 10), 0.25, SEED, 3).view(4, 6, 10)
    y, s = reference.residual_rms_norm(x, residual, weight, 1e-5, dropout_p=0.25, seed=SEED, site=3)
    expected = residual + x * keep * reference.dropout_scale(0.25)
    assert_same(s, expected, [x, residual])
    assert_same(y, nn.functional.rms_norm(expected, (10,), weight, 1e-5), [x, residual, weight])


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_residual_layer_norm_is_dropout_sum_and_layer_norm(p):
    x, residual, weight, bias = double(4, 6, 10), double(4, 6, 10), double(10), double(10)
    keep = reference.keep_mask((1, 24, 10), p, SEED, 3).view(4, 6, 10)
    y, s = reference.residual_layer_norm(x, residual, weight, bias, 1e-6, dropout_p=p, seed=SEED, site=3)
    expected = residual + x * keep * reference.dropout_scale(p)
    assert_same(s, expected, [x, residual])
    assert_same(y, nn.functional.layer_norm(expected, (10,), weight, bias, 1e-6), [x, residual, weight, bias])
    assert_same(reference.residual_add(x, residual, dropout_p=p, seed=SEED, site=3), expected, [x, residual])


def test_without_a_seed_nothing_is_dropped():
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    assert torch.equal(reference.residual_add(x, residual, dropout_p=0.5), residual + x)


@pytest.mark.parametrize("bias", [True, False])
def test_feed_forward_is_two_linear_layers_with_relu_between_them(bias):
    layers = nn.Sequential(nn.Linear(7, 19, bias), nn.ReLU(), nn.Linear(19, 5, bias)).double()
    first, _, second = layers
    x = double(2, 3, 7)
    ours = reference.feed_forward(x, first.weight, first.bias, second.weight, second.bias)
    assert_same(ours, layers(x), [x, *layers.parameters()])


@pytest.mark.parametrize(("activation", "approximate"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_feed_forward_with_gelu_is_that_of_torch(activation, approximate):
    layers = nn.Sequential(nn.Linear(7, 19), nn.GELU(approximate), nn.Linear(19, 5)).double()
    first, _, second = layers
    x = 3 * double(2, 3, 7).detach()
    x.requires_grad_()
    ours = reference.feed_forward(x, first.weight, first.bias, second.weight, second.bias, activation=activation)
    assert_same(ours, layers(x), [x, *layers.parameters()])


def test_dropout_in_the_feed_forward_network_acts_on_the_hidden_activation():
    x, weight1, weight2 = double(6, 7), double(19, 7), double(5, 19)
    keep = reference.keep_mask((1, 6, 19), 0.4, SEED)[0]
    hidden = torch.relu(x @ weight1.T) * keep * reference.dropout_scale(0.4)
    ours = reference.feed_forward(x, weight1, None, weight2, None, dropout_p=0.4, seed=SEED)
    assert_same(ours, hidden @ weight2.T, [x, weight1, weight2])


def test_the_expectation_of_dropout_is_its_input():
    mean = reference.dropout(torch.ones(512, 512, dtype=torch.float64), 0.1, SEED).mean()
    assert abs(mean - 1) < 5 * (0.1 / 0.9) ** 0.5 / 512


def test_gradients_are_those_of_finite_differences():
    x, residual, weight, bias = double(3, 6), double(3, 6), double(6), double(6)
    options = {"dropout_p": 0.3, "seed": SEED}
    assert torch.autograd.gradcheck(lambda *a: reference.layer_norm(*a), (x, weight, bias))
    assert torch.autograd.gradcheck(
        lambda *a: reference.residual_layer_norm(*a, **options), (x, residual, weight, bias)
    )
    assert torch.autograd.gradcheck(lambda *a: reference.residual_add(*a, **options), (x, residual))
    inputs = (x, double(9, 6), double(9), double(4, 9), double(4))
    assert torch.autograd.gradcheck(lambda *a: reference.feed_forward(*a, **options), inputs)
