"""Registration of torch operators: schema, computation, fake, autograd and autocast in one place.

Each kernel family defines one operator for its forward and one for its backward pass. What a call is given is a
NamedTuple, from whose fields the schema is made; records may hold others, such as the options of attention, whose
fields then stand in the schema in their place.

Host time decides how it is called: a training step makes hundreds of calls. An eager call on plain tensors does not
need the dispatcher, which would run the same Python functions after its detours; it goes to them directly, by way of a
plan, and through torch.ops.fasttfm whenever anything looks on: torch.compile, fake tensors, tensor subclasses, dispatch
modes, the profiler. torch.func has a torch.autograd.Function around torch.ops, because it refuses what
torch.library.register_autograd() registers.

Registration takes torch's public names; onlookers.py asks private ones for what no public name tells.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler

from fasttfm.functional.batching import batching_rule
from fasttfm.functional.derivative import Gradients, by_reference, direct, traced, transformable
from fasttfm.functional.namespace import NAMESPACE
from fasttfm.functional.onlookers import any_autocast, compiling, formulas, looked_at, modes, see_through, transformed
from fasttfm.functional.plan import (
    MOST_PLANS,
    Plan,
    Plans,
    empties,
    finder,
    holds,
    unshared,
    without_autocast,
    without_views,
)
from fasttfm.functional.record import MASK, REAL, WHOLE, Mask, Overwritten, Size, Whole, flat, layout_of

__all__ = [
    "MASK", "REAL", "WHOLE", "Gradients", "Inner", "Mask", "Operator", "Overwritten", "Size", "Whole", "casts",
    "empties", "forget_plans", "lowered", "on_forget", "transformed", "without_views"
]  # fmt: skip

_library, _operators = torch.library.Library(NAMESPACE, "DEF"), getattr(torch.ops, NAMESPACE)
MARK = "import_fasttfm_functional_before_torch_export_load"
"""An operator that does nothing: a file of torch.export that needs the others begins with it, because a process that
has not imported them is told this name."""
_library.define(f"{MARK}() -> ()")
_library.impl(MARK, lambda: None, "CompositeExplicitAutograd")
_DEVICES = ("CPU", "CUDA", "XPU", "MPS")
_AUTOCAST_DEVICES = ("cpu", "cuda")

# Looked up once: each is asked in every call.
_autocast_enabled = torch.is_autocast_enabled
_set_autocast = torch.set_autocast_enabled
_current_gpu = torch.cuda.current_device
_new: Any = tuple.__new__  # a NamedTuple's own is three times as slow, and Python

Fields = ParamSpec("Fields")


class Operator(Generic[Fields]):
    """One torch operator, torch.ops.fasttfm.<name>; `call` takes the fields of its call, a NamedTuple.

    plan(call): a function from calls of call's signature to the outputs: whatever depends on the signature is decided
        when it is made. Autograd and autocast are off while it runs. Its outputs are no views, internal ones apart; one
        that is None is (0,) to the dispatcher, of the first tensor's dtype.
    fake(call): empty outputs of the right shapes, dtypes and strides, None as from plan.
    checks(call): raises for arguments that do not agree; asked when a signature is new.
    prefers(call): the route that a call asks decide() for, of what the caller named; not asked by the dispatcher.
    native(call, direct): a function of such calls to the outputs by operators that PyTorch differentiates, where they
        are the only way, or, of direct calls, the faster one; else None.
    decide(call): what call.route, which must be the last field, becomes before anything else sees it; asked again of
        its own answer it must give the same. So what computes, and what is saved for the backward pass, is one route.
    varies(call): where a plan depends on more than the signature, a function of the tensors that are there: the plan
        holds while its value stays.
    save(call, outputs): a tuple of the fields of saved, a NamedTuple of tensors and anything else, for the backward
        pass; without it the call itself.
    derivative: the operator of the backward pass, which takes the gradients of the differentiable outputs and what is
        saved, and returns those of the call's first tensors, None for one that is not there. Where nothing looks on,
        that is a plan that the forward pass's plan leads to, by which gradients of outputs there are and their
        layouts. All else must follow from the signature of the forward call and from which gradients are wanted.
    backward(derive, saved, wanted, *gradients): where that is not all: the gradients of the call's tensors, in their
        order, from those of the outputs, one at least; derive(*fields) calls the derivative, wanted.<name> tells which
        tensors want one, of others they are left out.
    reference(call): the outputs in operations that PyTorch differentiates, in place of a derivative: for what a
        backward pass calls, whose derivative is a second one. With neither a derivative ends in a clear message.
    flops(call): floating-point operations of the products, for torch.utils.flop_counter.
    differentiable: how many outputs have a gradient, the first ones.
    autocast(call, dtype): the call as autocast to dtype would pass it on; None leaves it as it is.
    visible: how many outputs a caller sees, the first ones; all unless given.
    rows: the tensors that torch.vmap may fold its samples into, as batching_rule() takes them.
    free: fields of ints from 0 to 2^31 - 1 that no plan depends on.
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
        self.layout = layout = layout_of(kind)
        self._plan, self._native, self._prefers, self._checks = plan, native, prefers, checks
        self._decide, self._varies, self.cast, self.visible = decide, varies, autocast, visible
        self._check = None if backward is derivative is None else functools.partial(layout.check, name)
        self.plans = Plans()
        checked, products = self._check is not None, autocast is not None
        self._find = finder(layout, self.plans, free, checked=checked, products=products)
        _every.append(self)

        if backward is None and derivative is not None:
            backward = _of_first_tensors(layout.count, derivative.count)
        elif backward is None:
            backward, differentiable = by_reference(name, layout, reference), self.count
        self.save, self.saved, self.backward = save, saved or kind, backward
        self.differentiable, self.derivative = differentiable, derivative
        self._register(returns, fake, rows)
        formulas[getattr(_operators, name)] = lambda *args, **_: flops(layout.build(args))
        self.call: Callable[Fields, Any] = self._call(direct(self))

    def _register(self, returns: str, fake: Callable[[Any], Any], rows: Sequence[str]) -> None:
        """Tells the dispatcher what computes, what has no numbers, and what differentiates and maps over samples."""
        name, layout, qualified = self.name, self.layout, f"{NAMESPACE}::{self.name}"
        _library.define(f"{name}({layout.schema}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
        self.dispatched = self._transformed = getattr(_operators, name).default
        for key in _DEVICES:
            _library.impl(name, self._compute, key)

        def without_numbers(*args: Any) -> Any:
            if self._check is not None:  # a meta tensor among others leads here, whoever calls
                self._check(args)
            return unshared(fake(self.settled(layout.build(args))), args[layout.positions[0]])

        def once_more(*args: Any) -> Any:
            return (self._transformed if transformed() else self.dispatched)(*args)

        torch.library.register_fake(qualified, without_numbers, lib=_library)
        rule = batching_rule(qualified, once_more, layout, rows)
        torch.library.register_vmap(qualified, rule, lib=_library)
        if not any(field.type == Overwritten for field in layout.fields):
            setup, backward = traced(self)
            torch.library.register_autograd(qualified, backward, setup_context=setup, lib=_library)
            self._transformed = transformable(name, self.dispatched, setup, backward, rule)

    def _compute(self, *args: Any) -> Any:
        """The outputs of a call that came by the dispatcher."""
        first = args[self.layout.positions[0]]
        elsewhere = first.is_cuda and first.get_device() != torch.cuda.current_device()
        with without_autocast(first.device.type), torch.cuda.device(first.get_device() if elsewhere else -1):
            found, tensors, key = self._find(args, "dispatched")
            if found is None:
                self._check_all(args)  # torch.ops takes what it is given
                found = self._make(self.layout.build(args), tensors, key, direct=False)
            call = self.layout.build(args if found.route is None else (*args[:-1], found.route))
            outputs = found.compute(call)
        return unshared(outputs, first)

    def _make(self, call: Any, tensors: tuple = (), key: tuple | None = None, *, direct: bool) -> Plan:
        """A new plan, which is kept under this key, if any, for calls of tensors like these."""
        if direct and self._prefers is not None:
            call = _new(self._kind, (*call[:-1], self._prefers(call)))
        native = self._native(call, True) if key is not None and direct and self._native is not None else None
        first = self.layout.tensors(call)[0]
        made = Plan(native=native)
        state = None if self._varies is None or native else self._varies(call)
        made.gpu = first.get_device() if first.is_cuda and torch.cuda.device_count() > 1 else None
        if native is None:
            call = self.settled(call)
            made.compute, made.route = self._plan(call), None if self._decide is None else call[-1]
        made.wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        return self._kept(made, tensors, key, state)

    def _kept(self, made: Plan, tensors: tuple, key: tuple | None, state: Callable[..., Any] | None = None) -> Plan:
        """The plan, kept for calls of tensors like these while their state is the same, if it has a key."""
        if key is not None:
            made.matches = holds(tensors, state)
            self.plans.add(key, made, MOST_PLANS)
        return made

    def planned(self) -> Callable[..., Any]:
        """A function of the fields of calls of one signature, planned at the first one, of which nothing is checked:
        who calls sees to it that autograd and autocast are off and that the tensors' GPU is the current one."""
        kind, compute = self._kind, None

        def run(*fields: Any) -> Any:
            nonlocal compute
            call = _new(kind, fields)
            if compute is None:
                compute = self._plan(call)
            return compute(call)

        return run

    def check(self, call: Any) -> None:
        """Raise, as a call of the operator does, for the first field that is not as its type says: for what is computed
        without it. Not while torch.compile traces."""
        if self._check is not None and not compiling():
            self._check(flat(call))

    def _call(self, differentiate: Callable[..., Any]) -> Any:
        """The call of this operator; a closure, which costs half of what a method that asks self would."""
        kind, seen, find, first, layout = self._kind, self._seen, self._find, self._first, self.layout
        fields_of = layout.flat if layout.nested else None
        tensors_of, visible = layout.tensors, self.visible

        def call_directly(*fields: Any) -> Any:
            if (
                _profiler._is_profiler_enabled or forward_ad._current_level >= 0
                or (modes() and not see_through())
            ):  # fmt: skip  # what find() does not see
                return seen(flat(fields))
            plan, tensors, key = find(fields if fields_of is None else fields_of(_new(kind, fields)))
            if plan is None or (plan.gpu is not None and plan.gpu != _current_gpu()):
                plan = first(fields, tensors, key)
            if plan.native is not None:
                return plan.native(_new(kind, fields))
            call = _new(kind, fields if plan.route is None else (*fields[:-1], plan.route))
            if plan.wanted:
                return differentiate(plan, call, *tensors_of(call))
            outputs = plan.compute(call)
            return outputs if visible is None else outputs[:visible]

        call_directly._torchdynamo_inline = lambda *fields: seen(flat(fields))  # type: ignore[attr-defined]
        return call_directly

    def _first(self, fields: tuple, tensors: tuple, key: tuple | None) -> Plan:
        """The plan of a direct call that has none, or whose GPU is not the current one: a new one, or, kept nowhere,
        one that goes by the dispatcher: something looks on, or no plan may hold what is given. Raises for wrong
        arguments."""
        by_dispatcher = Plan(native=lambda call: self._seen(flat(call)))
        if looked_at():
            return by_dispatcher
        if any_autocast():
            of_device = key is not None and casts(tensors[0])  # else tensors are alike without autocast too
            return self._kept(Plan(native=self._under_autocast), tensors, key if of_device else None)
        if key is None or any(x.is_neg() for x in tensors):
            return by_dispatcher
        values = flat(fields)
        self._check_all(values)
        first, device = tensors[0], tensors[0].device
        here = first.is_cpu or (first.is_cuda and first.get_device() == _current_gpu())
        if not here or any(x.device != device for x in tensors):
            return by_dispatcher  # which makes the tensors' GPU current
        return self._make(self.layout.build(values), tensors, key, direct=True)

    def _under_autocast(self, call: Any) -> Any:
        """The outputs of the call with what autocast makes of its tensors, without autocast."""
        enabled = [device for device in _AUTOCAST_DEVICES if _autocast_enabled(device)]
        call = self._lowered(call)
        for device in enabled:  # without_autocast() costs a dozen calls more
            _set_autocast(device, False)
        try:
            return self._seen(flat(call)) if any_autocast() else self.call(*call)  # type: ignore[call-arg]
        finally:
            for device in enabled:
                _set_autocast(device, True)

    def _lowered(self, call: Any) -> Any:
        """The call as autocast passes it on, where that is on for the device of its first tensor."""
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
        """The call by way of the dispatcher, or, of arguments that it would not take, an error in one line."""
        self._check_all(args)
        if self._prefers is not None and (compiling() or not _decomposed.get()):
            args = (*args[:-1], self._prefers(self._kind(*args)))
        if self._native is not None and (native := self._native(self._kind(*args), False)) is not None:
            return native(self._kind(*args))
        if self.cast is not None and any_autocast() and not self.layout.nested:
            args = tuple(self._lowered(self._kind(*args)))
        if not compiling() and _decomposed.get():
            outputs = self._compute(*args[:-1], "torch" if isinstance(args[-1], str) else args[-1])
        elif transformed() or (not compiling() and forward_ad._current_level >= 0):
            if compiling():
                from fasttfm.functional import in_graph  # noqa: F401
            outputs = self._transformed(*args)
        else:
            outputs = self.dispatched(*args)
        return outputs if self.visible is None else outputs[: self.visible]

    def settled(self, call: Any) -> Any:
        """The call with the route that it takes."""
        return call if self._decide is None else _new(self._kind, (*call[:-1], self._decide(call)))

    def __call__(self, *fields: Fields.args, **named: Fields.kwargs) -> Any:
        """The same as call(), an attribute later."""
        return self.call(*fields, **named)


def _of_first_tensors(count: int, found: int) -> Callable[..., Any]:
    """The backward of an operator of so many tensors, of which the derivative gives the gradients of the first."""
    rest = (None,) * (count - found)

    def backward(derive: Callable[..., Any], saved: Any, wanted: Any, grad: Tensor, *_: Any) -> Any:
        gradients = derive(grad, saved)
        return (gradients, *rest) if found == 1 else (*gradients, *rest)

    return backward


class Inner:
    """An operator's calls of one signature inside a node of autograd that computes more: the node keeps what is saved.

    Who calls sees to it that no call has another signature than the first, nor its gradients other layouts, that
    autograd and autocast are off, and that the GPU of the tensors is the current one.
    """

    __slots__ = ("_kind", "_operator", "_plan", "backward")

    def __init__(self, operator: Operator) -> None:
        self._operator, self._kind = operator, operator._kind
        self._plan: Any = None
        self.backward: Any = operator.derivative and operator.derivative.planned()
        """The outputs of the operator's derivative for a call with these fields: gradients, then what was saved."""

    def __call__(self, *fields: Any) -> tuple[Any, Any]:
        """All outputs of the operator's call with these fields, and the record that it saves for the backward pass.
        Raises for wrong arguments, once."""
        plan, operator = self._plan, self._operator
        if plan is None:
            operator._check_all(flat(fields))
            with torch.enable_grad():
                plan = self._plan = operator._make(_new(self._kind, fields), direct=True)
        call = _new(self._kind, fields if plan.route is None else (*fields[:-1], plan.route))
        outputs = plan.compute(call)
        return outputs, _new(operator.saved, operator.save(call, outputs))


_every: list[Operator] = []
_others: list[Callable[[], None]] = []


def forget_plans() -> None:
    """From now on decide anew: after a change of what no signature tells, such as a threshold in a test."""
    for operator in _every:
        operator.plans.clear()
    for forget in _others:
        forget()


def on_forget(forget: Callable[[], None]) -> None:
    """Have forget_plans() call this too: it clears what was kept of plans elsewhere."""
    _others.append(forget)


_decomposed = contextvars.ContextVar("decomposed", default=False)


@contextlib.contextmanager
def decomposed() -> Iterator[None]:
    """Inside, torch.export (strict=False) traces operators as what PyTorch's own compute, on the torch route."""
    token = _decomposed.set(True)
    try:
        yield
    finally:
        _decomposed.reset(token)


def casts(x: Tensor) -> bool:
    """Return whether autocast is on for x's device, and will bring all operands to one dtype."""
    if not (any_autocast() and isinstance(x, Tensor)):
        return False
    return (device := x.device.type) in _AUTOCAST_DEVICES and _autocast_enabled(device)


def lowered(*names: str) -> Callable[[Any, torch.dtype], Any]:
    """An operator's autocast, which casts these tensors as what enters a matrix product: all floats but float64."""

    def cast(call: Any, dtype: torch.dtype) -> Any:
        given = [(name, x) for name in names if (x := getattr(call, name)) is not None and x.dtype is not dtype]
        floats = [(name, x) for name, x in given if x.is_floating_point() and x.dtype != torch.float64]
        return call._replace(**{name: x.to(dtype) for name, x in floats})

    return cast
