"""Registration of torch operators: schema, computation, fake, autograd and autocast in one place.

Each kernel family defines one operator for its forward and one for its backward pass. The arguments of a call are a
NamedTuple, whose fields give the schema; nested records are flattened into it.

A training step makes hundreds of calls, so host time decides how they are made. An eager call on plain tensors looks up
a plan and bypasses the dispatcher. torch.compile, fake tensors, tensor subclasses, dispatch modes and the profiler go
through torch.ops.fasttfm, and so does torch.func.

Registration uses torch's public names; the private ones are in onlookers.py.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, ParamSpec, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler

from fasttfm.functional.batching import batching_rule
from fasttfm.functional.derivative import Gradients, by_reference, direct, dispatched
from fasttfm.functional.namespace import NAMESPACE
from fasttfm.functional.onlookers import (
    alike,
    any_autocast,
    compiling,
    formulas,
    looked_at,
    modes,
    see_through,
    transformed,
)
from fasttfm.functional.plan import MOST_PLANS, Plan, Plans, empties, finder, unshared, without_autocast, without_views
from fasttfm.functional.record import MASK, REAL, WHOLE, Mask, Overwritten, Size, Whole, flat, layout_of

__all__ = [
    "MASK", "REAL", "WHOLE", "Gradients", "Inner", "Mask", "Operator", "Overwritten", "Size", "Whole", "casts",
    "empties", "forget_plans", "lowered", "other_plans", "transformed", "without_views"
]  # fmt: skip

_library, _operators = torch.library.Library(NAMESPACE, "DEF"), getattr(torch.ops, NAMESPACE)
MARK = "import_fasttfm_functional_before_torch_export_load"
"""A no-op operator that an exported file calls first: a process without our operators fails with this name."""
_library.define(f"{MARK}() -> ()")
_library.impl(MARK, lambda: None, "CompositeExplicitAutograd")
_DEVICES = ("CPU", "CUDA", "XPU", "MPS")
_AUTOCAST_DEVICES = ("cpu", "cuda")

# Read in every call, so looked up once.
_autocast_enabled = torch.is_autocast_enabled
_set_autocast = torch.set_autocast_enabled
_current_gpu = torch.cuda.current_device
_new: Any = tuple.__new__  # a NamedTuple's own is three times as slow, and Python

Fields = ParamSpec("Fields")


class Operator(Generic[Fields]):
    """One torch operator, torch.ops.fasttfm.<name>; `call` takes the fields of its call, a NamedTuple.

    plan(call): returns the function that computes calls of this signature; decisions are made here. It runs without
        autograd and autocast. Its outputs are no views, except internal ones; None is allowed, and becomes an empty
        tensor of the first tensor's dtype at the dispatcher.
    fake(call): empty outputs of the right shapes, dtypes and strides, None as in plan.
    checks(call): raises for arguments that do not agree; asked before a signature is planned.
    prefers(call): the route to request in place of the caller's; not asked at the dispatcher.
    native(call, direct): a function that computes the call by operators that PyTorch differentiates, if they are the
        only way, or (direct) the faster one; else None.
    decide(call): resolves call.route, the last field, before planning and saving, so that both passes take one route;
        must be idempotent.
    varies(call): state that a plan depends on beside the signature, as a function of the tensors present; the plan
        holds while its value stays.
    save(call, outputs): the fields of saved, a NamedTuple; by default the call itself.
    derivative: the operator of the backward pass. It takes the gradients of the differentiable outputs and the saved
        record, and returns the gradients of the call's first tensors, None for absent ones. Eager backward passes plan
        it by the layout of the gradients; all else must follow from the forward signature and needs_grad.
    backward(derive, saved, needs_grad, *gradients): for more than a call of the derivative: gradients of the call's
        tensors, in order, from those of the outputs, at least one. derive(call) takes a record of the derivative;
        gradients with needs_grad.<name> False are dropped.
    reference(call): the outputs in differentiable PyTorch, in place of a derivative, for operators of a backward pass:
        second derivatives. An operator with neither raises if it is differentiated.
    flops(call): floating-point operations of the matrix products, for torch.utils.flop_counter.
    differentiable: the number of leading outputs with a gradient.
    autocast(call, dtype): the call with its tensors cast for autocast to dtype; None: no cast.
    visible: the number of leading outputs that a caller sees; all by default.
    rows: tensors that torch.vmap may fold samples into, as in batching_rule().
    free: int fields, 0 to 2^31 - 1, that no plan depends on.
    """

    def __init__(
        self,
        name: str,
        call: Callable[Fields, tuple],
        returns: str,
        plan: Callable[[Any], Callable[[Any], Any]],
        fake: Callable[[Any], Any],
        *,
        checks: Callable[[Any], None] | None = None,
        prefers: Callable[[Any], str] | None = None,
        native: Callable[[Any, bool], Callable[[Any], Any] | None] | None = None,
        decide: Callable[[Any], str] | None = None,
        varies: Callable[[Any], Callable[..., Any] | None] | None = None,
        save: Callable[[Any, Any], tuple] = lambda call, outputs: call,
        saved: type[tuple] | None = None,
        backward: Callable[..., Any] | None = None,
        derivative: "Operator | None" = None,
        reference: Callable[[Any], Any] | None = None,
        flops: Callable[[Any], int] = lambda call: 0,
        differentiable: int = 1,
        autocast: Callable[[Any, torch.dtype], Any] | None = None,
        rows: Sequence[str] = (),
        visible: int | None = None,
        free: Sequence[str] = (),
    ) -> None:
        self.name, self.count = name, returns.count("Tensor")
        self._kind = kind = cast(Any, call)
        self.record = partial(_new, kind)
        self.layout = layout = layout_of(kind)
        self._plan, self._native, self._prefers, self._checks = plan, native, prefers, checks
        self._decide, self._varies, self.cast, self.visible = decide, varies, autocast, visible
        self._check = None if backward is derivative is None else partial(layout.check, name)
        self.plans = Plans()
        checked, products = self._check is not None, autocast is not None
        self._find = finder(layout, self.plans, free, checked=checked, products=products)
        _every.append(self)

        if backward is None and derivative is not None:
            backward = _of_first_tensors(layout.count, derivative)
        elif backward is None:
            backward, differentiable = by_reference(name, layout, reference), self.count
        self.save, self.saved, self.backward = save, saved or kind, backward
        self.differentiable, self.derivative = differentiable, derivative
        self._register(returns, fake, rows)
        formulas[getattr(_operators, name)] = lambda *args, **_: flops(layout.build(args))
        self.call: Callable[Fields, Any] = self._call(direct(self))

    def _register(self, returns: str, fake: Callable[[Any], Any], rows: Sequence[str]) -> None:
        """Register the computation, the fake, autograd and the vmap rule with the dispatcher."""
        name, layout, qualified = self.name, self.layout, f"{NAMESPACE}::{self.name}"
        _library.define(f"{name}({layout.schema}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
        self.dispatched = getattr(_operators, name).default
        for key in _DEVICES:
            _library.impl(name, self._compute, key)

        def without_numbers(*args: Any) -> Any:
            if self._check is not None:  # one meta tensor among others leads here
                self._check(args)
            return unshared(fake(self.settled(layout.build(args))), args[layout.positions[0]])

        torch.library.register_fake(qualified, without_numbers, lib=_library)
        rule = batching_rule(qualified, self.dispatched, layout, rows, self.visible or self.count)
        torch.library.register_vmap(qualified, rule, lib=_library)
        if not any(field.type == Overwritten for field in layout.fields):
            _library.impl(name, dispatched(self), "Autograd")

    def _compute(self, *args: Any) -> Any:
        """Compute a call that came through the dispatcher."""
        first = args[self.layout.positions[0]]
        elsewhere = first.is_cuda and first.get_device() != torch.cuda.current_device()
        with without_autocast(first.device.type), torch.cuda.device(first.get_device() if elsewhere else -1):
            plan, tensors, key = self._find(args, "dispatched")
            if plan is None:
                self._check_all(args)  # torch.ops checks little
                plan = self._make(self.layout.build(args), tensors, key, direct=False)
            call = self.layout.build(args if plan.route is None else (*args[:-1], plan.route))
            outputs = plan.compute(call)
        return unshared(outputs, first)

    def _make(self, call: Any, tensors: tuple = (), key: tuple | None = None, *, direct: bool) -> Plan:
        """Make a plan, and cache it under the key, if any, for tensors like these."""
        if direct and self._prefers is not None:
            call = self.record((*call[:-1], self._prefers(call)))
        native = self._native(call, True) if key is not None and direct and self._native is not None else None
        first = self.layout.tensors(call)[0]
        plan = Plan(native=native)
        state = None if self._varies is None or native else self._varies(call)
        plan.gpu = first.get_device() if first.is_cuda and torch.cuda.device_count() > 1 else None
        if native is None:
            call = self.settled(call)
            plan.compute, plan.route = self._plan(call), None if self._decide is None else call[-1]
        plan.needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        return self._cached(plan, tensors, key, state)

    def _cached(self, plan: Plan, tensors: tuple, key: tuple | None, state: Callable[..., Any] | None = None) -> Plan:
        """The plan, cached if there is a key, for tensors like these while their state is the same."""
        if key is not None:
            like, now = alike(tensors), None if state is None else state(*tensors)
            plan.matches = like if state is None else lambda *args: like(*args) and state(*args) == now
            self.plans.add(key, plan, MOST_PLANS)
        return plan

    def planned(self, keep: Callable[[Callable[[Any], Any]], None]) -> Callable[[Any], Any]:
        """Return a function that plans and computes a first call; keep() receives what computes further ones like it.

        Nothing is checked. The caller disables autograd and autocast and makes the tensors' GPU current.
        """

        def first(call: Any) -> Any:
            compute = self._plan(call)
            keep(compute)
            return compute(call)

        return first

    def _call(self, differentiate: Callable[..., Any]) -> Any:
        """Return the operator's call, as a closure: it costs half as much as a method that reads self."""
        record, seen, find, first, layout = self.record, self._seen, self._find, self._first, self.layout
        fields_of = layout.flat if layout.nested else None
        tensors_of, visible = layout.tensors, self.visible

        def call_directly(*fields: Any) -> Any:
            if (
                _profiler._is_profiler_enabled or forward_ad._current_level >= 0
                or (modes() and not see_through())
            ):  # fmt: skip  # looked_at(), less what find() compares
                return seen(flat(fields))
            plan, tensors, key = find(fields if fields_of is None else fields_of(record(fields)))
            if plan is None or (plan.gpu is not None and plan.gpu != _current_gpu()):
                plan = first(fields, tensors, key)
            if plan.native is not None:
                return plan.native(record(fields))
            call = record(fields if plan.route is None else (*fields[:-1], plan.route))
            if plan.needs_grad:
                return differentiate(plan, call, *tensors_of(call))
            outputs = plan.compute(call)
            return outputs if visible is None else outputs[:visible]

        call_directly._torchdynamo_inline = lambda *fields: seen(flat(fields))  # type: ignore[attr-defined]
        return call_directly

    def _first(self, fields: tuple, tensors: tuple, key: tuple | None) -> Plan:
        """Plan a direct call that has no plan, or whose GPU is not the current one. Raises for wrong arguments.

        If the dispatcher must see the call, or no plan may serve it, the plan calls the dispatcher and is not cached.
        """
        by_dispatcher = Plan(native=lambda call: self._seen(flat(call)))
        if looked_at():
            return by_dispatcher
        if any_autocast():
            cast_here = key is not None and casts(tensors[0])  # else alike() does not tell autocast apart
            return self._cached(Plan(native=self._under_autocast), tensors, key if cast_here else None)
        if key is None or any(x.is_neg() for x in tensors):
            return by_dispatcher
        values = flat(fields)
        self._check_all(values)
        first, device = tensors[0], tensors[0].device
        here = first.is_cpu or (first.is_cuda and first.get_device() == _current_gpu())
        if not here or any(x.device != device for x in tensors):
            return by_dispatcher  # it makes the tensors' GPU current
        return self._make(self.layout.build(values), tensors, key, direct=True)

    def _under_autocast(self, call: Any) -> Any:
        """Cast the call as autocast would, and compute it with autocast off."""
        enabled = [device for device in _AUTOCAST_DEVICES if _autocast_enabled(device)]
        call = self._lowered(call)
        for device in enabled:  # without_autocast() would cost a dozen calls more
            _set_autocast(device, False)
        try:
            return self._seen(flat(call)) if any_autocast() else self.call(*call)  # type: ignore[call-arg]
        finally:
            for device in enabled:
                _set_autocast(device, True)

    def _lowered(self, call: Any) -> Any:
        """The call with its tensors cast, if autocast is on for the device of the first one."""
        first = self.layout.tensors(call)[0]
        if self.cast is None or not casts(first):
            return call
        return self.cast(call, torch.get_autocast_dtype(first.device.type))

    def _check_all(self, values: tuple) -> None:
        if self._checks is not None:
            self._checks(self._kind(*values))
        if self._check is not None and not compiling():
            self._check(values)

    def _seen(self, args: tuple) -> Any:
        """Make the call through the dispatcher. Raises, in one line, for arguments that it would not take."""
        self._check_all(args)
        if self._prefers is not None and (compiling() or not _decomposed.get()):
            args = (*args[:-1], self._prefers(self._kind(*args)))
        if self._native is not None and (native := self._native(self._kind(*args), False)) is not None:
            return native(self._kind(*args))
        if self.cast is not None and any_autocast() and not self.layout.nested:
            args = tuple(self._lowered(self._kind(*args)))
        if not compiling() and _decomposed.get():
            outputs = self._compute(*args[:-1], "torch" if isinstance(args[-1], str) else args[-1])
        else:
            outputs = self.dispatched(*args)
        return outputs if self.visible is None else outputs[: self.visible]

    def settled(self, call: Any) -> Any:
        """The call with its route resolved."""
        return call if self._decide is None else self.record((*call[:-1], self._decide(call)))


