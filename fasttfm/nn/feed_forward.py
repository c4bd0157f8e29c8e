"""The position-wise feed-forward network as a module, and the names of activations."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fasttfm.errors import ArgumentError
from fasttfm.functional.signature import checks_arguments, names_arguments
from fasttfm.models.layers import feed_forward
from fasttfm.models.residual import dropout_of
from fasttfm.nn.errors import check_dropout, check_sizes


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

    @checks_arguments
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
        check_sizes(d_model=d_model, d_ff=d_ff)
        super().__init__()
        self.linear1 = nn.Linear(d_model, d_ff, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(d_ff, d_model, bias=bias, device=device, dtype=dtype)
        self.activation = activation_function(activation)

    @names_arguments
    def forward(self, x: Tensor) -> Tensor:
        """x (..., d_model) to the same shape."""
        return feed_forward(x, self.linear1, self.activation, dropout_of(self.dropout), self.linear2)
