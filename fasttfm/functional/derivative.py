"""The derivative of an operator as torch.autograd.Function takes it, for each way to the operator."""

import functools
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler

from fasttfm.functional.backends import warn_once
from fasttfm.functional.namespace import NAMESPACE
from fasttfm.functional.onlookers import alike, any_autocast, compiling, looked_at, modes, see_through
from fasttfm.functional.plan import Plan
from fasttfm.functional.record import Layout, items, layout_of
from fasttfm.functional.subclasses import PLAIN_TENSORS

Gradients = Sequence[Tensor | None]
"""Of the tensors of a call, in their order."""
MOST_LAYOUTS = 64
"""Of gradients, whose plans a forward plan keeps: a part of ever wider memory has ever new strides."""
transformed_calls: list[Callable[..., Any]] = []
"""Of each operator with a derivative, how it is called under torch.func."""
_new: Any = tuple.__new__
_address = Tensor.data_ptr
_grad_enabled = torch.is_grad_enabled
_NONE = type(None)


def pulled_back(
    function: Callable[[Any], Any], record: Any, names: Sequence[str], *gradients: Tensor | None
) -> list[Tensor]:
    """The gradients of these tensors of a record, from those of function(record), None where there is none, such that
    they can be differentiated again; an empty one of what is not there or not of floats."""
    layout = layout_of(record.__class__)
    tensors, others = layout.tensors(record), layout.others(record)
    given = [gradient for gradient in gradients if gradient is not None]
    results = dict.fromkeys(names, given[0].new_empty(0))
    chosen = {n: x for n, x in zip(layout.names, tensors) if n in results and x is not None and x.is_floating_point()}

    def differentiated(*values: Tensor) -> tuple[Tensor, ...]:
        by_name = dict(zip(chosen, values))
        outputs = function(layout.merge(tuple(map(by_name.get, layout.names, tensors)), others))
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return tuple(x for x, gradient in zip(outputs, gradients) if gradient is not None)

    pull: Any = torch.func.vjp(differentiated, *chosen.values())[1]
    return list((results | dict(zip(chosen, pull(tuple(given))))).values())


def by_reference(name: str, layout: Layout, reference: Callable[[Any], Any] | None) -> Callable[..., Gradients]:
    """The backward, with the call itself saved, of an operator whose outputs reference(call) gives in operations that
    PyTorch differentiates: a second derivative, of what a backward pass calls. Without it that is refused."""

    def backward(_: None, call: Any, wanted: Sequence[bool], *gradients: Tensor | None) -> Gradients:
        if reference is None:
            raise RuntimeError(f"{NAMESPACE}::{name} cannot be differentiated; use fasttfm.reference")
        warn_once("a second derivative is computed in plain PyTorch, which is slower and keeps all scores of attention")
        names = [name for name, is_wanted in zip(layout.names, wanted) if is_wanted]
        found = dict(zip(names, pulled_back(reference, call, names, *gradients)))
        return [found.get(name) for name in layout.names]

    return backward


def _wanted(layout: Layout) -> Callable[[Any], Any]:
    """A function of a bool for each tensor to wanted, as an operator's backward() takes it."""
    return functools.partial(_new, NamedTuple("Wanted", [(name, bool) for name in layout.names]))


def direct(operator: Any) -> Any:
    """The apply of a Function of the plan and the call, and the tensors in it, which are what autograd sees."""
    save, differentiable, differentiate = operator.save, operator.differentiable, operator.backward
    none = (None,) * (2 + operator.layout.count)
    kind, visible = operator.saved, operator.visible
    hidden = visible is None or visible > differentiable
    layout = layout_of(kind)
    build, in_order = layout.build, layout.in_order  # merge(), a call less
    first = _first_step(operator)
    products = operator.derivative is not None and operator.derivative.cast is not None  # as finder() takes it

    def forward(ctx: Any, plan: Plan, call: Any, *given: Any) -> Any:
        outputs = plan.compute(call)
        ctx.materialize_grads, ctx.plan = False, plan
        saved = save(call, outputs)
        if layout.nested:
            saved = _new(kind, saved)
        ctx.to_save, ctx.others = tensors, _ = layout.tensors(saved), layout.others(saved)
        if plan.reader is None:
            present = [place for place, x in enumerate(tensors) if x is not None]
            plan.dense, plan.reader = dense(tensors), functools.cache(functools.partial(_reader, present))
        shown = outputs if visible is None else outputs[:visible]
        if hidden and type(shown) is tuple:
            ctx.non_differentiable = shown[differentiable:]
        return shown

    def backward(ctx: Any, *gradients: Any) -> tuple:
        if gradients[0] is None and all(gradient is None for gradient in gradients):
            return none
        plan, saved, needed = ctx.plan, ctx.saved_tensors, ctx.needs_input_grad
        key: tuple | None = None
        step: Any = None
        tensors: tuple = ()
        types = tuple(map(type, gradients))
        watched = (
            compiling() or _profiler._is_profiler_enabled or forward_ad._current_level >= 0
            or (modes() and not see_through())
        )  # fmt: skip  # as looked_at(); alike() sees what is not asked here
        read = None if watched else plan.reader(types)
        if read is not None:
            try:
                tensors = read((*gradients, *saved))
                rest = reduce(or_, map(_address, tensors)) % 16
                key = types, needed, rest and tuple([x.data_ptr() % 16 for x in tensors]), _grad_enabled()
                if products and tensors[0].dtype is torch.float32 and not tensors[0].is_cpu:
                    key = (*key, torch.backends.cuda.matmul.fp32_precision)
                for matches, kept in plan.backwards[key]:
                    if matches(*tensors):
                        step = kept
                        break
            except RuntimeError:  # without memory: all gradients at once
                key = None
        if step is None:
            step, saved = first(plan, saved, needed, tensors, key)
        derive, wants, chosen = step
        record = build(in_order((*saved, *ctx.others)))
        return chosen((*differentiate(derive, record, wants, *gradients), None))

    return apply_of(operator.name, {"forward": forward, "backward": backward})


