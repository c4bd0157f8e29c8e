"""A stack is prepared once, and again when something in it has changed."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import prune

from fasttfm.functional import backend
from fasttfm.models import stack as stacks

from .test_layer_node import counted_nodes, loss_and_gradients, model_and_batch, without_nodes

CHANGES = {
    "a forward hook": lambda layer: layer.linear1.register_forward_hook(lambda m, given, out: out * 1.5),
    "a hook before": lambda layer: layer.norm1.register_forward_pre_hook(lambda m, given: (given[0].tanh(),)),
    "a backward hook": lambda layer: layer.linear2.register_full_backward_hook(
        lambda m, given, out: (given[0] * 1.5,)
    ),
    "a hook on the layer": lambda layer: layer.register_forward_hook(lambda m, given, out: out * 1.5),
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


def test_nodes_run_again_after_a_hook_was_removed():
    model, batch = model_and_batch()
    seen = []
    hook = model.encoder.layers[0].linear1.register_forward_hook(lambda *given: seen.append(1))
    loss_and_gradients(model, batch, "torch")
    assert seen == [1]
    hook.remove()
    with counted_nodes() as nodes:
        loss_and_gradients(model, batch, "torch")
    assert len(nodes) == 2
    assert seen == [1]


def test_a_hook_for_all_modules_is_called():
    model, batch = model_and_batch()
    loss_and_gradients(model, batch, "torch")
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        loss_and_gradients(model, batch, "torch")
    finally:
        hook.remove()
    assert {"EncoderLayer", "DecoderLayer", "Stack"} <= set(seen)


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


def test_a_converted_model_is_prepared_again():
    model, batch = model_and_batch(dropout=0.0)
    loss_and_gradients(model, batch, "torch")
    model.double()
    with counted_nodes() as nodes:
        loss, gradients = loss_and_gradients(model, batch, "torch")
    assert len(nodes) == 2
    assert loss.dtype == gradients["encoder.layers.0.linear1.weight"].dtype == torch.float64
    model.float()
    loss_and_gradients(model, batch, "torch")


@pytest.mark.sample(2)
@pytest.mark.parametrize("choice", ["torch", "triton"])
@pytest.mark.parametrize(
    "name",
    [
        "encoder.layers.0.linear1.bias", "decoder.layers.1.multihead_attn.in_proj_weight",
        "decoder.layers.0.multihead_attn.in_proj_bias", "encoder.layers.1.self_attn.out_proj.weight",
        "decoder.layers.0.norm2.weight",
    ],
)  # fmt: skip
def test_a_parameter_that_does_not_train_has_no_gradient_and_changes_no_other(name, choice):
    model, batch = model_and_batch(dropout=0.0)
    _, every = loss_and_gradients(model, batch, choice)
    frozen = dict(model.named_parameters())[name].requires_grad_(False)
    frozen.grad = None
    _, actual = loss_and_gradients(model, batch, choice)
    assert actual.keys() == every.keys() - {name}
    for other, gradient in actual.items():
        torch.testing.assert_close(gradient, every[other], rtol=1e-5, atol=1e-6, msg=other)


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("choice", ["torch", "triton"])
def test_two_forward_passes_before_a_backward_pass(choice, precision):
    model, batch = model_and_batch(dropout=0.0)
    _, once = loss_and_gradients(model, batch, choice, precision)
    model.zero_grad()
    with backend(choice), torch.autocast("cpu", torch.bfloat16, enabled=precision is not None):
        first, second = model.loss(*batch)[0], model.loss(*batch)[0]
    (first + second).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], rtol=2e-2 if precision else 1e-4, atol=1e-4)


def test_a_retained_graph_allows_two_backward_passes():
    model, batch = model_and_batch()
    loss = model.loss(*batch)[0]
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_parameter_changed_before_the_backward_pass_is_refused():
    model, batch = model_and_batch()
    loss = model.loss(*batch)[0]
    with torch.no_grad():
        model.encoder.layers[0].linear1.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.sample(1)
@pytest.mark.parametrize("norm_first", [False, True])
def test_second_derivatives_are_those_of_the_operators(norm_first):
    model, batch = model_and_batch(norm_first=norm_first, final_norm=norm_first, dropout=0.1, activation="gelu")
    model.double()
    parameters = [model.encoder.layers[0].linear1.weight, model.decoder.layers[1].norm1.bias]

    def second() -> list[torch.Tensor]:
        torch.manual_seed(1)
        first = torch.autograd.grad(model.loss(*batch)[0], parameters, create_graph=True)
        return torch.autograd.grad(sum(x.sin().sum() for x in first), parameters)

    with backend("torch"):
        actual = second()
        with without_nodes():
            wanted = second()
    torch.testing.assert_close(actual, wanted)


def test_saved_tensors_may_live_elsewhere():
    model, batch = model_and_batch()
    expected = loss_and_gradients(model, batch, "torch")
    packed = []

    def pack(x):
        packed.append(x.shape)
        return x.to(torch.float64) if x.is_floating_point() else x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.float() if x.is_floating_point() else x):
        actual = loss_and_gradients(model, batch, "torch")
    assert packed
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_stack_that_is_hooked_itself_still_runs_nodes():
    model, batch = model_and_batch()
    model.encoder.register_forward_hook(lambda module, given, output: None)
    with counted_nodes() as nodes:
        loss_and_gradients(model, batch, "torch")
    assert len(nodes) == 2


def test_a_layer_that_is_used_twice_draws_other_masks_and_adds_its_gradients():
    model, _ = model_and_batch(dropout=0.3, norm_first=True)
    stack = stacks.Stack([model.encoder.layers[0]] * 2, None)
    x = torch.randn(3, 5, 16)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        stack.zero_grad()
        y = stack(x, torch.tensor([5, 2, 3]), seed=torch.tensor([5]))
        y.sin().sum().backward()
        return y.detach(), stack.layers[0].linear1.weight.grad.clone()

    actual = run()
    with without_nodes():
        wanted = run()
    torch.testing.assert_close(actual, wanted)


def test_without_gradients_a_stack_gives_the_same_output():
    model, (source, target, _, *lengths) = model_and_batch(dropout=0.0)
    expected = model(source, target, *lengths).detach()
    with torch.no_grad():
        torch.testing.assert_close(model(source, target, *lengths), expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(source, target, *lengths), expected)


def assert_as_operators(compute, *, refused=False):
    """Assert that compute() gives the same tensors, or if refused raises the same error, with and without nodes."""
    wanted, actual = _outcome(compute, without_nodes), _outcome(compute)
    assert isinstance(wanted, str) == refused, wanted
    if refused:
        assert actual == wanted
    else:
        torch.testing.assert_close(actual, wanted)


def _outcome(compute, around=contextlib.nullcontext):
    with around():
        try:
            return compute()
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def test_a_network_narrowed_in_place_is_noticed():
    def run():
        model, batch = model_and_batch(dropout=0.0)
        loss_and_gradients(model, batch, "triton")
        for layer in model.encoder.layers:
            for parameter in (layer.linear1.weight, layer.linear1.bias):
                parameter.data = parameter.data[:8]
            layer.linear2.weight.data = layer.linear2.weight.data[:, :8]
        return loss_and_gradients(model, batch, "triton")

    assert_as_operators(run)


def test_buffers_in_place_of_parameters_may_be_replaced():
    def run():
        model, batch = model_and_batch(dropout=0.0)
        for module in model.encoder.layers.modules():
            for name, parameter in [*module._parameters.items()]:
                delattr(module, name)
                module.register_buffer(name, parameter.detach())
        loss_and_gradients(model, batch, "torch")
        linear = model.encoder.layers[0].linear1
        linear.weight = 3 * linear.weight
        return loss_and_gradients(model, batch, "torch")

    assert_as_operators(run)


X = torch.ones(3, 6, 16)
WRONG = {
    "an int32 seed": lambda model: model.encoder(X, seed=torch.tensor([5], dtype=torch.int32)),
    "a 0-d seed": lambda model: model.encoder(X, seed=torch.tensor(5)),
    "a seed elsewhere": lambda model: model.encoder(X, seed=torch.tensor([5], device="meta")),
    "lengths elsewhere": lambda model: model.encoder(X, torch.tensor([5, 2, 1], device="meta")),
    "lengths in a list": lambda model: model.encoder(X, [5, 2, 1]),
    "an input too many": lambda model: model.encoder(X, torch.tensor([5, 2, 1]), 3),
    "no memory": lambda model: model.decoder(X),
    "nothing": lambda model: model.encoder(None),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused_as_by_the_operators(wrong):
    def run():
        model, _ = model_and_batch(dropout=0.3)
        model.encoder(X, torch.tensor([5, 2, 1]), seed=torch.tensor([5]))
        return WRONG[wrong](model)

    assert_as_operators(run, refused=True)


def test_a_decoder_without_memory_is_computed_by_operators():
    model, _ = model_and_batch(dropout=0.0)
    assert_as_operators(lambda: model.decoder(X, None))


def test_a_model_on_the_meta_device_gives_shapes():
    model, batch = model_and_batch()
    model(*batch[:2], *batch[3:])
    model.to("meta")
    logits = model(*(x.to("meta") for x in (*batch[:2], *batch[3:])))
    assert logits.shape == (3, 5, 31)


@pytest.mark.parametrize("norm_first", [False, True])
def test_batched_gradients(norm_first):
    def run():
        model, _ = model_and_batch(dropout=0.0, norm_first=norm_first)
        x, memory = (torch.randn(2, 3, 16, requires_grad=True) for _ in range(2))
        y, wanted = model.decoder(x, memory), [x, memory, model.decoder.layers[0].linear1.weight]
        return torch.autograd.grad(y, wanted, torch.randn(4, 2, 3, 16), is_grads_batched=True)

    assert_as_operators(run)


def test_a_gradient_with_a_graph_is_as_precise_under_autocast():
    model, _ = model_and_batch(dropout=0.0, activation="gelu")
    x = torch.randn(3, 6, 16, requires_grad=True)
    loss = model.encoder(x).sin().sum()
    (wanted,) = torch.autograd.grad(loss, x, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (actual,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_a_loss_keeps_nothing_alive_after_its_backward_pass(precision, monkeypatch):
    model, _ = model_and_batch()
    references, cast = [], stacks.StackWeights.in_dtype

    def in_dtype(self, dtype, *, joined):
        weights, memory_weights = cast(self, dtype, joined=joined)
        references.extend(StorageWeakRef(x.untyped_storage()) for x in weights[0] if x.dtype is precision)
        return weights, memory_weights

    monkeypatch.setattr(stacks.StackWeights, "in_dtype", in_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is not None):
        memory = torch.randn(3, 7, 16, requires_grad=True) * 2
        references.append(StorageWeakRef(memory.untyped_storage()))
        loss = model.decoder(torch.randn(3, 6, 16), memory).sum()
    del memory
    loss.backward()
    assert all(each.expired() for each in references)


def test_a_converted_model_frees_its_old_weights():
    model, batch = model_and_batch()
    loss_and_gradients(model, batch, "torch")
    model.zero_grad()
    weights = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    model.double()
    assert all(each.expired() for each in weights)


def test_stacks_that_two_threads_prepare_at_once_are_told_apart(monkeypatch):
    one, other = (model_and_batch(heads=heads)[0].encoder for heads in (2, 4))
    prepared = []

    class Interrupted(dict):
        """The other thread runs when the first is about to add its kind."""

        def setdefault(self, kind, number):
            if not prepared:
                prepared.append(None)
                prepared[0] = stacks.PreparedStack([*other.layers], None)
            return super().setdefault(kind, number)

    monkeypatch.setattr(stacks, "_numbers", Interrupted())
    assert {*stacks.PreparedStack([*one.layers], None)._kinds}.isdisjoint(prepared[0]._kinds)
