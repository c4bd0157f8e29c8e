"""Registration of torch operators: schema, computation, fake, autograd and autocast in one place.

Each kernel family defines one operator for its forward and one for its backward pass. The low-level registration is used
because torch.library.custom_op costs several times more host time per call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("fasttfm", "DEF")
_DEVICES = ("CPU", "CUDA", "XPU", "MPS")


def _needs_gradient(values: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)


class Operator:
    """One torch operator, torch.ops.fasttfm.<name>; call it like a function.

    schema: as torch.library.Library.define takes it.
    compute(*args): the outputs; runs below autograd.
    fake(*args): empty outputs of the right shapes, dtypes and strides.
    save(ctx, args, outputs) and backward(ctx, *gradients): the derivative; without them the operator refuses one, which
        is how a second derivative ends in a clear message.
    autocast(args, dtype): the arguments as autocast to dtype would pass them on; None leaves them as they are.
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
    ) -> None:
        name = schema.split("(", 1)[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in _DEVICES:
            _library.impl(name, compute, device)
        torch.library.register_fake(f"fasttfm::{name}", fake, lib=_library)
        self.call = operator = getattr(torch.ops.fasttfm, name).default
        below_autograd = torch._C._AutoDispatchBelowAutograd

        if backward is None:

            def autograd(*args: Any) -> Any:
                if _needs_gradient(args):
                    raise RuntimeError(
                        f"fasttfm::{name} cannot be differentiated: second derivatives are not implemented; "
                        "use fasttfm.reference for them"
                    )
                with below_autograd():
                    return operator(*args)
        else:

            class Function(torch.autograd.Function):
                @staticmethod
                def forward(ctx: Any, *args: Any) -> Any:
                    with below_autograd():
                        outputs = operator(*args)
                    assert save is not None
                    save(ctx, args, outputs)
                    return outputs

            Function.backward = staticmethod(backward)  # type: ignore[assignment]
            Function.__name__ = Function.__qualname__ = name

            def autograd(*args: Any) -> Any:
                if _needs_gradient(args):
                    return Function.apply(*args)
                with below_autograd():
                    return operator(*args)

        _library.impl(name, autograd, "Autograd")

        if autocast is not None:
            for device in ("cpu", "cuda"):
                _library.impl(name, _autocast(operator, autocast, device), f"Autocast{device.upper()}")

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def _autocast(
    operator: Callable[..., Any], cast: Callable[[tuple, torch.dtype], tuple], device: str
) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))

    def call(*args: Any) -> Any:
        args = cast(args, torch.get_autocast_dtype(device))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*args)

    return call


def lower_precision(args: tuple, dtype: torch.dtype) -> tuple:
    """Autocast rule of matrix products: every floating-point tensor but float64 goes to dtype."""
    return tuple(
        a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() and a.dtype != torch.float64 else a for a in args
    )
