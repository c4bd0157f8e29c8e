"""LayerNorm and RMSNorm with torch.nn's interface, feed-forward network and positional encoding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.normalization import LayerNorm as TorchLayerNorm
from torch.nn.modules.normalization import RMSNorm as TorchRMSNorm

from fasttfm import functional as F
from fasttfm.errors import ArgumentError, ArgumentTypeError
from fasttfm.functional.signature import checks_arguments, names_arguments
from fasttfm.functional.subclasses import ordinary
from fasttfm.models.embedding import Sinusoids
from fasttfm.models.layers import feed_forward
from fasttfm.models.residual import dropout_of
from fasttfm.nn.errors import autocasts, check_dropout, check_sizes, refuse_scripting


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm (Ba et al. 2016) on fasttfm's kernel: same arguments, parameters and state dict.

    Statistics are float32 for half precision. Under autocast the output keeps the input's dtype (torch.nn: float32).
    Raises ArgumentError for an input of another shape or device, ArgumentTypeError for a dtype that does not match the
    weight's.
    """

    stands_for = TorchLayerNorm

    __prepare_scriptable__ = refuse_scripting

    @names_arguments
    def forward(self, input: Tensor) -> Tensor:
        """Normalize input (..., *normalized_shape); shape and dtype are kept."""
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if not _takes(self, "input", input, weight, bias):
            return super().forward(input)
        if weight is not None and input.dtype != weight.dtype:
            mixed = weight.dtype == torch.float32 and input.dtype in (torch.float16, torch.bfloat16)
            if not mixed and not autocasts(input):
                raise ArgumentTypeError(
                    f"input has dtype {input.dtype} but the module has {weight.dtype}: convert one of them, or use "
                    "autocast"
                )
        if len(self.normalized_shape) == 1:
            return F.layer_norm(input, weight, bias, self.eps)
        weight = None if weight is None else weight.flatten()
        bias = None if bias is None else bias.flatten()
        return F.layer_norm(input.flatten(-len(self.normalized_shape)), weight, bias, self.eps).view(input.shape)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm (Zhang and Sennrich 2019) on fasttfm's kernel: same arguments, parameters and state dict.

    The mean of squares is float32 for half precision; the default eps is torch.finfo(float32).eps, of float64 for
    float64. The output keeps the input's dtype. Raises ArgumentError for an input of another shape or device,
    ArgumentTypeError for one that is not floating-point.
    """

    stands_for = TorchRMSNorm

    __prepare_scriptable__ = refuse_scripting

    @names_arguments
    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., *normalized_shape); shape and dtype are kept."""
        weight: Tensor | None = self.weight
        if not _takes(self, "x", x, weight):
            return super().forward(x)
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        if len(self.normalized_shape) == 1:
            return _in_layout_of_input(F.rms_norm(x, weight, eps), x)
        weight = None if weight is None else weight.flatten()
        return _in_layout_of_input(F.rms_norm(x.flatten(-len(self.normalized_shape)), weight, eps).view(x.shape), x)


def _in_layout_of_input(y: Tensor, x: Tensor) -> Tensor:
    """y in x's memory format if that is channels-last, like torch.nn.RMSNorm's output."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() in formats and not x.is_contiguous() and x.is_contiguous(memory_format=formats[x.dim()]):
        return y.contiguous(memory_format=formats[x.dim()])
    return y


def _takes(norm: Any, name: str, input: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> bool:
    """Return whether the operators support input. Raises for shapes, dtypes and devices that torch.nn rejects."""
    shape = norm.normalized_shape
    if tuple(input.shape[-len(shape) :]) != shape:
        raise ArgumentError(f"{name} {tuple(input.shape)} must end in normalized_shape {shape}")
    if not ordinary(input, weight, bias) or not shape or 0 in shape:
        return False
    if not input.is_floating_point():
        raise ArgumentTypeError(f"{name} has dtype {input.dtype}: a floating type is needed")
    if weight is not None and input.device != weight.device:
        raise ArgumentError(f"{name} is on {input.device} but the module is on {weight.device}: move one of them")
    return True


def activation_function(activation: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Resolve an activation argument to a function. Raises ArgumentError for an unknown name."""
    if callable(activation):
        return activation
    if activation in ("relu", "gelu"):
        return getattr(nn.functional, activation)
    raise ArgumentError(f"activation is {activation!r}: 'relu', 'gelu' or a callable is needed")