def _first_step(operator: Any) -> Callable[..., tuple[tuple, tuple]]:
    """A function of a backward pass for which nothing is kept to what computes it, and what was saved as it was:
    derive and wanted, as backward() takes them, and what chooses the gradients that are wanted from all of them
    and a None, two for the plan and the call first."""
    wanted, derivative = _wanted(operator.layout), operator.derivative
    general = None if derivative is None else derivative.call

    def first(plan: Plan, saved: tuple, needed: tuple, tensors: tuple, key: tuple | None) -> tuple[tuple, tuple]:
        wants, was = needed[2:], plan.dense or []
        chosen = itemgetter(-1, -1, *[place if is_wanted else -1 for place, is_wanted in enumerate(wants)])
        if key is None or looked_at() or any_autocast() or any(x.is_neg() for x in tensors) or dense(saved) != was:
            return (general, wanted(wants), chosen), as_saved(saved, was)
        derive = general if general is None or _grad_enabled() else derivative.planned()
        step = derive, wanted(wants), chosen
        plan.backwards.add(key, (alike(tensors), step), MOST_LAYOUTS)
        return step, saved

    return first


def traced(operator: Any) -> tuple[Callable[..., None], Callable[..., tuple]]:
    """setup_context and backward of what the schema lists, as torch.library.register_autograd() takes them."""
    layout, kept, wanted = operator.layout, layout_of(operator.saved), _wanted(operator.layout)
    derive = None if operator.derivative is None else operator.derivative.call

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[operator.differentiable :])
        ctx.set_materialize_grads(False)
        saved = _new(operator.saved, operator.save(operator.settled(layout.build(inputs)), output))
        tensors, ctx.others = kept.tensors(saved), kept.others(saved)
        ctx.dense = dense(tensors)
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, *gradients: Any) -> tuple:
        needed = ctx.needs_input_grad
        result: list[Tensor | None] = [None] * len(needed)
        if any(gradient is not None for gradient in gradients):
            saved = kept.merge(as_saved(ctx.saved_tensors, ctx.dense), ctx.others)
            found = operator.backward(derive, saved, wanted([needed[i] for i in layout.positions]), *gradients)
            for i, gradient in zip(layout.positions, found, strict=True):
                result[i] = gradient if needed[i] else None
        return tuple(result)

    return setup_context, backward


def transformable(name: str, forward: Any, setup_context: Any, backward: Any, vmap: Any) -> Any:
    """A call of the operator under torch.func, by a Function of these methods."""

    def jvp(ctx: Any, *tangents: Any) -> None:
        raise RuntimeError(
            f"{NAMESPACE}::{name} has no forward-mode derivative: use fasttfm.reference for it, or reverse mode"
        )

    methods = {"forward": forward, "setup_context": setup_context, "backward": backward, "vmap": vmap, "jvp": jvp}
    function = _function(name, methods)
    transformed_calls.append(call := lambda *args: function.apply(*args))
    if "torch._dynamo" in sys.modules:
        torch.compiler.allow_in_graph(call)
    return call


def dense(tensors: tuple[Tensor | None, ...]) -> list[bool]:
    """Tell of each tensor if it is contiguous: hooks on saved tensors may give them back with other strides."""
    return [x is not None and x.is_contiguous() for x in tensors]


def as_saved(tensors: tuple[Tensor | None, ...], dense: list[bool]) -> tuple[Tensor | None, ...]:
    """Contiguous where they were: a backward pass reads a kernel's outputs as the kernel wrote them."""
    return tuple(x.contiguous() if is_dense else x for x, is_dense in zip(tensors, dense))  # type: ignore[union-attr]


def _reader(present: Sequence[int], types: tuple[type, ...]) -> Callable[[tuple], tuple] | None:
    """A function that reads, of gradients of these types and of what was saved, the tensors that are there; None where
    a gradient is of a class with a meaning of its own. present: where there are tensors among what was saved."""
    if not PLAIN_TENSORS.issuperset({*types} - {_NONE}):
        return None
    given = [place for place, kind in enumerate(types) if kind is not _NONE]
    return items([*given, *(len(types) + place for place in present)])


def _function(name: str, methods: dict[str, Callable[..., Any]]) -> Any:
    return type(name, (torch.autograd.Function,), {key: staticmethod(each) for key, each in methods.items()})


def apply_of(name: str, methods: dict[str, Any]) -> Any:
    """The apply of a torch.autograd.Function, that of C++: nothing of torch.func is on where it is called."""
    function = _function(name, methods)
    function._backward_cls.apply = methods["backward"]  # what autograd calls; torch's own looks for it at each call
    return super(torch.autograd.Function, function).apply
