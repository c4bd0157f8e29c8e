"""The feed-forward network as an operator: the torch route, autograd, autocast, compilation, memory."""

import pytest
import torch
from torch import nn

from fasttfm import functional, reference
from fasttfm.functional.backends import backend

from .agreement import assert_same, solve

SEED = torch.tensor([99])
ACTIVATIONS = ["relu", "gelu", "gelu_tanh"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def leaves(rows=(3, 5), width=16, hidden=40, out=24, dtype=torch.float32):
    shapes = [(*rows, width), (hidden, width), (hidden,), (out, hidden), (out,)]
    return [(torch.randn(s) * s[-1] ** -0.5).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("biased", [True, False])
def test_the_torch_route_equals_the_reference(dtype, dropout_p, activation, biased):
    inputs = [x if biased or x.dim() > 1 else None for x in leaves(dtype=dtype)]
    options = {"dropout_p": dropout_p, "seed": SEED, "site": 2, "activation": activation}
    ours, theirs = (solve(module.feed_forward, inputs, **options) for module in (functional, reference))
    assert_same(ours, theirs, TOLERANCE)


def test_a_profiled_backward_pass_without_biases():
    x, weight1, _, weight2, _ = leaves()
    y = functional.feed_forward(x, weight1, None, weight2, None)
    expected = torch.autograd.grad(y.sum(), (x, weight1, weight2), retain_graph=True)
    with torch.profiler.profile() as profile:
        actual = torch.autograd.grad(y.sum(), (x, weight1, weight2))
    assert "fasttfm::feed_forward_backward" in {each.key for each in profile.key_averages()}
    assert all(map(torch.equal, actual, expected))


def test_the_scale_of_dropout_is_exact_in_half_precision():
    """1 / 0.9 rounded to bfloat16 would be off by 0.4 %, in every layer with one sign."""
    x, weight = torch.ones(64, 64, dtype=torch.bfloat16), torch.eye(64, dtype=torch.bfloat16)
    out = functional.feed_forward(x, weight, None, 256 * weight, None, dropout_p=0.1, seed=SEED)
    assert torch.equal(out[out != 0].unique(), torch.tensor([256 / 0.9]).to(torch.bfloat16))


# ----------------------------------------------------------------------------------------------------------- memory


def saved_bytes(function):
    """Bytes that autograd saves for the backward pass of function(): each storage once, without parameters."""
    kept = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter) and not isinstance(getattr(tensor, "_base", None), nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function()
    assert output.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_less_is_saved_for_backward_than_by_torch_nn(dropout_p, activation, route):
    M, N, F = 64, 32, 128
    first, second = nn.Linear(N, F), nn.Linear(F, N)
    x = torch.randn(M, N, requires_grad=True)
    between = {"relu": nn.ReLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh")}[activation]
    layers = nn.Sequential(first, between, nn.Dropout(dropout_p) if dropout_p else nn.Identity(), second)
    options = {"dropout_p": dropout_p, "seed": SEED, "activation": activation}

    def ours():
        with backend(route):
            return functional.feed_forward(x, first.weight, first.bias, second.weight, second.bias, **options)

    theirs = saved_bytes(lambda: layers(x))
    mask_of_nn = saved_mask_bytes(M, F) if dropout_p else 0
    if activation == "relu":
        mask = M * F // 8 if route == "triton" else 0
        assert theirs == 4 * M * (N + F) + (4 * M * F + mask_of_nn if dropout_p else 0)
        assert not dropout_p or saved_bytes(ours) < 0.6 * theirs
    else:
        mask = M * F if route == "torch" and dropout_p else 0
        assert theirs == 4 * M * (N + 2 * F) + mask_of_nn
    seed = 8 if dropout_p else 0  # for a second derivative
    assert saved_bytes(ours) == 4 * M * (N + F) + mask + seed


def saved_mask_bytes(rows, columns):
    """Bytes of the mask that torch's own dropout saves: one or more per element."""
    x = torch.ones(rows, columns, requires_grad=True)
    return saved_bytes(lambda: nn.functional.dropout(x, 0.1))


# ---------------------------------------------------------------------------------------------- as a torch operator


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.inductor
def test_inductor_compiles_it_with_its_neighbours():
    inputs = leaves(rows=(8,), width=24, out=24)

    def layer(x, weight1, bias1, weight2, bias2):
        y = functional.feed_forward(x, weight1, bias1, weight2, bias2, dropout_p=0.25, seed=SEED)
        return functional.residual_layer_norm(y, x, bias2, bias2, dropout_p=0.25, seed=SEED, site=1)[0].tanh()

    found = solve(torch.compile(layer, fullgraph=True), inputs)
    assert_same(found, solve(layer, inputs), TOLERANCE)
    assert found[0].any()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("route", ["torch", "triton"])
def test_autocast_casts_the_products_and_not_the_gradients(route, activation):
    inputs = leaves()
    with backend(route), torch.autocast("cpu", dtype=torch.bfloat16):
        output = functional.feed_forward(*inputs, activation=activation)
    assert output.dtype == torch.bfloat16
    for gradient in torch.autograd.grad(output.float().sum(), inputs):
        assert gradient.dtype == torch.float32
    lowered = functional.feed_forward(*(t.detach().bfloat16() for t in inputs), activation=activation)
    torch.testing.assert_close(output, lowered, rtol=2e-2, atol=2e-2)
