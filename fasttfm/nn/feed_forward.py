"""The position-wise feed-forward network, alone and as the layers use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.nn._inspect import DROPOUT, LINEAR, is_relu, ordinary, untouched
from fasttfm.nn.errors import ArgumentError, check_dropout


def feed_forward(
    x: Tensor,
    linear1: Any,
    activation: Callable[[Tensor], Tensor],
    dropout: Any,
    linear2: Any,
    *,
    leaves: Callable[[Tensor | None], Tensor | None] | None = None,
    seed: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """linear2(dropout(activation(linear1(x)))), fused where these are what they seem and the activation is ReLU.

    x (..., N). leaves: given linear2's bias, what of it the caller adds; without it nothing. seed (1,) int64 and stream
    decide the fused dropout's mask, as in fasttfm.functional.feed_forward. Returns the output and the bias left out.
    """
    opens = untouched(linear2, LINEAR) and ordinary(linear2.weight, linear2.bias)
    late = leaves(linear2.bias) if opens and leaves is not None else None
    bias2 = linear2.bias if opens and late is None else None
    if (
        opens
        and is_relu(activation)
        and untouched(linear1, LINEAR)
        and untouched(dropout, DROPOUT)
        and ordinary(x, linear1.weight, linear1.bias)
    ):
        p = dropout.p if dropout.training else 0.0
        weights = (linear1.weight, linear1.bias, linear2.weight, bias2)
        return F.feed_forward(x, *weights, dropout_p=p, seed=seed, stream=stream), late
    hidden = dropout(activation(linear1(x)))
    if late is None:
        return linear2(hidden), None
    return nn.functional.linear(hidden, linear2.weight), late


def activation_function(activation: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function that a layer's activation argument names. Raises ArgumentError for another name."""
    if callable(activation):
        return activation
    if activation == "relu":
        return nn.functional.relu
    if activation == "gelu":
        return nn.functional.gelu
    raise ArgumentError(f"activation is {activation!r}: 'relu', 'gelu' or a callable is needed")


class FeedForward(nn.Module):
    """linear2(dropout(activation(linear1(x)))): Vaswani et al. 2017, equation 2, with ReLU.

    d_model: width of input and output; d_ff: width inside; dropout: on the hidden activation; activation: 'relu' (the
    fused kernel), 'gelu' or a callable; bias, device, dtype as in torch.nn.Linear, whose initial values it has. Its
    parameters are called as in torch.nn.TransformerEncoderLayer: linear1.weight, linear1.bias, linear2.weight, ...
    Raises ArgumentError for a dropout outside [0, 1] or an unknown activation.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int = 2048,
        dropout: float = 0.0,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_dropout(dropout)
        super().__init__()
        self.linear1 = nn.Linear(d_model, d_ff, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(d_ff, d_model, bias=bias, device=device, dtype=dtype)
        self.activation = activation_function(activation)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d_model) to the same shape."""
        return feed_forward(x, self.linear1, self.activation, self.dropout, self.linear2)[0]
