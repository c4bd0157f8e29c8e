"""Plans: each serves calls of its signature and no others. A new operator adds its name to PLANNED."""

import gc
import importlib
import itertools
import threading
import weakref
from operator import itemgetter
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import wrong_calls
from public_surface import functions
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from triton.runtime import _allocation

from fasttfm import functional as F
from fasttfm.cpu.linear import frozen_weights
from fasttfm.functional import backends, derivative, operator
from fasttfm.functional.backends import backend
from fasttfm.functional.onlookers import alike
from fasttfm.functional.plan import Plan, Plans, finder
from fasttfm.functional.record import Whole
from fasttfm.kernels import choices, jit
from fasttfm.kernels.chip import INTERPRETER
from fasttfm.kernels.launch import interpreted

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


def kept(plans):
    """The plans of all keys."""
    return [*itertools.chain(*plans.values())]


def plans():
    """The number of plans of all operators and of their backward passes."""
    made = [plan for each in operator._every for plan in kept(each.plans)]
    return len(made) + sum(len(kept(plan.backwards)) for plan in made)


# -------------------------------------------------------------------- every way to compute the same values


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


def leaf(x):
    return x.detach().requires_grad_()


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
    outputs, pull = torch.func.vjp(call, *leaves)
    shape = outputs if isinstance(outputs, tuple) else (outputs,)
    results = pull(gradients[: len(shape)] if isinstance(outputs, tuple) else gradients[0])
    return *shape, *results


def twice(call, leaves, gradients):
    """Two backward passes of one output, whose gradients add up."""
    outputs = called(call, leaves)
    halves = [
        torch.autograd.grad(outputs, leaves, [g * part for g in gradients[: len(outputs)]], retain_graph=True)
        for part in (0.25, 0.75)
    ]
    return *outputs, *(one + other for one, other in zip(*halves, strict=True))


def checkpointed(call, leaves, gradients):
    return solve(lambda *x: checkpoint(call, *x, use_reentrant=False), leaves, gradients)


def compiled(call, leaves, gradients):
    torch._dynamo.reset()
    return solve(torch.compile(call, backend="aot_eager", fullgraph=True), leaves, gradients)


def in_threads(call, leaves, gradients):
    results = []
    thread = threading.Thread(target=lambda: results.append(solve(call, leaves, gradients)))
    thread.start()
    thread.join()
    return results[0]


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


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
    "checkpoint": checkpointed,
    "torch.compile": compiled,
    "another thread": in_threads,
    "saved on the CPU": inside(save_on_cpu),
    "saved with other strides": inside(lambda: saved_tensors_hooks(lambda x: x, transposed)),
    "saved elsewhere": inside(lambda: saved_tensors_hooks(lambda x: x, lambda x: misaligned(x) if x.numel() else x)),
    "a dispatch mode": inside(Seen),
    "a profiler": inside(torch.profiler.profile),
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


@pytest.mark.parametrize("name", ["layer_norm", "attention"])
def test_compiled_autograd_traces_a_backward_pass_that_was_planned(name):
    call, leaves = functions(3)[name]
    gradients = [torch.randn_like(called(call, leaves)[0])]
    expected = solve(call, leaves, gradients)
    for _ in range(2):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            torch.testing.assert_close(solve(call, leaves, gradients), expected, rtol=2e-5, atol=2e-6)


def test_a_negative_scalar_gradient_keeps_its_sign():
    """A tensor of one element is contiguous, whatever its strides."""
    x, weight, bias = (torch.ones(1, 1).requires_grad_(), torch.ones(1), torch.zeros(1, requires_grad=True))
    for route in ROUTES:
        for gradient in (torch.tensor([[2.0]]), negative(torch.tensor([[2.0]])), torch.tensor([[2.0]])):
            with backend(route):
                assert torch.autograd.grad(F.layer_norm(x, weight, bias), bias, gradient)[0].item() == 2.0


@each
def test_what_changes_a_plan_has_a_plan_of_its_own(name):
    call, leaves = functions(3)[name]
    leaves = [leaf(x.detach().to(torch.bfloat16)) for x in leaves]  # PyTorch's own norm needs none

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


@each
def test_a_backward_pass_has_a_plan_for_each_layout_of_gradients(name):
    call, leaves = functions(3)[name]
    y = called(call, [leaf(x.detach().to(torch.bfloat16)) for x in leaves])[0]
    for change in (torch.clone, transposed, wider, misaligned):
        made = [plans()]
        for _ in range(2):
            y.backward(change(torch.ones_like(y)), retain_graph=True)
            made.append(plans())
        assert made[0] < made[1] == made[2], change


