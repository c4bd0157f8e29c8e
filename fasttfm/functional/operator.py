"""Registration of torch operators: schema, computation, fake, autograd and autocast in one place.

Each kernel family defines one operator for its forward and one for its backward pass. What a call is given is a
NamedTuple, from whose fields the schema is made; records may hold others, such as the options of attention, whose
fields then stand in the schema in their place.

Host time decides how it is done: a training step makes hundreds of calls, and torch.library.custom_op costs several
times more per call than the low-level registration here. An eager call on plain tensors does not even need the
dispatcher, which would run the same Python functions after its detours; a call goes to them directly then, and through
torch.ops.fasttfm whenever anything looks on: torch.compile, fake tensors, tensor subclasses, dispatch modes,
torch.func, the profiler.

Where torch has a public name it is used. Private ones stay for two things that no public name does. Whether anything
looks on cannot be asked otherwise. And what torch.library.register_autograd registers is refused by torch.func.grad and
lets torch.func.jvp give zeros, so the autograd kernel is registered by hand.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, cast

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fasttfm.functional.batching import batching_rule
from fasttfm.functional.derivative import Gradients, Rule, by_reference
from fasttfm.functional.flops import count_operators, formulas
from fasttfm.functional.namespace import NAMESPACE
from fasttfm.functional.record import MASK, REAL, WHOLE, Layout, Mask, Overwritten, Size, Whole, flat, layout_of
from fasttfm.functional.subclasses import PLAIN_TENSORS

__all__ = [
    "MASK", "REAL", "WHOLE", "Gradients", "Mask", "Operator", "Overwritten", "Size", "Whole", "casts",
    "lowered", "transformed"
]  # fmt: skip

_library = torch.library.Library(NAMESPACE, "DEF")
MARK = "import_fasttfm_functional_before_torch_export_load"
"""An operator that does nothing: a file of torch.export that needs the others begins with it, because a process that
has not imported them is told this name."""
_library.define(f"{MARK}() -> ()")
_library.impl(MARK, lambda: None, "CompositeExplicitAutograd")
_DEVICES = ("CPU", "CUDA", "XPU", "MPS")
_AUTOCAST_DEVICES = ("cpu", "cuda")

_below_autograd = torch._C._AutoDispatchBelowAutograd
_without_keys = torch._C._ExcludeDispatchKeyGuard
_after_autograd = torch._C._after_autograd_keyset
_autocast_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)

# Looked up once: each is asked in every call.
_has_storage = torch._C._has_storage
_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
transformed = torch._C._are_functorch_transforms_active
_any_autocast = torch._C._is_any_autocast_enabled  # takes no argument: half the price of asking for a device
_autocast_enabled = torch.is_autocast_enabled
_autocast_dtype = torch.get_autocast_dtype
_set_autocast = torch.set_autocast_enabled
_current_gpu = torch.cuda.current_device
_grad_enabled = torch.is_grad_enabled
_new: Any = tuple.__new__  # a NamedTuple's own is three times as slow, and Python

Fields = ParamSpec("Fields")


class Operator(Generic[Fields]):
    """One torch operator, torch.ops.fasttfm.<name>; `call` takes the fields of its call, a NamedTuple.

    compute(call): the outputs; autograd and autocast are off while it runs.
    fake(call): empty outputs of the right shapes, dtypes and strides.
    decide(call): what call.route, which must be the last field, becomes before anything else sees it; asked again of
        its own answer it must give the same. So what computes, and what is saved for the backward pass, is one route.
    save(call, outputs) and backward(saved, wanted, *gradients): the derivative. save returns a NamedTuple of tensors
        and anything else, or where saved names its kind a plain tuple of its fields, which is quicker made; without it
        that is the call, then its outputs. backward gets the NamedTuple, with the tensors of a call that want a
        gradient as wanted.<name>, and the gradients of the outputs, one at least.
    reference(call): the outputs in operations that PyTorch differentiates, in place of backward: for what a backward
        pass calls, whose derivative is a second one. With neither a derivative ends in a clear message.
    flops(call): floating-point operations of the products, for torch.utils.flop_counter.
    differentiable: how many outputs have a gradient, the first ones.
    autocast(call, dtype): the call as autocast to dtype would pass it on; None leaves it as it is.
    again(call, outputs): a tensor to return once more, behind the others, or None. The gradients of its two uses then
        come to backward separately and need no launch of their own to be added. The two share memory, which the
        dispatcher does not allow: only a direct call that makes a gradient has the additional output.
    internal: how many outputs, the last ones, no caller sees; these alone may be views.
    rows: the tensors that torch.vmap may fold its samples into, as batching_rule() takes them.
    """

    def __init__(
        self,
        name: str,
        call: Callable[Fields, tuple],
        returns: str,
        compute: Callable[[Any], Any],
        fake: Callable[[Any], Any],
        *,
        decide: Callable[[Any], str] | None = None,
        save: Callable[[Any, Any], Any] = lambda call, outputs: (call, *outputs),
        saved: type[tuple] | None = None,
        backward: Callable[..., Gradients] | None = None,
        reference: Callable[[Any], Any] | None = None,
        flops: Callable[[Any], int] = lambda call: 0,
        differentiable: int = 1,
        autocast: Callable[[Any, torch.dtype], Any] | None = None,
        again: Callable[[Any, Any], Tensor | None] | None = None,
        rows: Sequence[str] = (),
        internal: int = 0,
    ) -> None:
        self.name = name
        self._kind = kind = cast(Any, call)
        layout = layout_of(call)
        _library.define(f"{name}({layout.schema}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
        self.dispatched = dispatched = getattr(getattr(torch.ops, NAMESPACE), name).default
        self._decide, self._cast = decide, autocast
        self._check = None if backward is None else functools.partial(layout.check, name)

        def run(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
            with _below_autograd():
                if not transformed():
                    return dispatched.redispatch(keys & _after_autograd, *args)
                with torch.enable_grad():  # a Function turns it off, also for the outer levels of torch.func
                    return dispatched.redispatch(keys & _after_autograd, *args)

        def settled(args: tuple) -> Any:
            return self._settled(layout.build(args))

        if backward is None:
            backward, differentiable = by_reference(name, layout, reference), returns.count("Tensor")
            save, saved = (lambda call, outputs: call), kind
        formulas[dispatched._overloadpacket] = lambda *args, **_: flops(layout.build(args))
        compute = _without_views(compute, internal)
        rule = Rule(name, layout, save, saved, backward, differentiable)
        direct: Any = backward  # which refuses whoever calls, where nothing comes out that could have a gradient
        differentiate: Any = backward
        if returns != "()":
            direct, differentiate = rule.direct(compute, again), rule.dispatched(run)
        self.call: Callable[Fields, Any] = self._call(layout, compute, direct)
        if self._check is None and decide is None and layout.fields[0].path == layout.fields[0].name:
            self.call = self._backward_call(layout, compute, self.call)

        autograd = self._autograd(layout, run, differentiate)
        self._register(layout, autograd, lambda args: compute(settled(args)))

        def without_numbers(*args: Any) -> Any:
            if self._check is not None:  # a meta tensor among others leads here, whoever calls
                self._check(args)
            return _unshared(fake(settled(args)))

        qualified = f"{NAMESPACE}::{name}"
        torch.library.register_fake(qualified, without_numbers, lib=_library)
        batched = batching_rule(dispatched, layout, rows, lambda *args: fake(settled(args)))
        torch.library.register_vmap(qualified, batched, lib=_library)

    def check(self, call: Any) -> None:
        """Raise, as a call of the operator does, for the first field that is not as its type says: for what is computed
        without it. Not while torch.compile traces."""
        if self._check is not None and not _compiling():
            self._check(flat(call))

    def _autograd(self, layout: Layout, run: Callable[..., Any], differentiate: Callable[..., Any]) -> Any:
        """The function that the dispatcher runs above those of the devices: it records a gradient."""

        def autograd(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
            tensors = [a for a in args if isinstance(a, Tensor)]
            if _grad_enabled() and any(t.requires_grad for t in tensors):
                if self._decide is not None:
                    args = flat(self._settled(layout.build(args)))
                if not transformed():
                    return differentiate(keys, *args)
                with enable_single_level_autograd_function():  # one level of torch.func: this kernel is called for each
                    return differentiate(keys, *args)
            if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
                raise RuntimeError(
                    f"{NAMESPACE}::{self.name} has no forward-mode derivative: use fasttfm.reference for it, or "
                    "reverse mode"
                )
            return run(keys, *args)

        return autograd

    def _register(self, layout: Layout, autograd: Any, compute: Callable[[tuple], Any]) -> None:
        """Tells the dispatcher what runs by device, under autocast and with a gradient."""
        dispatched, self._settle_and_compute = self.dispatched, compute

        def cast_and_run(device: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                if self._cast is not None:
                    args = flat(self._cast(layout.build(args), torch.get_autocast_dtype(device)))
                with _without_keys(_autocast_keys):
                    return dispatched(*args)

            return call

        for key in _DEVICES:
            _library.impl(self.name, _on_its_device(compute), key)
        for device in _AUTOCAST_DEVICES:
            _library.impl(self.name, cast_and_run(device), f"Autocast{device.upper()}")
        _library.impl(self.name, autograd, "Autograd", with_keyset=True)

    def _call(self, layout: Layout, compute: Callable[[Any], Any], differentiate: Callable[..., Any]) -> Any:
        """The call of this operator; a closure, which costs half of what a method that asks self would."""
        kind, seen, checked = self._kind, self._seen, self._check is not None
        decide, cast = self._decide, self._cast
        fields_of = layout.flat if layout.nested else None
        tensors_of = layout.tensors
        known: dict[tuple[type, ...], list[tuple[int, frozenset]]] = {}
        """By the types of the fields, where the tensors are and which dtypes they may have."""

        def call_directly(*fields: Any) -> Any:
            if (
                _compiling() or transformed() or _profiler._is_profiler_enabled or forward_ad._current_level >= 0
                or (_dispatch_modes() and not _all_see_through())
            ):  # fmt: skip
                return seen(flat(fields))
            call = _new(kind, fields)
            values = fields if fields_of is None else fields_of(call)
            types = tuple(map(type, values))
            tensors = known.get(types)
            if tensors is None:
                tensors = layout.present_tensors(types, checked=checked)
                if tensors is None:
                    return seen(values)
                known[types] = tensors
            gradient = False
            if values[0].is_cpu:
                device = "cpu"
                for place, dtypes in tensors:
                    x = values[place]
                    if x.dtype not in dtypes or not x.is_cpu or x.is_neg():
                        return seen(values)
                    if x.requires_grad:
                        gradient = True
            else:
                device, gpu = "cuda", _current_gpu() if values[0].is_cuda else None
                for place, dtypes in tensors:
                    x = values[place]
                    if x.dtype not in dtypes or x.get_device() != gpu or x.is_neg():
                        return seen(values)  # a meta tensor, another GPU than the current one, another kind of device
                    if x.requires_grad:
                        gradient = True
            if not checked:
                for place, _ in tensors:
                    if not _has_storage(values[place]):
                        return seen(values)  # is_grads_batched=True: no memory, for all gradients at once
            autocast = _any_autocast() and _autocast_enabled(device)
            if autocast:
                if cast is not None:
                    call = cast(call, _autocast_dtype(device))
                _set_autocast(device, False)
            try:
                if decide is not None:
                    route = decide(call)
                    if route != call[-1]:
                        call = _new(kind, (*call[:-1], route))
                return differentiate(call, *tensors_of(call)) if gradient and _grad_enabled() else compute(call)
            finally:
                if autocast:
                    _set_autocast(device, True)

        return call_directly

    def _backward_call(self, layout: Layout, compute: Callable[[Any], Any], general: Callable[..., Any]) -> Any:
        """The call of a backward operator as autograd makes it on a CPU; general() where anything differs.

        It has many fields, most of which a forward call has looked at. What is looked at again comes from memory that
        caches have lost meanwhile, and so only tensors are.
        """
        kind, tensors_of = self._kind, layout.tensors

        def differentiate_directly(*fields: Any) -> Any:
            if (
                not fields[0].is_cpu or _grad_enabled() or _any_autocast() or _compiling() or transformed()
                or _profiler._is_profiler_enabled or forward_ad._current_level >= 0 or _dispatch_modes()
            ):  # fmt: skip
                return general(*fields)
            call = _new(kind, fields)
            for x in tensors_of(call):
                if x is not None and not (type(x) in PLAIN_TENSORS and x.is_cpu and not x.is_neg() and _has_storage(x)):
                    return general(*fields)
            return compute(call)

        return differentiate_directly

    def _seen(self, args: tuple) -> Any:
        """The call by way of the dispatcher, or, of arguments that it would not take, an error in one line."""
        if not _compiling():
            if self._check is not None:
                self._check(args)
            if _decomposed.get():
                return self._settle_and_compute((*args[:-1], "torch") if isinstance(args[-1], str) else args)
        return self.dispatched(*args)

    def _settled(self, call: Any) -> Any:
        """The call with the route that it takes."""
        if self._decide is None:
            return call
        route = self._decide(call)
        return call if route == call[-1] else _new(self._kind, (*call[:-1], route))

    def __call__(self, *fields: Fields.args, **named: Fields.kwargs) -> Any:
        """The same as call(), an attribute later."""
        return self.call(*fields, **named)


_decomposed = contextvars.ContextVar("decomposed", default=False)


@contextlib.contextmanager
def decomposed() -> Iterator[None]:
    """Inside, torch.export (strict=False) traces operators as what PyTorch's own compute, on the torch route."""
    token = _decomposed.set(True)
    try:
        yield
    finally:
        _decomposed.reset(token)


