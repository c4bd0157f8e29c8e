"""Registration of torch operators: schema, computation, fake, autograd and autocast in one place.

Each kernel family defines one operator for its forward and one for its backward pass. Host time decides how it is
done: a training step makes hundreds of calls, and torch.library.custom_op costs several times more per call than the
low-level registration here. An eager call on plain tensors does not even need the dispatcher, which would run the same
Python functions after its detours; Operator.__call__ goes to them directly then, and through torch.ops.fasttfm whenever
anything looks on: torch.compile, fake tensors, tensor subclasses, dispatch modes, torch.func, the profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_library = torch.library.Library("fasttfm", "DEF")
_DEVICES = ("CPU", "CUDA", "XPU", "MPS")
AUTOCAST_DEVICES = ("cpu", "cuda")

_below_autograd = torch._C._AutoDispatchBelowAutograd
_without_keys = torch._C._ExcludeDispatchKeyGuard
_autocast_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)

# Looked up once: each is asked in every call.
_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_profiling = torch.autograd._profiler_enabled
_any_autocast = torch._C._is_any_autocast_enabled  # takes no argument: half the price of asking for a device
_autocast_enabled = torch.is_autocast_enabled
_autocast_dtype = torch.get_autocast_dtype
_set_autocast = torch.set_autocast_enabled
_current_gpu: Any = getattr(torch._C, "_cuda_getDevice", None)  # what torch.cuda.current_device() ends in
_grad_enabled = torch.is_grad_enabled


class Operator:
    """One torch operator, torch.ops.fasttfm.<name>; call it like a function.

    schema: as torch.library.Library.define takes it.
    compute(*args): the outputs; autograd and autocast are off while it runs.
    fake(*args): empty outputs of the right shapes, dtypes and strides.
    save(ctx, args, outputs) and backward(ctx, *gradients): the derivative; without them the operator refuses one, which
        is how a second derivative ends in a clear message.
    autocast(args, dtype): the arguments as autocast to dtype would pass them on; None leaves them as they are.
    again(args, outputs): a tensor to return once more, behind the others, or None. The gradients of its two uses then
        come to backward apart and need no launch of their own to be added. The two share memory, which the dispatcher
        does not allow: only a direct call that makes a gradient has the additional output.
    """

    def __init__(
        self,
        schema: str,
        compute: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        save: Callable[[Any, tuple, Any], None] | None = None,
        backward: Callable[..., Any] | None = None,
        autocast: Callable[[tuple, torch.dtype], tuple] | None = None,
        again: Callable[[tuple, Any], Tensor | None] | None = None,
    ) -> None:
        self.name = name = schema.split("(", 1)[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.dispatched = operator = getattr(torch.ops.fasttfm, name).default
        self._tensors = tuple(i for i, a in enumerate(operator._schema.arguments) if "Tensor" in str(a.type))
        self._compute = compute
        self._cast = autocast

        def run(*args: Any) -> Any:
            with _below_autograd():
                return operator(*args)

        def refuse(*args: Any) -> Any:
            raise RuntimeError(
                f"fasttfm::{name} cannot be differentiated: second derivatives are not implemented; "
                "use fasttfm.reference for them"
            )

        def refuse_batching(*args: Any) -> Any:
            raise RuntimeError(
                f"fasttfm::{name} has no torch.vmap rule: it takes batches already, so give it the whole batch at once"
            )

        differentiate, self._differentiate = refuse, refuse
        if backward is not None:
            differentiate = _differentiated(name, run, save, backward).apply
            direct: Any = _differentiated(name, compute, save, backward, again)
            # torch.autograd.Function.apply without its test for torch.func, which __call__ makes
            self._differentiate = super(torch.autograd.Function, direct).apply  # type: ignore[misc]

        def autograd(*args: Any) -> Any:
            tensors = [a for a in args if isinstance(a, Tensor)]
            if _grad_enabled() and any(t.requires_grad for t in tensors):
                return differentiate(*args)
            if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
                raise RuntimeError(f"fasttfm::{name} has no forward-mode derivative: use fasttfm.reference for it")
            return run(*args)

        def cast_and_run(device: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                if autocast is not None:
                    args = autocast(args, torch.get_autocast_dtype(device))
                with _without_keys(_autocast_keys):
                    return operator(*args)

            return call

        for key in _DEVICES:
            _library.impl(name, _on_its_device(compute), key)
        for device in AUTOCAST_DEVICES:
            _library.impl(name, cast_and_run(device), f"Autocast{device.upper()}")
        _library.impl(name, autograd, "Autograd")
        _library.impl(name, refuse_batching, "FuncTorchBatched")
        torch.library.register_fake(f"fasttfm::{name}", fake, lib=_library)

    def __call__(self, *args: Any) -> Any:
        if _compiling() or _transforms() or _profiling() or forward_ad._current_level >= 0:
            return self.dispatched(*args)
        if _dispatch_modes() and not _all_see_through():
            return self.dispatched(*args)
        gradient = False
        for i in self._tensors:
            a = args[i]
            if a is None:
                continue
            kind = type(a)
            if (kind is not Tensor and kind is not Parameter) or a.is_neg():
                return self.dispatched(*args)
            if a.requires_grad:
                gradient = True
        first = args[0]
        if first.is_cpu:
            device = "cpu"
        elif first.is_cuda and first.get_device() == _current_gpu():
            device = "cuda"
        else:  # a meta tensor, another GPU than the current one, another kind of device
            return self.dispatched(*args)
        run = self._differentiate if gradient and _grad_enabled() else self._compute
        if not _any_autocast() or not _autocast_enabled(device):
            return run(*args)
        if self._cast is not None:
            args = self._cast(args, _autocast_dtype(device))
        _set_autocast(device, False)
        try:
            return run(*args)
        finally:
            _set_autocast(device, True)


def _all_see_through() -> bool:
    """Whether every dispatch mode that is on, such as a count of launches, wants calls as they are without it."""
    return all(getattr(mode, "sees_through_operators", False) for mode in _get_current_dispatch_mode_stack())


def _on_its_device(compute: Callable[..., Any]) -> Callable[..., Any]:
    """compute for the dispatcher: no outputs that share memory, and the first argument's GPU as the current one, where
    Triton launches."""

    def run(*args: Any) -> Any:
        first = args[0]
        if not first.is_cuda or first.get_device() == _current_gpu():
            return _apart(compute(*args))
        with torch.cuda.device(first.device):
            return _apart(compute(*args))

    return run


def _apart(outputs: Any) -> Any:
    """Outputs, each in memory of its own: the dispatcher allows nothing else, a direct call spares the copy."""
    if not isinstance(outputs, tuple):
        return outputs
    seen: set[int] = set()
    found = []
    for output in outputs:
        memory = output.untyped_storage().data_ptr() if output.numel() else 0
        found.append(output.clone() if memory in seen and memory else output)
        seen.add(memory)
    return tuple(found)


def _differentiated(name: str, run: Callable[..., Any], save: Any, backward: Any, again: Any = None) -> Any:
    """The torch.autograd.Function whose forward is run."""

    def forward(ctx: Any, *args: Any) -> Any:
        outputs = run(*args)
        save(ctx, args, outputs)
        return outputs

    def forward_with_more(ctx: Any, *args: Any) -> Any:
        outputs = forward(ctx, *args)
        once_more = again(args, outputs)
        return outputs if once_more is None else (*outputs, once_more.detach())

    methods = {
        "forward": staticmethod(forward if again is None else forward_with_more),
        "backward": staticmethod(backward),
    }
    return type(name, (torch.autograd.Function,), methods)


def lower_precision(args: tuple, dtype: torch.dtype) -> tuple:
    """Autocast rule of matrix products: every floating-point tensor but float64 goes to dtype."""
    return tuple(
        a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() and a.dtype != torch.float64 else a for a in args
    )