def _of_first_tensors(tensors: int, derivative: Operator) -> Callable[..., Any]:
    """Return the backward of an operator whose derivative computes the gradients of its first tensors."""
    record, gradients = derivative.record, derivative.count
    rest = (None,) * (tensors - gradients)

    def backward(derive: Callable[..., Any], saved: Any, needs_grad: Any, grad: Tensor, *_: Any) -> Any:
        results = derive(record((grad, saved)))
        return (results, *rest) if gradients == 1 else (*results, *rest)

    return backward


class Inner:
    """An operator inside a larger autograd node, which keeps the saved record itself; calls of one signature only.

    Planned for the grad mode in which it was created, as a node's forward pass runs without. The caller guarantees one
    signature and one layout of gradients, disables autograd and autocast, and makes the tensors' GPU current.
    """

    __slots__ = ("_derive", "_grad_mode", "_operator", "_plan")

    def __init__(self, operator: Operator) -> None:
        self._operator, self._plan, self._grad_mode = operator, cast(Any, None), torch.is_grad_enabled()
        self._derive: Any = operator.derivative and operator.derivative.planned(partial(setattr, self, "_derive"))

    def __call__(self, *fields: Any) -> tuple[Any, Any]:
        """Return all outputs of the operator, and its saved record. The first call raises for wrong arguments."""
        plan, operator = self._plan, self._operator
        if plan is None:
            operator._check_all(flat(fields))
            with torch.set_grad_enabled(self._grad_mode):
                plan = self._plan = operator._make(operator.record(fields), direct=True)
        call = operator.record(fields if plan.route is None else (*fields[:-1], plan.route))
        outputs = plan.compute(call)
        return outputs, _new(operator.saved, operator.save(call, outputs))

    def backward(self, *fields: Any) -> Any:
        """Call the operator's derivative with these fields: gradients, then the saved record."""
        return self._derive(self._operator.derivative.record(fields))  # type: ignore[union-attr]


