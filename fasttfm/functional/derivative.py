"""Backward passes of operators as torch.autograd.Functions: of eager calls, and of calls through the dispatcher."""

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler

from fasttfm.functional.backends import warn_once
from fasttfm.functional.namespace import NAMESPACE
from fasttfm.functional.onlookers import alike, any_autocast, looked_at, modes, see_through, transformed
from fasttfm.functional.plan import Plan
from fasttfm.functional.record import Layout, flat, items, layout_of
from fasttfm.functional.subclasses import PLAIN_TENSORS

Gradients = Sequence[Tensor | None]
"""Gradients of the tensors of a call, in their order."""
MOST_LAYOUTS = 64
"""Backward plans that a forward plan keeps: gradients that are slices of ever wider buffers have ever new strides."""
_new: Any = tuple.__new__
_address = Tensor.data_ptr
_grad_enabled = torch.is_grad_enabled
_NONE = type(None)


def pulled_back(
    function: Callable[[Any], Any], record: Any, names: Sequence[str], *gradients: Tensor | None
) -> list[Tensor]:
    """Differentiable vector-Jacobian product of function(record) with respect to the tensors with these names.

    gradients: of function's outputs, None where there is none. The result of an absent or integer tensor is empty.
    """
    layout = layout_of(record.__class__)
    tensors, others = layout.tensors(record), layout.others(record)
    given = [gradient for gradient in gradients if gradient is not None]
    results = dict.fromkeys(names, given[0].new_empty(0))
    inputs = {n: x for n, x in zip(layout.names, tensors) if n in results and x is not None and x.is_floating_point()}

    def differentiated(*values: Tensor) -> tuple[Tensor, ...]:
        by_name = dict(zip(inputs, values))
        outputs = function(layout.merge(tuple(map(by_name.get, layout.names, tensors)), others))
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return tuple(x for x, gradient in zip(outputs, gradients) if gradient is not None)

    pull: Any = torch.func.vjp(differentiated, *inputs.values())[1]
    return list((results | dict(zip(inputs, pull(tuple(given))))).values())


def by_reference(name: str, layout: Layout, reference: Callable[[Any], Any] | None) -> Callable[..., Gradients]:
    """Return the backward of an operator without a derivative: autograd through reference(call), or an error.

    This is how a second derivative is computed: of the operator of a backward pass.
    """

    def backward(_: None, call: Any, needs_grad: Sequence[bool], *gradients: Tensor | None) -> Gradients:
        if reference is None:
            raise RuntimeError(f"{NAMESPACE}::{name} cannot be differentiated; use fasttfm.reference")
        warn_once("a second derivative is computed in plain PyTorch, which is slower and keeps all scores of attention")
        names = [name for name, is_needed in zip(layout.names, needs_grad) if is_needed]
        results = dict(zip(names, pulled_back(reference, call, names, *gradients)))
        return [results.get(name) for name in layout.names]

    return backward


def direct(operator: Any, *, eager: bool = True) -> Any:
    """Return the Function.apply of a plan, a call, and the call's tensors, which autograd tracks.

    eager: returns the visible outputs, and its backward pass has plans; else all outputs, as the dispatcher needs.
    """
    save, differentiable, differentiate = operator.save, operator.differentiable, operator.backward
    none = (None,) * (2 + operator.layout.count)
    kind, visible = operator.saved, operator.visible if eager else None
    hidden = visible is None or visible > differentiable
    layout = layout_of(kind)
    build, in_order = layout.build, layout.in_order  # merge(), a call less
    first = _first_step(operator)
    products = operator.derivative is not None and operator.derivative.cast is not None  # as in finder()

    def forward(ctx: Any, plan: Plan, call: Any, *tensors: Any) -> Any:
        outputs = plan.compute(call)
        ctx.materialize_grads, ctx.plan = False, plan
        saved = save(call if eager else operator.settled(call), outputs)
        if layout.nested:
            saved = _new(kind, saved)
        ctx.to_save, ctx.others = saved_tensors, _ = layout.tensors(saved), layout.others(saved)
        if plan.reader is None:
            present = [place for place, x in enumerate(saved_tensors) if x is not None]
            plan.dense, plan.reader = dense(saved_tensors), functools.cache(functools.partial(_reader, present))
        shown = outputs if visible is None else outputs[:visible]
        if hidden and type(shown) is tuple:
            ctx.non_differentiable = shown[differentiable:]
        return shown

    def backward(ctx: Any, *gradients: Any, traced: bool = not eager) -> tuple:
        if gradients[0] is None and all(gradient is None for gradient in gradients):
            return none
        plan, saved, needed = ctx.plan, ctx.saved_tensors, ctx.needs_input_grad
        key: tuple | None = None
        step: Any = None
        tensors: tuple = ()
        types = tuple(map(type, gradients))
        watched = (
            traced or _profiler._is_profiler_enabled or forward_ad._current_level >= 0
            or (modes() and not see_through())
        )  # fmt: skip  # looked_at(), less what alike() compares
        read = None if watched else plan.reader(types)
        if read is not None:
            try:
                tensors, bits = read((*gradients, *saved)), 0
                for address in map(_address, tensors):
                    bits |= address
                key = types, needed, bits % 16 and tuple([x.data_ptr() % 16 for x in tensors]), _grad_enabled()
                if products and tensors[0].dtype is torch.float32 and not tensors[0].is_cpu:
                    key = (*key, torch.backends.cuda.matmul.fp32_precision)
                for matches, cached in plan.backwards[key]:
                    if matches(*tensors):
                        step = cached
                        break
            except RuntimeError:  # a tensor has no memory: gradients batched by vmap
                key = None
        if step is None:
            step, saved = first(plan, saved, needed, tensors, key)
        derive, needs_grad, chosen = step
        record = build(in_order((*saved, *ctx.others)))
        return chosen((*differentiate(derive, record, needs_grad, *gradients), None))

    def jvp(ctx: Any, *tangents: Any) -> None:
        name = f"{NAMESPACE}::{operator.name}"
        raise RuntimeError(f"{name} has no forward-mode derivative: use fasttfm.reference for it, or reverse mode")

    return apply_of(operator.name, forward, backward, lambda *args: backward(*args, traced=True), jvp)


