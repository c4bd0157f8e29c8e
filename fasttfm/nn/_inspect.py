"""Whether a sub-module may be computed inside a fused operator instead of being called.

It may only where nobody would notice: exactly the expected class (a parametrised, quantised or LoRA-wrapped layer is of
another), no hooks, no forward of its own, and parameters that are ordinary tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

LINEAR = frozenset({nn.Linear, NonDynamicallyQuantizableLinear})
DROPOUT = frozenset({nn.Dropout})


def untouched(module: nn.Module, kinds: frozenset[type]) -> bool:
    """Whether module does what a class in kinds does, no more and no less."""
    return (
        type(module) in kinds
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
        and getattr(module, "_compiled_call_impl", None) is None
        and not _has_any_global_hook()
    )


def ordinary(*tensors: Tensor | None) -> bool:
    """Whether all are tensors that the operators take: no DTensor, quantised or nested tensor."""
    for tensor in tensors:
        if tensor is None or type(tensor) is Tensor or type(tensor) is nn.Parameter:
            if tensor is not None and tensor.is_nested:
                return False
        elif tensor.is_nested or is_traceable_wrapper_subclass(tensor):
            return False
    return True


def is_relu(activation: object) -> bool:
    """Whether activation is the rectifier that the feed-forward operator fuses."""
    if isinstance(activation, nn.Module):
        return untouched(activation, frozenset({nn.ReLU}))
    return activation is nn.functional.relu or activation is torch.relu
