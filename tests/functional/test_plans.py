"""Plans: each serves calls of its signature and no others. A new operator adds its name to PLANNED."""

import gc
import itertools
import threading
import weakref
from operator import itemgetter
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from public_surface import functions
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fasttfm import functional as F
from fasttfm.cpu.linear import frozen_weights
from fasttfm.functional import derivative, operator
from fasttfm.functional.backends import backend
from fasttfm.functional.plan import Plan
from fasttfm.functional.record import Whole
from fasttfm.kernels import choices, jit
from fasttfm.kernels.chip import INTERPRETER
from fasttfm.kernels.launch import interpreted

from .agreement import Seen

PLANNED = ["layer_norm", "residual_layer_norm", "rms_norm",
           "residual_rms_norm", "attention", "packed_qkv_attention", "varlen_attention",
           "varlen_packed_qkv_attention", "embed", "rotary", "feed_forward", "feed_forward_gelu"]  # fmt: skip
"""Names in public_surface.functions() whose operators have plans on both routes."""
EVERY = [*PLANNED, "cross_entropy", "linear_cross_entropy", "residual_add", "attention_weights"]
"""Also functions that plan some of their calls only, or take integers."""
ROUTES = ["auto", "triton"] if interpreted() else ["auto"]
each = pytest.mark.parametrize("name", PLANNED)
every = pytest.mark.parametrize("name", EVERY)
on_each_route = pytest.mark.parametrize("route", ROUTES)


def called(call, leaves):
    """The outputs as a tuple."""
    outputs = call(*leaves)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def solve(call, leaves, gradients):
    """Outputs, and the gradients of the leaves."""
    outputs = called(call, leaves)
    return *outputs, *torch.autograd.grad(outputs, leaves, gradients[: len(outputs)])


def leaf(x):
    return x.detach().requires_grad_()


def in_bfloat16(name, length=3):
    """A call and its leaves; in float32 PyTorch's own norm needs no plan."""
    call, leaves = functions(length)[name]
    return call, [leaf(x.detach().to(torch.bfloat16)) for x in leaves]


def kept(plans):
    """The plans of all keys."""
    return [*itertools.chain(*plans.values())]


def plans():
    """The number of plans of all operators and of their backward passes."""
    made = [plan for each in operator._every for plan in kept(each.plans)]
    return len(made) + sum(len(kept(plan.backwards)) for plan in made)


def leaves_as(change):
    """Calls on leaves with the same values in another form."""
    return lambda call, leaves, gradients: solve(call, [leaf(change(x.detach())) for x in leaves], gradients)


def gradients_as(change):
    return lambda call, leaves, gradients: solve(call, leaves, [change(g) for g in gradients])


def inside(context):
    def run(call, leaves, gradients):
        with context():
            return solve(call, leaves, gradients)

    return run


def misaligned(x):
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def transposed(x):
    return x.mT.contiguous().mT if x.dim() > 1 else torch.stack([x, x], -1)[..., 0]


def wider(x):
    return torch.cat([x, x], -1)[..., : x.shape[-1]] if x.dim() else torch.stack([x, x])[0]


def negative(x):
    result = torch.complex(x, -x).conj().imag
    assert result.is_neg()
    return result


def batched(call, leaves, gradients):
    outputs = called(call, leaves)
    twice = [torch.stack([g, 2 * g]) for g in gradients[: len(outputs)]]
    results = torch.autograd.grad(outputs, leaves, twice, is_grads_batched=True)
    return *outputs, *(x[1] / 2 for x in results)


def moved(change):
    """Inputs whose memory changes before the backward pass."""

    def run(call, leaves, gradients):
        leaves = [leaf(x) for x in leaves]
        outputs = called(call, leaves)
        for x in leaves:
            x.data = change(x.detach())
        return *outputs, *torch.autograd.grad(outputs, leaves, gradients[: len(outputs)])

    return run


def create_graph(call, leaves, gradients):
    outputs = called(call, leaves)
    results = torch.autograd.grad(outputs, leaves, gradients[: len(outputs)], create_graph=True)
    return *outputs, *(x.detach() for x in results)


def transform(call, leaves, gradients):
    outputs, pull = torch.func.vjp(lambda *x: called(call, x), *leaves)
    return *outputs, *pull(gradients[: len(outputs)])


def twice(call, leaves, gradients):
    """The second of two backward passes of one output."""
    outputs = called(call, leaves)
    for _ in range(2):
        results = torch.autograd.grad(outputs, leaves, gradients[: len(outputs)], retain_graph=True)
    return *outputs, *results


