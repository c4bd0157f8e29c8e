"""The position-wise feed-forward network (Vaswani et al. 2017, equation 2) of two linear layers."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.cpu.linear import frozen, linear
from fasttfm.functional.dropout import Dropout
from fasttfm.functional.subclasses import ordinary
from fasttfm.models.plain import LINEAR, fused_activation, untouched


def feed_forward(
    x: Tensor, linear1: Any, activation: Callable[[Tensor], Tensor], dropout: Dropout | nn.Module, linear2: Any
) -> Tensor:
    """linear2(dropout(activation(linear1(x)))), x (..., N); one operator where the activation is ReLU or GELU.

    A linear layer or a dropout that is more than its class is called.
    """
    opened = opens(linear1, x)
    fused = fused_activation(activation) if opened else None
    if fused and isinstance(dropout, Dropout) and opens(linear2) and not frozen(x):
        return F.feed_forward(
            x, linear1.weight, linear1.bias, linear2.weight, linear2.bias, activation=fused, **dropout.options()
        )
    rides = fused == "relu" and frozen(x)  # the ReLU in the product
    hidden = linear(x, linear1.weight, linear1.bias, relu=rides) if opened else linear1(x)  # (..., F)
    hidden = hidden if rides else activation(hidden)
    if not isinstance(dropout, Dropout):
        hidden = dropout(hidden)
    elif dropout.dropout_p:
        hidden = nn.functional.dropout(hidden, dropout.dropout_p)
    return apply_linear(linear2, hidden)


def apply_linear(module: Any, x: Tensor) -> Tensor:
    """module(x) of a linear layer, x (..., N)."""
    return linear(x, module.weight, module.bias) if opens(module, x) else module(x)


def opens(module: Any, *inputs: Tensor) -> bool:
    """Return whether the parameters of a linear layer may be read instead of calling it with these inputs."""
    return untouched(module, LINEAR) and ordinary(*inputs, module.weight, module.bias)
