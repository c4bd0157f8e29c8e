"""LayerNorm with torch.nn's interface."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.normalization import LayerNorm as TorchNorm

from fasttfm import functional as F
from fasttfm.blocks.inspect import ordinary
from fasttfm.errors import ArgumentError, ArgumentTypeError
from fasttfm.nn.errors import refuse_scripting


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm (Ba et al. 2016) on fasttfm's kernel: the same arguments, parameters and state dict.

    Statistics are float32 for half precision. Under autocast the output keeps the input's dtype, where torch.nn's is
    float32. Raises ArgumentError where the input does not end in normalized_shape or is on another device,
    ArgumentTypeError for a dtype that does not go with the weights'.
    """

    stands_for = TorchNorm

    __prepare_scriptable__ = refuse_scripting

    def forward(self, input: Tensor) -> Tensor:
        """input (..., *normalized_shape); the same shape and dtype comes back."""
        dims = len(self.normalized_shape)
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if tuple(input.shape[-dims:]) != self.normalized_shape:
            raise ArgumentError(
                f"input {tuple(input.shape)} must end in normalized_shape {self.normalized_shape} to be normalised"
            )
        if not ordinary(input, weight, bias) or dims == 0 or 0 in self.normalized_shape:
            return super().forward(input)
        _check(input, weight)
        if dims == 1:
            return F.layer_norm(input, weight, bias, self.eps)
        weight = None if weight is None else weight.flatten()
        bias = None if bias is None else bias.flatten()
        return F.layer_norm(input.flatten(-dims), weight, bias, self.eps).view(input.shape)


def _check(input: Tensor, weight: Tensor | None) -> None:
    """Raises for a dtype or a device that torch.nn does not take; float32 weights may normalise half precision."""
    if not input.is_floating_point():
        raise ArgumentTypeError(f"input has dtype {input.dtype}: only floating types can be normalised")
    if weight is None:
        return
    if input.device != weight.device:
        raise ArgumentError(f"input is on {input.device} but the module is on {weight.device}: move one of them")
    mixed = weight.dtype == torch.float32 and input.dtype in (torch.float16, torch.bfloat16)
    if input.dtype != weight.dtype and not mixed and not torch.is_autocast_enabled(input.device.type):
        raise ArgumentTypeError(
            f"input has dtype {input.dtype} but the module has {weight.dtype}: convert one of them, or use autocast"
        )