def _first_step(operator: Any) -> Callable[..., tuple[Sequence, tuple]]:
    """Return a function that plans a backward pass whose step is not cached: its step, and its saved tensors.

    A step is derive and needs_grad, as backward() takes them, and an itemgetter that puts the needed gradients into the
    order of the inputs: two None first, for the plan and the call.
    """
    needs_of = functools.partial(_new, NamedTuple("NeedsGrad", [(name, bool) for name in operator.layout.names]))
    derivative = operator.derivative
    general = None if derivative is None else lambda call: derivative.call(*call)  # of any signature

    def first(plan: Plan, saved: tuple, needed: tuple, tensors: tuple, key: tuple | None) -> tuple[Sequence, tuple]:
        needs, was = needed[2:], plan.dense or []
        chosen = itemgetter(-1, -1, *[place if is_needed else -1 for place, is_needed in enumerate(needs)])
        if key is None or looked_at() or any_autocast() or any(x.is_neg() for x in tensors) or dense(saved) != was:
            return (general, needs_of(needs), chosen), as_saved(saved, was)
        step = [general, needs_of(needs), chosen]
        if general is not None and not _grad_enabled():
            step[0] = derivative.planned(functools.partial(step.__setitem__, 0))
        plan.backwards.add(key, (alike(tensors), step), MOST_LAYOUTS)
        return step, saved

    return first


def dispatched(operator: Any) -> Callable[..., Any]:
    """Return the operator's kernel for the dispatcher's Autograd key.

    torch.func runs it once a level: the Function is of one level, and the levels below record in its forward pass.
    torch.library.register_autograd() makes none that torch.func takes.
    """
    layout, apply = operator.layout, direct(operator, eager=False)

    def below(call: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(transformed()):
            return operator.dispatched(*flat(call))

    def kernel(*args: Any) -> Any:
        call = layout.build(args)
        with enable_single_level_autograd_function():
            return apply(Plan(below), call, *layout.tensors(call))

    return kernel


def dense(tensors: tuple[Tensor | None, ...]) -> list[bool]:
    """Return for each tensor whether it is contiguous; saved-tensor hooks may give them back with other strides."""
    return [x is not None and x.is_contiguous() for x in tensors]


def as_saved(tensors: tuple[Tensor | None, ...], dense: list[bool]) -> tuple[Tensor | None, ...]:
    """The tensors, contiguous again where they were: backward kernels assume the forward kernel's layout."""
    return tuple(x.contiguous() if is_dense else x for x, is_dense in zip(tensors, dense))  # type: ignore[union-attr]


def _reader(present: Sequence[int], types: tuple[type, ...]) -> Callable[[tuple], tuple] | None:
    """Return a getter of the tensors in (*gradients, *saved), by the types of the gradients and the places of the saved
    tensors that are not None; None if a gradient is of a tensor subclass."""
    if not PLAIN_TENSORS.issuperset({*types} - {_NONE}):
        return None
    given = [place for place, kind in enumerate(types) if kind is not _NONE]
    return items([*given, *(len(types) + place for place in present)])


def apply_of(name: str, forward: Any, backward: Any, traced: Any = None, jvp: Any = torch.autograd.Function.jvp) -> Any:
    """Return the C++ apply of a torch.autograd.Function, which skips Python's check for torch.func transforms.

    traced: in place of backward where Dynamo traces it, under compiled autograd.
    """
    methods = {"forward": forward, "backward": traced or backward, "jvp": jvp}
    function: Any = type(name, (torch.autograd.Function,), {key: staticmethod(each) for key, each in methods.items()})
    function._backward_cls.apply = backward  # called by autograd directly; torch's own looks it up each time
    return super(torch.autograd.Function, function).apply