_every: list[Operator] = []
other_plans: list[Any] = []
"""Further caches of plans, which forget_plans() clears."""


def forget_plans() -> None:
    """Drop all plans, after a change that no signature shows, such as a threshold in a test."""
    for cache in (*(operator.plans for operator in _every), *other_plans):
        cache.clear()


_decomposed = contextvars.ContextVar("decomposed", default=False)


@contextlib.contextmanager
def decomposed() -> Iterator[None]:
    """Have torch.export (strict=False) trace operators as PyTorch's own, on the torch route."""
    token = _decomposed.set(True)
    try:
        yield
    finally:
        _decomposed.reset(token)


def casts(x: Tensor) -> bool:
    """Return whether autocast is on for x's device, and so casts all operands to one dtype."""
    if not (any_autocast() and isinstance(x, Tensor)):
        return False
    return (device := x.device.type) in _AUTOCAST_DEVICES and _autocast_enabled(device)


def lowered(*names: str) -> Callable[[Any, torch.dtype], Any]:
    """Return an autocast rule that casts these tensors like operands of a matrix product: all floats but float64."""

    def cast(call: Any, dtype: torch.dtype) -> Any:
        tensors = [(name, x) for name in names if (x := getattr(call, name)) is not None and x.dtype is not dtype]
        floats = [(name, x) for name, x in tensors if x.is_floating_point() and x.dtype != torch.float64]
        return call._replace(**{name: x.to(dtype) for name, x in floats})

    return cast
