"""Matrix products in 8-bit integers: a scale for each output of the weight, and one for each row of the input.

    y[m, n] = (sum_k q[m, k] w[n, k]) * weight_scale[n] * row_scale[m] + bias[n]

q = round(x / row_scale) with row_scale = max |x| / 127 of the row alone, likewise for the outputs of the weight. Sums
of integers are exact, so a row does not depend on the rows beside it, nor on which operator computes it. Not every
operator is exact or fast on every processor: route() tries them. Rows are quantized, and results scaled, in one pass
each with numba, in several without, to the same bits.
Source: Dettmers et al. 2022, section 3.1 (vector-wise quantization).
"""

import functools
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from fasttfm.cpu import step_passes

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
        self.multiply = ROUTES[route() or _SLOW](quantized, scales)
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


Multiply = Callable[[Tensor], Tensor]
"""int8 rows (M, K) -> their sums with a weight (M, N) float32, scaled by output."""


def _onednn(quantized: Tensor, scales: Tensor) -> Multiply:
    """oneDNN's product of unsigned rows, which are 128 more than ours: signed ones take its reference path on
    processors that have VNNI but not AMX, a thousand times slower."""
    packed = torch.ops.onednn.qlinear_prepack(quantized, None)
    zeros = torch.zeros(scales.shape[0], dtype=torch.int64)

    def multiply(rows: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            rows.view(torch.uint8) ^ 128, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return multiply


def _torch(quantized: Tensor, scales: Tensor) -> Multiply:
    transposed = quantized.t()
    return lambda rows: torch._int_mm(rows, transposed).float() * scales


def _float64(quantized: Tensor, scales: Tensor) -> Multiply:
    weight = quantized.double()
    return lambda rows: torch.nn.functional.linear(rows.double(), weight).float() * scales


ROUTES: dict[str, Callable[[Tensor, Tensor], Multiply]] = {
    "onednn.qlinear_pointwise": _onednn,
    "torch._int_mm": _torch,
    "float64": _float64,
}
"""Operator -> what makes a product of a weight (N, K) int8 and its scales (N,) float32; the preferred one first."""
_SLOW = "float64"
"""Exact everywhere and faster nowhere: what Int8Product takes where route() finds none."""
_SHAPE = 32, 512, 256
"""Rows, inputs and outputs of the product that is timed."""
_CALLS = 7


@functools.cache
def route() -> str | None:
    """The operator of ROUTES that multiplies exactly and faster than float32 here; None where there is none.

    Some processors saturate sums of two products at 16 bits, some operators have no fast path for a processor, and
    no documentation promises either operator: so products of the largest values are held against exact ones, then
    timed. Takes some milliseconds, once in a process.
    """
    for name in exact_routes():
        if name != _SLOW and _seconds(ROUTES[name], *_SHAPE) < _float_seconds(*_SHAPE):
            return name
    return None


def exact_routes() -> list[str]:
    """The operators of ROUTES whose products are exact on this processor, with this torch."""
    return [name for name, make in ROUTES.items() if _is_exact(make)]


@functools.cache
def warn_without_route() -> None:
    """Warn, once in a process, that int8 is computed in float32 where route() is None."""
    if route() is None:
        warnings.warn(
            "this processor has no product of 8-bit integers that is exact and faster than float32: int8 computes in "
            "float32 here",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_exact(make: Callable[[Tensor, Tensor], Multiply]) -> bool:
    """Return whether products of the largest and of random values are exact; False where the operator is missing."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.tensor([1, -1, 1, 1, -1], dtype=torch.int8)
    for rows, inputs, outputs in ((3, 96, 64), (17, 512, 80)):
        scales = torch.linspace(0.5, 2.0, outputs)
        largest = torch.full((rows, inputs), LARGEST, dtype=torch.int8) * signs.repeat(rows)[:rows, None]
        weight = torch.full((outputs, inputs), LARGEST, dtype=torch.int8) * signs.repeat(outputs)[:outputs, None]
        random = [
            torch.randint(-LARGEST, LARGEST + 1, (count, inputs), generator=generator).to(torch.int8)
            for count in (rows, outputs)
        ]
        for given, multiplied in ((largest, weight), tuple(random), (largest, random[1]), (random[0], weight)):
            try:
                actual = make(multiplied, scales)(given)
            except (RuntimeError, AttributeError, NotImplementedError):
                return False
            if not torch.equal(actual, _float64(multiplied, scales)(given)):
                return False
    return True


def _seconds(make: Callable[[Tensor, Tensor], Multiply], rows: int, inputs: int, outputs: int) -> float:
    """The least time of a product."""
    given = torch.ones(rows, inputs, dtype=torch.int8)
    product = make(torch.ones(outputs, inputs, dtype=torch.int8), torch.ones(outputs))
    return _least_seconds(lambda: product(given))


def _float_seconds(rows: int, inputs: int, outputs: int) -> float:
    """The least time of the same product in float32."""
    x, weight = torch.ones(rows, inputs), torch.ones(outputs, inputs)
    return _least_seconds(lambda: torch.nn.functional.linear(x, weight))


def _least_seconds(call: Callable[[], Tensor]) -> float:
    call()  # makes what the library keeps
    least = float("inf")
    for _ in range(_CALLS):
        begin = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - begin)
    return least
