"""True if a sub-module may be computed inside a fused operator instead of being called.

It may only where nobody would notice: exactly the expected class (a parametrised, quantised, sharded or LoRA-wrapped
module is of another), no hooks (pruning and the old weight_norm are hooks), no forward of its own, and parameters that
are ordinary tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fasttfm.functional.activations import ACTIVATIONS, FUSED

LINEAR: frozenset[type] = frozenset({nn.Linear, NonDynamicallyQuantizableLinear})
DROPOUT: frozenset[type] = frozenset({nn.Dropout})
NORM: frozenset[type] = frozenset({nn.LayerNorm})
EMBEDDING: frozenset[type] = frozenset({nn.Embedding})
_ACTIVATIONS: frozenset[type] = frozenset({nn.ReLU, nn.GELU})
ATTENTION = frozenset({"attention"})
"""Of blocks.attention."""
LAYER = frozenset({"layer"})
"""Of models, which take the residual stream itself."""


def untouched(module: nn.Module, kinds: frozenset[Any]) -> bool:
    """Return whether module does what a class in kinds does, no more and no less.

    A class of ours that computes the same as one in kinds says so in its own `stands_for`, which no class derived from
    it inherits.
    """
    kind = type(module)
    return (kind in kinds or kind.__dict__.get("stands_for") in kinds) and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Return whether calling module does more than its class's forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or getattr(module, "_compiled_call_impl", None) is not None
        or _has_any_global_hook()
    )


def ordinary(*tensors: Tensor | None) -> bool:
    """Return whether all are tensors that the operators take: no DTensor, quantised or nested tensor."""
    for tensor in tensors:
        if tensor is None or type(tensor) is Tensor or type(tensor) is nn.Parameter:
            if tensor is not None and tensor.is_nested:
                return False
        elif tensor.is_nested or is_traceable_wrapper_subclass(tensor):
            return False
    return True


def fused_activation(activation: object) -> str | None:
    """The name by which the feed-forward operator computes an activation; None where it does not."""
    if isinstance(activation, nn.ReLU | nn.GELU) and untouched(activation, _ACTIVATIONS):
        if isinstance(activation, nn.ReLU):
            return "relu"
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    if activation is torch.relu:
        return "relu"
    return next((name for name in FUSED if ACTIVATIONS[name] is activation), None)
