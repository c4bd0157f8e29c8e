"""Registration of torch operators: schema, computation, fake, autograd and autocast in one place.

Each kernel family defines one operator for its forward and one for its backward pass. What a call is given is a
NamedTuple, from whose fields the schema is made; records may hold others, such as the options of attention, whose
fields then stand in the schema in their place.

Host time decides how it is done: a training step makes hundreds of calls, and torch.library.custom_op costs several
times more per call than the low-level registration here. An eager call on plain tensors does not even need the
dispatcher, which would run the same Python functions after its detours; a call goes to them directly then, and through
torch.ops.fasttfm whenever anything looks on: torch.compile, fake tensors, tensor subclasses, dispatch modes,
torch.func, the profiler. The call is Python written out for the fields of the operator (_CALL), as dataclasses write
__init__.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler  # noqa: F401 in _CALL
from torch.nn import Parameter  # noqa: F401 in _CALL
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fasttfm.functional.batching import batching_rule
from fasttfm.functional.namespace import NAMESPACE
from fasttfm.functional.record import MASK, REAL, WHOLE, Layout, Mask, Overwritten, Size, Whole, flat, layout_of

__all__ = [
    "MASK", "REAL", "WHOLE", "Gradients", "Mask", "Operator", "Overwritten", "Size", "Whole", "casts",
    "lower_precision", "transformed"
]  # fmt: skip

_library = torch.library.Library(NAMESPACE, "DEF")
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
_is_view = Tensor._is_view
_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
transformed = torch._C._are_functorch_transforms_active
_any_autocast = torch._C._is_any_autocast_enabled  # takes no argument: half the price of asking for a device
_autocast_enabled = torch.is_autocast_enabled
_autocast_dtype = torch.get_autocast_dtype
_set_autocast = torch.set_autocast_enabled
_current_gpu: Any = getattr(torch._C, "_cuda_getDevice", None)  # what torch.cuda.current_device() ends in
_grad_enabled = torch.is_grad_enabled
_new: Any = tuple.__new__  # a NamedTuple's own is three times as slow, and Python

_CALL = """
def _written(_kind, _compute, _differentiate):
    def __call__(_self, {fields}):
        if (
            _compiling() or transformed() or _profiler._is_profiler_enabled or forward_ad._current_level >= 0
            or (_dispatch_modes() and not _all_see_through())
            or not ({plain})
        ):
            return _self._seen(flat(({fields},)))
        if {on_cpu}:
            _device = "cpu"
        elif {first}.is_cuda and (_device := {first}.get_device()) == _current_gpu() and {on_gpu}:
            _device = "cuda"
        else:  # a meta tensor, another GPU than the current one, another kind of device, or several
            return _self._seen(flat(({fields},)))
        _gradient = ({gradient}) and _grad_enabled()
        _call = _new(_kind, ({fields},))
        if not _any_autocast() or not _autocast_enabled(_device):
            {settle}
            return _differentiate(_call, {tensors}) if _gradient else _compute(_call)
        {cast}
        _set_autocast(_device, False)
        try:
            {settle}
            return _differentiate(_call, {tensors_cast}) if _gradient else _compute(_call)
        finally:
            _set_autocast(_device, True)

    return __call__
