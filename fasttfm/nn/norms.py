"""LayerNorm and RMSNorm with torch.nn's interface."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.normalization import LayerNorm as TorchLayerNorm
from torch.nn.modules.normalization import RMSNorm as TorchRMSNorm

from fasttfm import functional as F
from fasttfm.errors import ArgumentError, ArgumentTypeError
from fasttfm.functional.signature import names_arguments
from fasttfm.functional.subclasses import ordinary
from fasttfm.nn.errors import refuse_scripting


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm (Ba et al. 2016) on fasttfm's kernel: the same arguments, parameters and state dict.

    Statistics are float32 for half precision. Under autocast the output keeps the input's dtype, where torch.nn's is
    float32. Raises ArgumentError where the input does not end in normalized_shape or is on another device,
    ArgumentTypeError for a dtype that does not go with the weights'.
    """

    stands_for = TorchLayerNorm

    __prepare_scriptable__ = refuse_scripting

    @names_arguments
    def forward(self, input: Tensor) -> Tensor:
        """input (..., *normalized_shape); the same shape and dtype comes back."""
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if not _takes(self, "input", input, weight, bias):
            return super().forward(input)
        if weight is not None and input.dtype != weight.dtype:
            mixed = weight.dtype == torch.float32 and input.dtype in (torch.float16, torch.bfloat16)
            if not mixed and not torch.is_autocast_enabled(input.device.type):
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
    """torch.nn.RMSNorm (Zhang and Sennrich 2019) on fasttfm's kernel: the same arguments, parameters and state dict.

    The mean of squares is float32 for half precision, and so is eps where none is given: the smallest step of float32
    from 1, of float64 for float64. The output keeps the input's dtype. Raises ArgumentError where the input does not
    end in normalized_shape or is on another device, ArgumentTypeError for one that is not floating-point.
    """

    stands_for = TorchRMSNorm

    __prepare_scriptable__ = refuse_scripting

    @names_arguments
    def forward(self, x: Tensor) -> Tensor:
        """x (..., *normalized_shape); the same shape and dtype comes back."""
        weight: Tensor | None = self.weight
        if not _takes(self, "x", x, weight):
            return super().forward(x)
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        if len(self.normalized_shape) == 1:
            return _laid_out(F.rms_norm(x, weight, eps), x)
        weight = None if weight is None else weight.flatten()
        return _laid_out(F.rms_norm(x.flatten(-len(self.normalized_shape)), weight, eps).view(x.shape), x)


def _laid_out(y: Tensor, x: Tensor) -> Tensor:
    """y with its channels last where x has them so, as torch's RMSNorm gives it."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() in formats and not x.is_contiguous() and x.is_contiguous(memory_format=formats[x.dim()]):
        return y.contiguous(memory_format=formats[x.dim()])
    return y


def _takes(norm: Any, name: str, input: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> bool:
    """Return whether the operators normalise input. Raises for shapes, dtypes, devices that torch.nn does not take."""
    shape = norm.normalized_shape
    if tuple(input.shape[-len(shape) :]) != shape:
        raise ArgumentError(f"{name} {tuple(input.shape)} must end in normalized_shape {shape} to be normalised")
    if not ordinary(input, weight, bias) or not shape or 0 in shape:
        return False
    if not input.is_floating_point():
        raise ArgumentTypeError(f"{name} has dtype {input.dtype}: only floating types can be normalised")
    if weight is not None and input.device != weight.device:
        raise ArgumentError(f"{name} is on {input.device} but the module is on {weight.device}: move one of them")
    return True
