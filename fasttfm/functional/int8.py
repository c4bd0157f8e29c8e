"""Matrix products in 8-bit integers: a scale for each output of the weight, and one for each row of the input.

    y[m, n] = (sum_k q[m, k] w[n, k]) * weight_scale[n] * row_scale[m] + bias[n]

q = round(x / row_scale) with row_scale = max |x| / 127 of the row alone, likewise for the outputs of the weight. Sums
of integers are exact, so a row does not depend on the rows beside it, nor on who computes it: oneDNN where torch has
its operator, torch._int_mm elsewhere. Rows are quantized, and results scaled, in one pass each with numba, in several
without, to the same bits. `python -m benchmarks.int8_products` compares the products.
Source: Dettmers et al. 2022, section 3.1 (vector-wise quantization).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fasttfm.functional import step_passes

LARGEST = 127
"""Of -128 .. 127 the lowest is not used."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 (M, K) and scales (M,) float32 of x (M, K): x is about the one times the other, each row by itself.

    A row with NaN or infinity has a scale that is none of the numbers either.
    """
    if step_passes.takes(x):
        return step_passes.quantize_rows(x)
    wide = x.detach().float()
    most = wide.abs().amax(dim=1)
    inverse = torch.where(most > 0, LARGEST / most, 0.0)
    rounded = (wide * inverse[:, None]).round_().nan_to_num_(0.0).clamp_(-LARGEST, LARGEST)
    return rounded.to(torch.int8), most / LARGEST


def dequantize(quantized: Tensor, scales: Tensor) -> Tensor:
    """float32 (M, K); quantized again it gives the same integers."""
    return quantized.float() * scales[:, None]


class Int8Product:
    """x (M, K) -> x weight^T + bias, then max(0, .) with relu: (M, N) of x's dtype; weight (N, K), bias (N,)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, relu: bool) -> None:
        quantized, scales = quantize(weight.detach())
        self.multiply = (_onednn if onednn_multiplies() else _torch)(quantized, scales)
        """int8 (M, K) -> sums (M, N) float32, scaled by output."""
        self.bias = torch.zeros(weight.shape[0]) if bias is None else bias.detach().float()
        self.relu = relu

    def __call__(self, x: Tensor) -> Tensor:
        rows, scales = quantize(x)
        return _scale(self.multiply(rows), scales, self.bias, self.relu, x.dtype)


def _scale(y: Tensor, scales: Tensor, bias: Tensor, relu: bool, dtype: torch.dtype) -> Tensor:
    """y (M, N) float32 * scales (M,) + bias (N,)."""
    if step_passes.takes(y):
        return step_passes.scale_rows(y, scales, bias, relu, dtype)
    y = y * scales[:, None] + bias
    return (y.relu_() if relu else y).to(dtype)


def _onednn(quantized: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.onednn.qlinear_prepack(quantized, None)
    zeros = torch.zeros(scales.shape[0], dtype=torch.int64)

    def multiply(rows: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return multiply


def _torch(quantized: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    transposed = quantized.t()
    return lambda rows: torch._int_mm(rows, transposed).float() * scales


@functools.cache
def onednn_multiplies() -> bool:
    """Whether this torch and this processor have oneDNN's product of signed 8-bit integers.

    The operators are those of torch.compile, which no documentation promises; so a product is tried.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-LARGEST, LARGEST + 1, (3, 96), generator=generator).to(torch.int8)
    weight = torch.randint(-LARGEST, LARGEST + 1, (64, 96), generator=generator).to(torch.int8)
    scales = torch.linspace(0.5, 2.0, 64)
    try:
        return torch.equal(_onednn(weight, scales)(rows), _torch(weight, scales)(rows))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