"""
"""The call of an operator. In braces stand expressions in its fields, whose names begin with no underscore."""

Fields = ParamSpec("Fields")
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)
Gradients = dict[str, Tensor | None]
"""By the names of the tensors; those that are left out have none."""


class Operator(Generic[Fields]):
    """One torch operator, torch.ops.fasttfm.<name>; call it with the fields of its call, a NamedTuple.

    compute(call): the outputs; autograd and autocast are off while it runs.
    fake(call): empty outputs of the right shapes, dtypes and strides.
    decide(call): what call.route, which must be the last field, becomes before anything else sees it; asked again of
        its own answer it must give the same. So what computes, and what is saved for the backward pass, is one route.
    save(call, outputs) and backward(saved, wanted, *gradients): the derivative. save returns a NamedTuple of tensors
        and anything else, or where saved names its kind a plain tuple of its fields, which is quicker made; without it
        that is the call, then its outputs. backward gets the NamedTuple, with the tensors of a call that want a
        gradient as wanted.<name>, and the gradients of the outputs, one at least. Without backward a derivative ends in
        a clear message: a second one, that is.
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
        differentiable: int = 1,
        autocast: Callable[[Any, torch.dtype], Any] | None = None,
        again: Callable[[Any, Any], Tensor | None] | None = None,
        rows: Sequence[str] = (),
        internal: int = 0,
    ) -> None:
        self.name, self._kind = name, call
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

        compute = _without_views(compute, internal)
        rule = _Rule(name, layout, save, saved, backward, differentiable)
        direct: Any = rule.refuse
        differentiate: Any = rule.refuse
        if returns != "()":
            direct, differentiate = rule.direct(compute, again), rule.dispatched(run)
        # Python looks for __call__ in the class alone
        self.__class__ = type(name, (Operator,), {"__call__": self._written_call(layout, compute, direct)})

        def autograd(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
            tensors = [a for a in args if isinstance(a, Tensor)]
            if _grad_enabled() and any(t.requires_grad for t in tensors):
                args = args if decide is None else flat(settled(args))
                if not transformed():
                    return differentiate(keys, *args)
                with enable_single_level_autograd_function():  # one level of torch.func: this kernel is called for each
                    return differentiate(keys, *args)
            if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
                raise RuntimeError(
                    f"{NAMESPACE}::{name} has no forward-mode derivative: use fasttfm.reference for it, or reverse mode"
                )
            return run(keys, *args)

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

    def _register(self, layout: Layout, autograd: Any, compute: Callable[[tuple], Any]) -> None:
        """Tells the dispatcher what runs by device, under autocast and with a gradient."""
        dispatched = self.dispatched

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

    def _written_call(self, layout: Layout, compute: Callable[[Any], Any], differentiate: Callable[..., Any]) -> Any:
        """_CALL for this operator."""
        source = _CALL.format(
            **layout.in_a_call(self._kind, checked=self._check is not None),
            settle="pass" if self._decide is None else "_call = _self._settled(_call)",
            cast="pass" if self._cast is None else "_call = _self._cast(_call, _autocast_dtype(_device))",
        )
        names: dict[str, Any] = {}
        exec(source, globals(), names)
        return names["_written"](self._kind, compute, differentiate)

    def _seen(self, args: tuple) -> Any:
        """The call by way of the dispatcher, or, of arguments that it would not take, an error in one line."""
        if self._check is not None and not _compiling():
            self._check(args)
        return self.dispatched(*args)

    def _settled(self, call: Any) -> Any:
        """The call with the route that it takes."""
        if self._decide is None:
            return call
        route = self._decide(call)
        return call if route == call[-1] else _new(self._kind, (*call[:-1], route))

    if TYPE_CHECKING:

        def __call__(self, *fields: Fields.args, **named: Fields.kwargs) -> Any: ...


class _Rule(NamedTuple):
    """The derivative of an operator, as torch.autograd.Function takes it: once for each way to the operator."""

    name: str
    layout: Layout
    save: Callable[..., Any]
    saved: type[tuple] | None
    backward: Callable[..., Gradients] | None
    differentiable: int

    def refuse(self, *_: Any) -> Any:
        """Raise for an operator without a derivative that is differentiated."""
        raise RuntimeError(
            f"{NAMESPACE}::{self.name} cannot be differentiated: second derivatives are not implemented; "
            "use fasttfm.reference for them"
        )

    def check_unchanged(self, memory: Tensor, version: int) -> None:
        """Raises where memory that two outputs share was written to: either gradient would miss it."""
        if memory._version != version:
            raise RuntimeError(
                f"{NAMESPACE}::{self.name}: an output was changed in place whose memory another one shares, and both "
                "were used; clone() one of them first"
            )

    def direct(self, compute: Callable[..., Any], again: Callable[..., Any] | None) -> Any:
        """Its forward takes the call, and the tensors in it, which are what autograd sees."""
        if self.backward is None:
            return self._undifferentiated(lambda call, *tensors: compute(call))
        wanted = _wanted(self.layout)
        save, differentiable = self.save, self.differentiable
        layout: Any = None if self.saved is None else layout_of(self.saved)

        def forward(ctx: Any, call: Any, *tensors: Any) -> Any:  # as _keep(), whose calls end in these attributes
            nonlocal layout
            outputs = compute(call)
            if type(outputs) is tuple and len(outputs) > differentiable:
                ctx.non_differentiable = outputs[differentiable:]
            ctx.materialize_grads = False
            saved = save(call, outputs)
            if layout is None:
                layout = layout_of(saved.__class__)
            ctx.to_save, ctx.others = layout.parted(saved)
            ctx.shared = None
            if again is not None and (once_more := again(call, outputs)) is not None:
                ctx.shared = once_more.detach(), once_more._version
                return *outputs, once_more.detach()
            return outputs

        def backward(ctx: Any, *gradients: Any) -> tuple:
            if ctx.shared is not None and gradients[-1] is not None:
                self.check_unchanged(*ctx.shared)
            saved = layout.merge(ctx.saved_tensors, ctx.others)
            return None, *self._differentiate(saved, wanted(ctx.needs_input_grad[1:]), gradients)

        return _apply_of(self.name, {"forward": forward, "backward": backward})

    def dispatched(self, run: Callable[..., Any]) -> Any:
        """Its forward takes the keys that are left to the dispatcher, and what the schema lists."""
        if self.backward is None:
            return self._undifferentiated(run)
        layout, wanted = self.layout, _wanted(self.layout)

        def forward(ctx: Any, keys: Any, *args: Any) -> Any:
            outputs = run(keys, *args)
            ctx.count = len(args)
            self._keep(ctx, layout.build(args), outputs)
            return outputs

        def backward(ctx: Any, *gradients: Any) -> tuple:
            wants = wanted([ctx.needs_input_grad[1:][i] for i in layout.positions])
            gradients = tuple(map(_unwrapped, gradients))
            saved = ctx.layout.merge(tuple(map(_unwrapped, ctx.saved_tensors)), ctx.others)
            result: list[Tensor | None] = [None] * ctx.count
            for i, gradient in zip(layout.positions, self._differentiate(saved, wants, gradients)):
                result[i] = gradient
            return None, *result

        return _apply_of(self.name, {"forward": forward, "backward": backward})

    def _undifferentiated(self, compute: Callable[..., Any]) -> Any:
        """Without a derivative: what refuses the gradients of its outputs."""

        def forward(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            return compute(*args)

        def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
            if any(gradient is not None for gradient in gradients):
                self.refuse()
            return (None,) * len(ctx.needs_input_grad)

        return _apply_of(self.name, {"forward": forward, "backward": backward})

    def _keep(self, ctx: Any, call: Any, outputs: Any) -> None:
        if isinstance(outputs, tuple) and len(outputs) > self.differentiable:
            ctx.mark_non_differentiable(*outputs[self.differentiable :])
        ctx.set_materialize_grads(False)
        saved = self.save(call, outputs)
        ctx.layout = layout = layout_of(self.saved or saved.__class__)
        tensors, ctx.others = layout.parted(saved)
        ctx.save_for_backward(*tensors)

    def _differentiate(self, saved: Any, wanted: Any, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """The gradients of the tensors, from those of the outputs, in their order."""
        if gradients[0] is None and all(gradient is None for gradient in gradients):
            return [None] * len(self.layout.names)
        by_name = self.backward(saved, wanted, *gradients)  # type: ignore[misc]
        results = [by_name.pop(name, None) for name in self.layout.names]
        if by_name:
            raise TypeError(f"{NAMESPACE}::{self.name} has no tensor named {', '.join(by_name)}")
        return results


def _apply_of(name: str, methods: dict[str, Any]) -> Any:
    """The apply of a torch.autograd.Function.

    It is that of C++, which takes tensors as they are: in a direct call nothing of torch.func is on, and from the
    dispatcher's autograd kernel they come already unwrapped to the level that differentiates.
    """
    static = {method: staticmethod(function) for method, function in methods.items()}
    function: Any = type(name, (torch.autograd.Function,), static)
    return super(torch.autograd.Function, function).apply


def _unwrapped(x: Tensor | None) -> Tensor | None:
    """The tensor in a wrapper of torch.func whose level has ended, as a pullback of torch.func.vjp meets them."""
    return None if x is None else unwrap_if_dead(x)


def _wanted(layout: Layout) -> Callable[[Any], Any]:
    return NamedTuple("Wanted", [(name, bool) for name in layout.names])._make


def _all_see_through() -> bool:
    """Return whether all dispatch modes that are on, such as a count of launches, want calls as they are."""
    return all(getattr(mode, "sees_through_operators", False) for mode in _get_current_dispatch_mode_stack())


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
            seen = outputs[:-internal] if internal else outputs
            if any(map(_is_view, seen)):
                return (*(x.detach() if x._is_view() else x for x in seen), *outputs[len(seen) :])
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
    device = x.device.type
    return device in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device)


def lower_precision(x: MaybeTensor, dtype: torch.dtype) -> MaybeTensor:
    """x in dtype, as autocast casts what enters a matrix product: floating-point tensors but float64."""
    if x is None or x.dtype is dtype or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(dtype)
