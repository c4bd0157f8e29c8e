"""LayerNorm with torch.nn's interface."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm import functional as F
from fasttfm.nn._inspect import ordinary
from fasttfm.nn.errors import ArgumentError


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm (Ba et al. 2016) on fasttfm's kernel: the same arguments, parameters and state dict.

    Statistics are float32 for half precision. Under autocast the output keeps the input's dtype, where torch.nn's is
    float32. Raises ArgumentError where the input does not end in normalized_shape.
    """

    def forward(self, input: Tensor) -> Tensor:
        """input (..., *normalized_shape); the same shape and dtype comes back."""
        dims = len(self.normalized_shape)
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if tuple(input.shape[-dims:]) != self.normalized_shape:
            raise ArgumentError(
                f"input {tuple(input.shape)} must end in normalized_shape {self.normalized_shape} to be normalised"
            )
        if not ordinary(input, weight, bias) or 0 in self.normalized_shape:
            return super().forward(input)
        if dims == 1:
            return F.layer_norm(input, weight, bias, self.eps)
        weight = None if weight is None else weight.flatten()
        bias = None if bias is None else bias.flatten()
        return F.layer_norm(input.flatten(-dims), weight, bias, self.eps).view(input.shape)
