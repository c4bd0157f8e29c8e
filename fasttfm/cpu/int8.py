"""Matrix products in 8-bit integers, with one scale per weight output and one per input row.

    y[m, n] = (sum_k (r[m, k] - 128) w[n, k]) * weight_scale[n] * row_scale[m] + bias[n]

r = 128 + round(x / row_scale), row_scale = max |x| / 127 of the row. Adjacent inputs of the weight form pairs, (0, 1),
(2, 3) and so on: an output's scale is the largest |a| + |b| of its pairs / 127, so that the quantized |a| + |b| <= 128.
Then the sum of two products fits 16 bits: processors without an instruction for four products (VNNI, AMX) add two at a
time, and would saturate. Integer sums are exact, so the result of a row does not depend on the rest of the batch.
Source: Dettmers et al. 2022, section 3.1 (vector-wise quantization).
"""

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from fasttfm.cpu import step_passes

LARGEST, ZERO = 127, 128
"""The largest quantized magnitude, and the zero point of rows."""
_ROUNDING = 1e-9
"""Bound on float64's rounding error of a half."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x (M, K) row by row: uint8 q (M, K) and float32 scales (M,), with x ~ (q - ZERO) * scales.

    The scale of a row with NaN or infinity is not finite.
    """
    if step_passes.takes(x):
        return step_passes.quantize_rows(x)
    wide = x.detach().float()
    most = wide.abs().amax(dim=1)
    inverse = torch.where(most > 0, LARGEST / most, 0.0)
    rounded = (wide * inverse[:, None]).round_().nan_to_num_(0.0).clamp_(-LARGEST, LARGEST)
    return (rounded + ZERO).to(torch.uint8), most / LARGEST


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weight (N, K) row by row: int8 q (N, K) and float32 scales (N,), with weight ~ q * scales.

    The scale of a row with NaN or infinity is not finite.
    """
    outputs, inputs = weight.shape
    pairs = torch.nn.functional.pad(weight.detach().double(), (0, inputs % 2)).view(outputs, -1, 2)
    most = pairs.abs().sum(dim=2).amax(dim=1)
    inverse = torch.where(most > 0, LARGEST / most, 0.0)
    first, second = (pairs.abs() * inverse[:, None, None] + 0.5 + _ROUNDING).floor().unbind(dim=2)
    second = second.minimum(LARGEST - first)  # of two halves one rounds up, or requantizing would change the sum
    rounded = torch.stack([first, second], dim=2).copysign(pairs)
    rounded = rounded.nan_to_num_(0.0).clamp_(-LARGEST, LARGEST)
    return rounded.view(outputs, -1)[:, :inputs].to(torch.int8).contiguous(), (most / LARGEST).float()


def dequantize(quantized: Tensor, scales: Tensor) -> Tensor:
    """The float32 weight (N, K); quantizing it again gives the same integers."""
    return quantized.float() * scales[:, None]


class Int8Product:
    """x (M, K) -> x weight^T + bias, then max(0, .) with relu: (M, N) of x's dtype; weight (N, K), bias (N,)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, relu: bool) -> None:
        self.multiply = multiplier(*quantize_weight(weight))
        self.bias = weight.new_zeros(weight.shape[0], dtype=torch.float32) if bias is None else bias.detach().float()
        own = getattr(self.multiply, "scaled", None)  # IntegerPanelProduct's
        self.scaled = functools.partial(self._scaled, relu) if own is None else own(self.bias, relu)
        """The function from quantized rows (M, K) and their scales (M,) to the result in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.scaled(*quantize_rows(x)).to(x.dtype)

    def _scaled(self, relu: bool, rows: Tensor, scales: Tensor) -> Tensor:
        y = self.multiply(rows) * scales[:, None] + self.bias
        return y.relu_() if relu else y


def multiplier(quantized: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the product of uint8 rows (M, K) with a weight (N, K) int8 and its scales (N,): (M, N) float32.

    Where our own does not take K inputs, sums are in float64, which has the same bits and is slower.
    """
    if route() is not None and quantized.shape[1] < 1 << 16:
        from fasttfm.cpu.panel_tiles import UNROLLED
        from fasttfm.cpu.panels import IntegerPanelProduct

        if quantized.shape[1] % UNROLLED == 0:
            return IntegerPanelProduct(quantized, scales)
    weight = quantized.double()
    return lambda rows: torch.nn.functional.linear(rows.double() - ZERO, weight).float() * scales


def route() -> str | None:
    """Return panels where int8 is computed in integers: with numba, on a processor with AVX2; None for float32."""
    if not step_passes.usable():
        return None
    from fasttfm.cpu.panels import multiplies_integers

    return "panels" if multiplies_integers() else None


@functools.cache
def warn_without_route() -> None:
    """Warn, once per process, that int8 is computed in float32 because route() is None."""
    if route() is None:
        warnings.warn(
            'int8 computes in float32: 8-bit products need numba (pip install "./fasttfm[cpu]") and a processor with '
            "AVX2",
            RuntimeWarning,
            stacklevel=2,
        )