def compiled(call, leaves, gradients):
    torch._dynamo.reset()
    return solve(torch.compile(call, backend="aot_eager", fullgraph=True), leaves, gradients)


WAYS = {
    "misaligned inputs": leaves_as(misaligned),
    "transposed inputs": leaves_as(transposed),
    "parts of wider inputs": leaves_as(wider),
    "parameters": leaves_as(torch.nn.Parameter),
    "negative views": leaves_as(negative),
    "misaligned gradients": gradients_as(misaligned),
    "transposed gradients": gradients_as(transposed),
    "parts of wider gradients": gradients_as(wider),
    "negative gradients": gradients_as(negative),
    "inputs moved before the backward pass": moved(transposed),
    "inputs misaligned before the backward pass": moved(misaligned),
    "batched gradients": batched,
    "a graph of gradients": create_graph,
    "two gradients of one output": twice,
    "torch.func": transform,
    "checkpoint": lambda call, *x: solve(lambda *leaves: checkpoint(call, *leaves, use_reentrant=False), *x),
    "torch.compile": compiled,
    "a profiler": inside(torch.profiler.profile),
    "saved on the CPU": inside(save_on_cpu),
    "saved with other strides": inside(lambda: saved_tensors_hooks(lambda x: x, transposed)),
    "a dispatch mode": inside(Seen),
    "compiled autograd": inside(lambda: torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))),
    "frozen weights": inside(lambda: frozen_weights(torch.nn.Linear(2, 2))),
    "autocast of another device": inside(lambda: torch.autocast("cuda", torch.bfloat16)),
}


@pytest.mark.sample(12)
@every
@on_each_route
@pytest.mark.parametrize("way", WAYS)
def test_results_do_not_depend_on_earlier_plans(name, route, way):
    """A plain call before and after the other way gives the same values."""
    call, leaves = functions(3, dropout_p=0.0 if way == "torch.func" else 0.25)[name]
    with backend(route):
        gradients = tuple(torch.randn_like(x) for x in called(call, leaves))
        operator.forget_plans()
        orders = [(solve, WAYS[way], WAYS[way], solve), (WAYS[way], solve, WAYS[way])]
        results = []
        for order in orders:
            results += [run(call, leaves, gradients) for run in order]
            operator.forget_plans()
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=2e-5, atol=2e-6)


@on_each_route
def test_a_negative_scalar_gradient_keeps_its_sign(route):
    """A tensor of one element is contiguous, whatever its strides."""
    x, weight, bias = (torch.ones(1, 1).requires_grad_(), torch.ones(1), torch.zeros(1, requires_grad=True))
    with backend(route):
        for gradient in (torch.tensor([[2.0]]), negative(torch.tensor([[2.0]])), torch.tensor([[2.0]])):
            assert torch.autograd.grad(F.layer_norm(x, weight, bias), bias, gradient)[0].item() == 2.0


@pytest.mark.sample(4)
@each
def test_what_changes_a_plan_has_a_plan_of_its_own(name):
    call, leaves = in_bfloat16(name)

    def frozen_call():
        with frozen_weights(torch.nn.Linear(2, 2)):
            return call(*leaves)

    def on(route):
        def run():
            with backend(route):
                return call(*leaves)

        return run

    def tuned():
        choices.keep(INTERPRETER, {})
        return call(*leaves)

    changes = [
        lambda: call(*leaves), torch.no_grad()(lambda: call(*leaves)), frozen_call, tuned,
        lambda: call(*(x.detach() for x in leaves)), lambda: call(*(leaf(misaligned(x)) for x in leaves)),
        lambda: call(*(leaf(transposed(x)) for x in leaves)), lambda: call(*(leaf(wider(x)) for x in leaves)),
        lambda: call(*(leaf(x.double()) for x in leaves)), *map(on, ("torch", "triton")[: len(ROUTES)]),
    ]  # fmt: skip
    for number, change in enumerate(changes):
        before = plans()
        change()
        assert plans() > before, number
        if change is not tuned:
            before = plans()
            change()
            assert plans() == before, number


@pytest.mark.sample(4)
@each
def test_a_backward_pass_has_a_plan_for_each_layout_of_gradients(name):
    y = called(*in_bfloat16(name))[0]
    for change in (torch.clone, transposed, wider, misaligned):
        made = [plans()]
        for _ in range(2):
            y.backward(change(torch.ones_like(y)), retain_graph=True)
            made.append(plans())
        assert made[0] < made[1] == made[2], change