def _all_see_through() -> bool:
    """Return whether all dispatch modes that are on, such as a count of launches, want calls as they are."""
    modes = _get_current_dispatch_mode_stack()
    count_operators(modes)
    return all(getattr(mode, "sees_through_operators", False) for mode in modes)


def _on_its_device(compute: Callable[[tuple], Any]) -> Callable[..., Any]:
    """compute for the dispatcher: no outputs that share memory, and the first argument's GPU as the current one, where
    Triton launches."""

    def run(*args: Any) -> Any:
        first = args[0]
        if not first.is_cuda or first.get_device() == _current_gpu():
            return _unshared(compute(args))
        with torch.cuda.device(first.device):
            return _unshared(compute(args))

    return run


def _without_views(compute: Callable[[Any], Any], internal: int) -> Callable[[Any], Any]:
    """compute, with outputs that are not views, the last ones apart: what a Function gives as a view must not be
    changed in place."""

    def run(call: Any) -> Any:
        outputs = compute(call)
        if type(outputs) is tuple:
            for place in range(len(outputs) - internal):
                if outputs[place]._is_view():
                    outputs = (*outputs[:place], outputs[place].detach(), *outputs[place + 1 :])
            return outputs
        return outputs.detach() if outputs is not None and outputs._is_view() else outputs

    return run


def _unshared(outputs: Any) -> Any:
    """Outputs, each in memory of its own: the dispatcher allows nothing else, a direct call spares the copy."""
    if not isinstance(outputs, tuple):
        return outputs
    seen: set[int] = set()
    copies = []
    for output in outputs:
        memory = output.untyped_storage()._cdata  # also of what is empty and has no address
        copies.append(output.clone() if memory in seen else output)
        seen.add(memory)
    return tuple(copies)


def casts(x: Tensor) -> bool:
    """Return whether autocast is on for x's device, and will bring all operands to one dtype."""
    return _any_autocast() and (device := x.device.type) in _AUTOCAST_DEVICES and _autocast_enabled(device)


def lowered(*names: str) -> Callable[[Any, torch.dtype], Any]:
    """An operator's autocast, which casts these tensors as what enters a matrix product: all floats but float64."""

    def cast(call: Any, dtype: torch.dtype) -> Any:
        given = [(name, x) for name in names if (x := getattr(call, name)) is not None and x.dtype is not dtype]
        floats = [(name, x) for name, x in given if x.is_floating_point() and x.dtype != torch.float64]
        return call._replace(**{name: x.to(dtype) for name, x in floats})

    return cast