def test_alike_compares_tensors_and_dispatch_state():
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    known, twice = alike([a, b]), alike([b, a, b])
    assert known(a, b)
    assert known(leaf(a + 1), b * 2)
    assert twice(torch.ones(4), leaf(a), torch.ones(4)) is False
    assert twice(b, leaf(a), b)
    assert not known(b, a)
    others = [
        (leaf(transposed(a)), b), (leaf(wider(a)), b), (a.detach(), b), (leaf(a[:2]), b), (leaf(a.double()), b),
        (a, b.to("meta")), (a, negative(b)), (a, b.as_subclass(Plain)), (torch.nn.Parameter(a.detach()), b),
    ]  # fmt: skip
    assert not [place for place, other in enumerate(others) if known(*other)]
    seen = []
    torch.vmap(lambda x: seen.append(known(a, b)) or x)(b)
    torch.func.grad(lambda x: seen.append(known(a, b)) or x.sum())(b)
    for context in (Seen(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
        with context:
            seen.append(known(a, b))
            assert alike([a, b])(a, b)
    assert seen == [False] * 5
    assert known(a, b)


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


def test_a_plan_made_under_no_grad_is_not_that_of_a_call_with_gradients():
    x, mask = torch.randn(1, 3, 3, 1, 8), torch.zeros(3, 3, requires_grad=True)
    with torch.no_grad():
        F.packed_qkv_attention(x, mask=mask)
    with pytest.raises(ValueError, match="mask takes no gradient"):
        F.packed_qkv_attention(x, mask=mask)


class Product(NamedTuple):
    x: Tensor
    seed: Whole


def test_the_tf32_setting_has_plans_of_its_own():
    """Also in the backward pass, and if the last tensor of the call is an integer."""
    layout = operator.layout_of(Product)
    find = finder(layout, Plans(), (), checked=True, products=True)
    x, seed = torch.empty(3, device="meta", requires_grad=True), torch.empty(1, dtype=torch.int64, device="meta")
    keys, planned = set(), []
    of_gradients = SimpleNamespace(cast=True, call=len, planned=lambda keep: planned.append(0) or itemgetter(0))

    def backward(derive, saved, needs_grad, grad):
        return derive((grad, saved)), None

    product = SimpleNamespace(
        name="product", layout=layout, save=lambda call, _: call, saved=Product, backward=backward, differentiable=1,
        derivative=of_gradients, visible=None,
    )  # fmt: skip
    apply, plan = derivative.direct(product), Plan(lambda call: call.x * 2.0)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            keys.add(find((x, seed))[2])
            apply(plan, Product(x, seed), x, seed).sum().backward()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert len(keys) == len(planned) == 2


# ---------------------------------------------------------------------------------------------- bounds and threads


@each
def test_the_number_of_plans_is_bounded(name, monkeypatch):
    monkeypatch.setattr(operator, "MOST_PLANS", 8)
    monkeypatch.setattr(derivative, "MOST_LAYOUTS", 4)
    for length in range(1, 30):
        call, leaves = functions(length)[name]
        call(*(leaf(x.detach().to(torch.bfloat16)) for x in leaves))
    call, leaves = functions(3)[name]
    leaves = [leaf(x.detach().to(torch.bfloat16)) for x in leaves]
    for width in range(20, 50):
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


@pytest.mark.sample(6)
@every
def test_eight_threads_get_the_results_of_one(name):
    """With many signatures, while other threads drop all plans."""
    work = [functions(length, dropout_p=p)[name] for length, p in itertools.product(range(1, 9), (0.0, 0.25))]
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


def test_a_launch_that_two_threads_prepare(monkeypatch):
    """The second thread arrives while the first reads the device."""
    ran = []
    compiled = SimpleNamespace(run=lambda *all: ran.append(all[-1]), function=1, packed_metadata=2)
    kernel = SimpleNamespace(compiled=lambda *_: (compiled, ()), kinds={"x": "Varying"})
    asked = []

    def device():
        asked.append(0)
        if len(asked) == 1:
            launch(2)
        return 0

    active = SimpleNamespace(get_current_device=device, get_current_stream=lambda device: device)
    monkeypatch.setattr(jit.triton.runtime.driver, "_active", active)
    launch = jit.Launch(kernel, (1,), {})
    with jit.triton.knobs.runtime.scope():
        jit.triton.knobs.runtime.interpret = False
        launch(1)
        launch(3)
    assert ran == [2, 1, 3]


@pytest.mark.parametrize("scratch", [0, 16])
@pytest.mark.parametrize("name", ["nvidia.driver.CudaLauncher", "amd.driver.HIPLauncher"])
def test_a_launch_passes_the_arguments_of_tritons_launcher(name, scratch, monkeypatch):
    module, kind = f"triton.backends.{name}".rsplit(".", 1)
    launcher, given = object.__new__(getattr(importlib.import_module(module), kind)), []
    options = dict.fromkeys(("launch_cooperative_grid", "launch_pdl", "warp_size", "num_ctas"), 1)
    options |= dict.fromkeys(
        ("global_scratch_align", "global_scratch_size", "profile_scratch_align", "gsan_enabled"), 0
    )
    vars(launcher).update(options, launch=lambda *all: given.append(all), arg_annotations="a", kernel_signature=b"s")
    launcher.profile_scratch_size = scratch
    monkeypatch.setattr(_allocation._profile_allocator, "get", lambda: lambda *all: all)
    # for Triton versions that ask the driver for scratch memory
    active = SimpleNamespace(allocate_default_profile_scratch=lambda size, *rest: (6 * size, *rest))
    monkeypatch.setattr(jit.triton.runtime.driver, "_active", active)
    compiled = SimpleNamespace(function=7, packed_metadata=(4, 1))
    start, before, after = jit.starter(launcher, (2, 3, 1), compiled)
    start(*before, "stream", *after, (8, 9))
    launcher(2, 3, 1, "stream", 7, (4, 1), None, None, None, 8, 9)
    assert given[0] == given[1]
    assert (given[0][-1], (6 * scratch, 0, "stream") in given[0]) == ((8, 9), scratch > 0)
    assert (start is launcher.launch) == (scratch == 0)


# ----------------------------------------------------------------------------------------------- calls without a plan


class Plain(torch.Tensor):
    """A subclass that overrides nothing."""


class Hidden(torch.Tensor):
    """A subclass whose memory has another meaning."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


@each
def test_modes_profilers_and_compilers_see_operators_that_have_plans(name):
    call, leaves = functions(3)[name]
    leaves = [leaf(x.detach().to(torch.bfloat16)) for x in leaves]
    for _ in range(2):
        call(*leaves)
    before = plans()
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    class OfCheckpoints(Mode):
        @classmethod
        def ignore_compile_internals(cls):
            return True

    for mode in (Mode(), OfCheckpoints()):
        seen.clear()
        with mode:
            y = called(call, leaves)[0]
            assert [each for each in seen if each.startswith("fasttfm::")]
            seen.clear()
            y.backward(torch.ones_like(y))
            assert [each for each in seen if each.startswith(("fasttfm::", "aten::native_layer_norm_backward"))]
    with torch.profiler.profile() as profile:
        call(*leaves)
    graphs = []
    torch._dynamo.reset()
    torch.compile(call, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)(*leaves)
    assert any(each.key.startswith("fasttfm::") for each in profile.key_averages())
    assert any("fasttfm" in str(node.target) for node in graphs[0].graph.nodes)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call(*(mode.from_tensor(x) for x in leaves))
    assert isinstance(fake[0] if isinstance(fake, tuple) else fake, torch._subclasses.FakeTensor)
    call(*(x.detach().as_subclass(Plain) for x in leaves))
    with pytest.raises(TypeError, match="Hidden"):
        call(*(x.detach().as_subclass(Hidden) for x in leaves))
    call(*(x.detach().as_subclass(Plain) for x in leaves))
    assert plans() <= before + 4  # the dispatcher's plans of both passes


@pytest.mark.parametrize("name", [name for name in PLANNED if len(functions(3)[name].inputs) > 1])
def test_a_tensor_on_another_device_has_the_same_error_with_and_without_a_plan(name):
    call, leaves = functions(3)[name]

    def refusal():
        with pytest.raises(ValueError, match="on meta") as caught:
            call(*leaves[:-1], leaves[-1].to("meta"))
        return str(caught.value)

    first = refusal()
    call(*leaves)
    assert refusal() == refusal() == first
    if "varlen" not in name and name != "embed":
        assert called(call, [x.to("meta") for x in leaves])[0].device.type == "meta"


@pytest.mark.parametrize("name", [name for name in PLANNED if name in wrong_calls.functions()])
@pytest.mark.sample(4)
def test_a_wrong_call_has_the_same_error_with_and_without_a_plan(name):
    target = wrong_calls.functions()[name]
    odd = {"eps": ([1e-5], {}, True, np.float32(1e-5), np.float64(1e-5), 1 + 0j, "1"), "site": (True, 1.0, 1 << 31, -1),
           "dropout_p": (True, [0.5], np.float32(0.5), 1.5, float("nan"))}  # fmt: skip

    def outcome(**changed):
        try:
            result = target.call(**(target.arguments | changed))
        except Exception as error:
            return type(error), str(error)
        return [x.detach().numpy().tobytes() for x in (result if isinstance(result, tuple) else (result,))]

    wrong = [{each.argument: each.value} for _, each in wrong_calls.wrong_calls() if each.name == name]
    wrong += [{name: value} for name, values in odd.items() if name in target.arguments for value in values]
    for changed in wrong:
        operator.forget_plans()
        first = outcome(**changed)
        assert isinstance(outcome(), list)
        assert outcome(**changed) == first, changed


def test_a_call_through_the_dispatcher_is_checked_before_it_is_planned():
    x, weight = torch.randn(2, 4), torch.ones(3)
    for route in ROUTES:
        with backend(route):
            for call in (
                lambda: torch.ops.fasttfm.residual_norm(
                    x, None, None, weight, None, None, 1e-5, 0.0, 0, False, backends.current
                ),
                lambda: F.layer_norm(x, weight, None),
            ):
                with pytest.raises(ValueError, match=r"weight \(3,\) must be \(4,\)"):
                    call()