@pytest.mark.parametrize("name", ["layer_norm", "residual_rms_norm", "attention"])
@pytest.mark.skipif(not interpreted(), reason="counts the interpreter's launches")
def test_a_backend_and_a_tile_hold_from_the_next_call_on(name):
    call, leaves = functions(3)[name]

    def launched(route):
        with backend(route), mock.patch.object(jit.InterpretedKernel, "start", autospec=True) as start:
            call(*leaves)
        return [each.args[3] for each in start.call_args_list]

    shipped = launched("triton")
    assert shipped == launched("triton") != []
    assert not launched("torch")
    others = {
        (choice, size_class): list(choices.CHOICES[choice].answers(INTERPRETER, *size_class))[-1]
        for choice, size_class in choices.asked(INTERPRETER)
    }
    try:
        choices.keep(INTERPRETER, others)
        assert launched("triton") != shipped
    finally:
        choices.keep(INTERPRETER, {})
    assert launched("triton") == shipped


class Product(NamedTuple):
    x: Tensor
    seed: Whole


def test_the_tf32_setting_has_plans_of_the_backward_pass_of_its_own():
    """Also if the last tensor of the call is an integer. Of the forward pass: test_operators.py."""
    x, seed = torch.empty(3, device="meta", requires_grad=True), torch.empty(1, dtype=torch.int64, device="meta")
    planned = []
    of_gradients = SimpleNamespace(cast=True, call=len, planned=lambda keep: planned.append(0) or itemgetter(0))

    def backward(derive, saved, needs_grad, grad):
        return derive((grad, saved)), None

    product = SimpleNamespace(
        name="product", layout=operator.layout_of(Product), save=lambda call, _: call, saved=Product, backward=backward,
        differentiable=1, derivative=of_gradients, visible=None,
    )  # fmt: skip
    apply, plan = derivative.direct(product), Plan(lambda call: call.x * 2.0)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            apply(plan, Product(x, seed), x, seed).sum().backward()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert len(planned) == 2


# ---------------------------------------------------------------------------------------------- bounds and threads


@pytest.mark.sample(3)
@each
def test_the_number_of_plans_is_bounded(name, monkeypatch):
    monkeypatch.setattr(operator, "MOST_PLANS", 8)
    monkeypatch.setattr(derivative, "MOST_LAYOUTS", 4)
    for length in range(1, 20):
        called(*in_bfloat16(name, length))
    call, leaves = in_bfloat16(name)
    for width in range(20, 40):
        y = called(call, leaves)[0]
        y.backward(torch.randn(*y.shape[:-1], width, dtype=y.dtype)[..., : y.shape[-1]])
    made = [plan for each in operator._every for plan in kept(each.plans)]
    assert 0 < max(len(plan.backwards) for plan in made) <= 4
    assert 0 < max(len(each.plans) for each in operator._every) <= 8


@pytest.mark.sample(6)
@every
@on_each_route
def test_a_plan_keeps_no_tensor(name, route):
    call, leaves = functions(3, dropout_p=0.25)[name]
    with backend(route):
        results = solve(call, leaves, [torch.ones_like(y) for y in called(call, leaves)])
    alive = [weakref.ref(x) for x in (*leaves, *results)]
    del call, leaves, results
    gc.collect()
    assert plans()
    assert not [x for x in alive if x() is not None]


@pytest.mark.sample(4)
@every
def test_eight_threads_get_the_results_of_one(name):
    """With many signatures, while other threads drop all plans."""
    work = [functions(length, dropout_p=p)[name] for length, p in itertools.product(range(1, 6), (0.0, 0.25))]
    gradients = [[torch.randn_like(y) for y in called(*use)] for use in work]
    expected = [solve(*call, g) for call, g in zip(work, gradients, strict=True)]
    wrong, ended, start = [], [], threading.Barrier(8)

    def run(first):
        start.wait()
        for place in [(first + i) % len(work) for i in range(3 * len(work))]:
            got = solve(*work[place], gradients[place])
            if not all(map(torch.equal, got, expected[place])):
                wrong.append(place)
            if place == first:
                operator.forget_plans()
        ended.append(first)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == [*range(8)], "no thread has raised"
    assert not wrong


# ----------------------------------------------------------------------------------------------- calls without a plan
