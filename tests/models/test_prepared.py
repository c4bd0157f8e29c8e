"""A stack is prepared once, and again when something in it has changed."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from fasttfm.functional import backend
from fasttfm.models import stack as stacks

from .test_layer_node import loss_and_gradients, model_and_batch, without_nodes

CHANGES = {
    "a forward hook": lambda layer: layer.linear1.register_forward_hook(lambda m, given, out: out * 1.5),
    "a hook before": lambda layer: layer.norm1.register_forward_pre_hook(lambda m, given: (given[0].tanh(),)),
    "a backward hook": lambda layer: layer.linear2.register_full_backward_hook(
        lambda m, given, out: (given[0] * 1.5,)
    ),
    "a hook on the layer": lambda layer: layer.register_forward_hook(lambda m, given, out: out.sin()),
    "a hook on attention": lambda layer: layer.self_attn.register_forward_hook(lambda m, given, out: out * 1.5),
    "a forward of its own": lambda layer: setattr(layer.linear1, "forward", lambda x: x.new_ones(*x.shape[:-1], 24)),
    "another module": lambda layer: setattr(layer, "linear1", nn.Sequential(layer.linear1, nn.Tanh())),
    "another activation": lambda layer: setattr(layer, "activation", torch.tanh),
    "a fused activation": lambda layer: setattr(layer, "activation", nn.functional.gelu),
    "an activation module": lambda layer: setattr(layer, "activation", nn.GELU(approximate="tanh")),
    "another class": lambda layer: setattr(layer.norm1, "__class__", type("Norm", (nn.LayerNorm,), {})),
    "another epsilon": lambda layer: setattr(layer.norm1, "eps", 0.5),
    "other heads": lambda layer: setattr(layer.self_attn, "num_heads", 4),
    "another parameter": lambda layer: setattr(layer.linear1, "weight", nn.Parameter(0.5 * layer.linear1.weight)),
    "other data": lambda layer: setattr(layer.linear1.weight, "data", 0.5 * layer.linear1.weight.data),
    "weights as they were": lambda layer: layer.linear1.weight.data.mul_(0.5),
    "a wider network": lambda layer: (
        setattr(layer, "linear1", nn.Linear(16, 8)), setattr(layer, "linear2", nn.Linear(8, 16))
    ),
    "no bias": lambda layer: setattr(layer.linear1, "bias", None),
    "no affine norm": lambda layer: setattr(layer, "norm2", nn.LayerNorm(16, elementwise_affine=False)),
    "a dropout of 0": lambda layer: setattr(layer, "dropout_p", 0.0),
    "the other order": lambda layer: setattr(layer, "norm_first", not layer.norm_first),
    "pruning": lambda layer: prune.random_unstructured(layer.linear1, "weight", 0.5),
    "parametrisation": lambda layer: nn.utils.parametrizations.weight_norm(layer.linear1),
}  # fmt: skip


@pytest.mark.sample(8)
@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_first_pass_takes_effect(change, norm_first, side):
    model, batch = model_and_batch(norm_first=norm_first, final_norm=norm_first)
    before = loss_and_gradients(model, batch, "torch")
    torch.manual_seed(3)
    CHANGES[change](getattr(model, side).layers[1])
    loss, actual = loss_and_gradients(model, batch, "torch")
    with without_nodes():
        wanted_loss, wanted = loss_and_gradients(model, batch, "torch")
    torch.testing.assert_close(loss, wanted_loss)
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.equal(loss, before[0]) or change in ("another class", "a backward hook", "parametrisation")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_independent(duplicate):
    model, batch = model_and_batch(dropout=0.0)
    expected = loss_and_gradients(model, batch, "torch")
    other = duplicate(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(loss_and_gradients(other, batch, "torch"), expected, rtol=0, atol=0)
    torch.save(other, io.BytesIO())


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("choice", ["torch", "triton"])
def test_two_forward_passes_before_two_backward_passes(choice, precision):
    model, batch = model_and_batch(dropout=0.0)
    _, once = loss_and_gradients(model, batch, choice, precision)
    model.zero_grad()
    with backend(choice), torch.autocast("cpu", torch.bfloat16, enabled=precision is not None):
        both = model.loss(*batch)[0] + model.loss(*batch)[0]
    for times, retain in ((2, True), (4, False)):
        both.backward(retain_graph=retain)
        for name, parameter in model.named_parameters():
            bounds = {"rtol": 2e-2 if precision else 1e-4, "atol": 1e-4 * times}
            torch.testing.assert_close(parameter.grad, times * once[name], **bounds)
    with pytest.raises(RuntimeError, match="second time"):
        both.backward()


def test_a_parameter_changed_before_the_backward_pass_is_refused():
    model, batch = model_and_batch()
    loss = model.loss(*batch)[0]
    with torch.no_grad():
        model.encoder.layers[0].linear1.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def second_derivatives(norm_first):
    model, batch = model_and_batch(norm_first=norm_first, final_norm=norm_first, dropout=0.1, activation="gelu")
    model.double()
    parameters = [model.encoder.layers[0].linear1.weight, model.decoder.layers[1].norm1.bias]
    torch.manual_seed(1)
    with backend("torch"):
        first = torch.autograd.grad(model.loss(*batch)[0], parameters, create_graph=True)
    return torch.autograd.grad(sum(x.sin().sum() for x in first), parameters)


def a_layer_used_twice():
    """It draws other masks, and adds its gradients."""
    model, _ = model_and_batch(dropout=0.3, norm_first=True)
    stack, x = stacks.Stack([model.encoder.layers[0]] * 2, None), torch.randn(3, 5, 16)
    y = stack(x, torch.tensor([5, 2, 3]), seed=torch.tensor([5]))
    return y, *torch.autograd.grad(y.sin().sum(), stack.layers[0].linear1.weight)


COMPUTED = {
    "second derivatives": lambda: second_derivatives(False),
    "second derivatives, pre-norm": lambda: second_derivatives(True),
    "a layer used twice": a_layer_used_twice,
}


@pytest.mark.parametrize("name", COMPUTED)
def test_results_are_those_of_the_operators(name):
    results = []
    for context in (without_nodes, contextlib.nullcontext):
        torch.manual_seed(4)
        with context():
            results.append(COMPUTED[name]())
    torch.testing.assert_close(results[1], results[0])


def test_without_gradients_and_on_meta_a_stack_gives_the_same_output():
    model, (source, target, _, *lengths) = model_and_batch(dropout=0.0)
    expected = model(source, target, *lengths).detach()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(model(source, target, *lengths), expected)
    with pytest.raises(TypeError, match="lengths"):
        model.encoder(torch.ones(3, 6, 16), [5, 2, 1])
    model.to("meta")
    assert model(*(x.to("meta") for x in (source, target, *lengths))).shape == expected.shape
