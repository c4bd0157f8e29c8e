"""The position-wise feed-forward network (Vaswani et al. 2017, equation 2) of two linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.blocks.inspect import LINEAR, fused_activation, ordinary, untouched
from fasttfm.blocks.merging import gradient_parts, read
from fasttfm.blocks.residual import Output, last_product
from fasttfm.cpu.linear import frozen, linear
from fasttfm.functional.dropout import Dropout
from fasttfm.functional.merging import norm_adds_bias


def feed_forward(
    x: Tensor,
    linear1: Any,
    activation: Callable[[Tensor], Tensor],
    dropout: Dropout | nn.Module,
    linear2: Any,
    *,
    leave_bias: bool = True,
) -> Output:
    """linear2(dropout(activation(linear1(x)))), x (..., N); one operator where the activation is ReLU or GELU.

    A linear layer or a dropout that is more than its class is called. leave_bias: the norm that follows may add
    linear2's bias.
    """
    opened = untouched(linear1, LINEAR) and ordinary(x, linear1.weight, linear1.bias)
    fused = fused_activation(activation)
    if not (opened and fused and isinstance(dropout, Dropout) and _opens(linear2)):
        hidden = linear(x, read(linear1.weight), read(linear1.bias)) if opened else linear1(x)  # (..., F)
        hidden = activation(hidden)
        if not isinstance(dropout, Dropout):
            hidden = dropout(hidden)
        elif dropout.dropout_p:
            hidden = nn.functional.dropout(hidden, dropout.dropout_p)
        return last_product(hidden, linear2, leave_bias=leave_bias)
    if frozen(x):  # a ReLU rides in the product, and nothing is kept for a gradient
        hidden = linear(x, read(linear1.weight), read(linear1.bias), relu=fused == "relu")
        hidden = hidden if fused == "relu" else activation(hidden)
        return last_product(hidden, linear2, leave_bias=leave_bias)
    bias2 = read(linear2.bias)
    left = bias2 is not None and leave_bias and norm_adds_bias(x)
    value = F.feed_forward(
        x,
        read(linear1.weight),
        read(linear1.bias),
        read(linear2.weight),
        None if left else bias2,
        bias1_parts=gradient_parts(linear1.bias),
        activation=fused,
        **dropout.options(),
    )
    return Output(value, bias2 if left else None)


def _opens(module: Any) -> bool:
    return untouched(module, LINEAR) and ordinary(module.weight, module.bias)
