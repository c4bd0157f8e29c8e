"""RMSNorm with torch.nn's interface."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.normalization import RMSNorm as TorchNorm

from fasttfm import functional as F
from fasttfm.blocks.inspect import ordinary
from fasttfm.errors import ArgumentError, ArgumentTypeError
from fasttfm.nn.errors import refuse_scripting


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm (Zhang and Sennrich 2019) on fasttfm's kernel: the same arguments, parameters and state dict.

    The mean of squares is float32 for half precision, and so is eps where none is given: the smallest step of float32
    from 1, of float64 for float64. The output keeps the input's dtype. Raises ArgumentError where the input does not
    end in normalized_shape or is on another device, ArgumentTypeError for one that is not floating-point.
    """

    stands_for = TorchNorm

    __prepare_scriptable__ = refuse_scripting

    def forward(self, x: Tensor) -> Tensor:
        """x (..., *normalized_shape); the same shape and dtype comes back."""
        dims = len(self.normalized_shape)
        weight: Tensor | None = self.weight
        if tuple(x.shape[-dims:]) != self.normalized_shape:
            raise ArgumentError(
                f"input {tuple(x.shape)} must end in normalized_shape {self.normalized_shape} to be normalised"
            )
        if not ordinary(x, weight) or dims == 0 or 0 in self.normalized_shape:
            return super().forward(x)
        if not x.is_floating_point():
            raise ArgumentTypeError(f"input has dtype {x.dtype}: only floating types can be normalised")
        if weight is not None and weight.device != x.device:
            raise ArgumentError(f"input is on {x.device} but the module is on {weight.device}: move one of them")
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        if dims == 1:
            return F.rms_norm(x, weight, eps)
        return F.rms_norm(x.flatten(-dims), None if weight is None else weight.flatten(), eps).view(x.shape)