class FeedForward(nn.Module):
    """linear2(dropout(activation(linear1(x)))), with ReLU equation 2 of Vaswani et al. 2017.

    d_model: width of input and output; d_ff: hidden width; dropout: of the hidden activations; activation: 'relu' or
    'gelu' (fused), or a callable; bias, device, dtype and initialization as in torch.nn.Linear. Parameters are named
    as in torch.nn.TransformerEncoderLayer: linear1.weight, linear1.bias, linear2.weight, ... Raises ArgumentError for
    a dropout outside [0, 1] or an unknown activation.
    """

    @checks_arguments
    def __init__(
        self, d_model: int, d_ff: int = 2048, dropout: float = 0.0,
        activation: str | Callable[[Tensor], Tensor] = "relu", bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        check_dropout(dropout)
        check_sizes(d_model=d_model, d_ff=d_ff)
        super().__init__()
        self.linear1 = nn.Linear(d_model, d_ff, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(d_ff, d_model, bias=bias, device=device, dtype=dtype)
        self.activation = activation_function(activation)

    @names_arguments
    def forward(self, x: Tensor) -> Tensor:
        """The output (..., d_model) for x (..., d_model)."""
        return feed_forward(x, self.linear1, self.activation, dropout_of(self.dropout), self.linear2)


class PositionalEncoding(Sinusoids):
    """dropout(x + PE), with the sinusoids of the paper (section 3.5) or of tensor2tensor.

    d_model: even width; dropout; max_length: positions in the table; variant: 'paper' interleaves
    sin(pos / 10000^(2i/d)) and cos, 'tensor2tensor' puts all sines of pos / 10000^(i/(d/2-1)) before the cosines;
    batch_first as in the layers. The table is a non-persistent buffer. Raises ArgumentError for an odd width, an
    unknown variant or a sequence longer than the table.
    """

    @checks_arguments
    def __init__(
        self, d_model: int, dropout: float = 0.1, max_length: int = 5000, variant: str = "paper",
        batch_first: bool = False, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        check_dropout(dropout)
        check_sizes(max_length=max_length)
        if d_model % 2 or d_model <= 0:
            raise ArgumentError(f"d_model is {d_model} but must be even: sines and cosines come in pairs")
        if variant not in ("paper", "tensor2tensor"):
            raise ArgumentError(f"variant is {variant!r}: choose paper or tensor2tensor")
        super().__init__(max_length, d_model, variant, device, dtype)
        self.batch_first = batch_first
        self.dropout = nn.Dropout(dropout)

    @names_arguments
    def forward(self, x: Tensor, first_position: int = 0) -> Tensor:
        """Encode x (L, N, E), (N, L, E) with batch_first, or unbatched (L, E); shape and dtype are kept.

        first_position: position of the first element, for sequences processed in pieces.
        """
        batched = x.dim() == 3
        dim = 1 if batched and self.batch_first else 0
        last = first_position + (x.shape[dim] if x.dim() else 0)
        width = self.table.shape[1]
        if x.dim() not in (2, 3) or x.shape[-1] != width or not 0 <= first_position <= last <= self.table.shape[0]:
            raise ArgumentError(
                f"x {tuple(x.shape)} from position {first_position} does not fit: it must be 2-D or 3-D, "
                f"{width} wide, begin at 0 or later, and end by position {self.table.shape[0]} (max_length)"
            )
        if x.device != self.table.device:
            raise ArgumentError(f"x is on {x.device} but the module is on {self.table.device}: move one of them")
        if not x.is_floating_point():
            raise ArgumentTypeError(f"x has dtype {x.dtype}: a floating type is needed")
        positions = self.table[first_position:last].to(x.dtype)
        return self.dropout(x + (positions[:, None] if batched and not self.batch_first else positions))

    def extra_repr(self) -> str:
        length, width = self.table.shape
        return f"{width}, max_length={length}, variant={self.variant!r}, batch_first={self.batch_first}"
