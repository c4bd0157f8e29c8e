"""Matrix products in 8-bit integers: a scale for each output of the weight, and one for each row of the input.

    y[m, n] = (sum_k (r[m, k] - 128) w[n, k]) * weight_scale[n] * row_scale[m] + bias[n]

r = 128 + round(x / row_scale) with row_scale = max |x| / 127 of the row alone. The weight's inputs are paired, 0 with
1, 2 with 3 and so on: an output's scale is the largest |a| + |b| of its pairs / 127, and so |a| + |b| <= 128 of the
integers. Then the r of two inputs, multiplied and added, fit 16 bits: processors that cannot add four products at once
(VNNI, AMX) add two, and would saturate. Sums of integers are exact, so a row does not depend on the rows beside it, nor
on which operator computes it. Not every operator is exact or fast on every processor: route() tries them. Rows are
quantized, and results scaled, in one pass each with numba, in several without, to the same bits.
Source: Dettmers et al. 2022, section 3.1 (vector-wise quantization).
"""

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm.cpu import step_passes

LARGEST, ZERO = 127, 128
"""The largest distance from zero, and the number that stands for zero in a row."""
_ROUNDING = 1e-9
"""Bound on float64's rounding error of a half."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 (M, K) and scales (M,) float32 of x (M, K): x is about (the one - ZERO) times the other, row by row.

    A row with NaN or infinity has a scale that is none of the numbers either.
    """
    if step_passes.takes(x):
        return step_passes.quantize_rows(x)
    wide = x.detach().float()
    most = wide.abs().amax(dim=1)
    inverse = torch.where(most > 0, LARGEST / most, 0.0)
    rounded = (wide * inverse[:, None]).round_().nan_to_num_(0.0).clamp_(-LARGEST, LARGEST)
    return (rounded + ZERO).to(torch.uint8), most / LARGEST


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 (N, K) and scales (N,) float32 of weight (N, K): weight is about the one times the other.

    A row with NaN or infinity has a scale that is none of the numbers either.
    """
    outputs, inputs = weight.shape
    pairs = torch.nn.functional.pad(weight.detach().double(), (0, inputs % 2)).view(outputs, -1, 2)
    most = pairs.abs().sum(dim=2).amax(dim=1)
    inverse = torch.where(most > 0, LARGEST / most, 0.0)
    first, second = (pairs.abs() * inverse[:, None, None] + 0.5 + _ROUNDING).floor().unbind(dim=2)
    second = second.minimum(LARGEST - first)  # of two halves one is rounded up, or the sum would not come back
    rounded = torch.stack([first, second], dim=2).copysign(pairs)
    rounded = rounded.nan_to_num_(0.0).clamp_(-LARGEST, LARGEST)
    return rounded.view(outputs, -1)[:, :inputs].to(torch.int8).contiguous(), (most / LARGEST).float()


def dequantize(quantized: Tensor, scales: Tensor) -> Tensor:
    """float32 (N, K) of a weight; quantized again it gives the same integers."""
    return quantized.float() * scales[:, None]


class Int8Product:
    """x (M, K) -> x weight^T + bias, then max(0, .) with relu: (M, N) of x's dtype; weight (N, K), bias (N,)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, relu: bool) -> None:
        quantized, scales = quantize_weight(weight)
        self.multiply = multiplier(quantized, scales)
        """uint8 rows (M, K) -> sums (M, N) float32, scaled by output."""
        self.bias = weight.new_zeros(weight.shape[0], dtype=torch.float32) if bias is None else bias.detach().float()
        self.relu = relu

    def __call__(self, x: Tensor) -> Tensor:
        rows, scales = quantize_rows(x)
        return _scale(self.multiply(rows), scales, self.bias, self.relu, x.dtype)


def _scale(y: Tensor, scales: Tensor, bias: Tensor, relu: bool, dtype: torch.dtype) -> Tensor:
    """y (M, N) float32 * scales (M,) + bias (N,)."""
    if step_passes.takes(y):
        return step_passes.scale_rows(y, scales, bias, relu, dtype)
    y = y * scales[:, None] + bias
    return (y.relu_() if relu else y).to(dtype)


Multiply = Callable[[Tensor], Tensor]
"""uint8 rows (M, K) -> their sums with a weight (M, N) float32, scaled by output."""


def _onednn(quantized: Tensor, scales: Tensor) -> Multiply:
    """oneDNN's product of unsigned rows: signed ones take its reference path on processors that have VNNI but not AMX,
    a thousand times slower."""
    packed = torch.ops.onednn.qlinear_prepack(quantized, None)
    zeros = scales.new_zeros(scales.shape[0], dtype=torch.int64)

    def multiply(rows: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, ZERO, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return multiply


def _torch(quantized: Tensor, scales: Tensor) -> Multiply:
    transposed = quantized.t()
    return lambda rows: torch._int_mm((rows ^ ZERO).view(torch.int8), transposed).float() * scales


def _panels(quantized: Tensor, scales: Tensor) -> Multiply:
    """Our own product, by VNNI or AVX2."""
    if not step_passes.usable():
        raise NotImplementedError("numba is not installed")
    from fasttfm.cpu import panels

    if not panels.multiplies_integers():
        raise NotImplementedError("the processor has no AVX2")
    fits = quantized.shape[1] % panels.UNROLLED == 0 and quantized.shape[1] < 1 << 16
    return panels.IntegerPanelProduct(quantized, scales) if fits else _float64(quantized, scales)


def _float64(quantized: Tensor, scales: Tensor) -> Multiply:
    weight = quantized.double()
    return lambda rows: torch.nn.functional.linear(rows.double() - ZERO, weight).float() * scales


ROUTES: dict[str, Callable[[Tensor, Tensor], Multiply]] = {
    "onednn.qlinear_pointwise": _onednn,
    "torch._int_mm": _torch,
    "panels": _panels,
    "float64": _float64,
}
"""Operator -> what makes a product of a weight (N, K) int8 and its scales (N,) float32."""
_FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
_SLOW = "float64"
"""Exact everywhere and faster nowhere: what Int8Product takes where route() finds none."""
_SHAPE = 32, 512, 256
"""Rows, inputs and outputs of the product that is timed."""
_CALLS = 25
_HOPELESS = 3.0
"""Times as long as the fastest: not timed again."""


@functools.cache
def route() -> str | None:
    """The operator of ROUTES that multiplies exactly and fastest here; None where float32 is faster than all.

    Some processors saturate sums of two products at 16 bits, some operators have no fast path for a processor, and
    no documentation promises either operator: so products of the largest values are held against exact ones, then
    timed, in turn, because other processes may take time from any. Takes some milliseconds, once in a process.
    """
    names = [name for name in exact_routes() if name != _SLOW]
    times = _least_seconds([*(_call(ROUTES[name], *_SHAPE) for name in names), *_float_calls(*_SHAPE)])
    best = min(range(len(times)), key=times.__getitem__)
    return names[best] if best < len(names) else None


def multiplier(quantized: Tensor, scales: Tensor) -> Multiply:
    """The product with a weight (N, K) int8 and its scales (N,) float32, by route() or exactly where there is none."""
    return ROUTES[route() or _SLOW](quantized, scales)


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
    signs = torch.tensor([1, -1, 1, 1, -1], device="cpu")
    for rows, inputs, outputs in ((3, 96, 64), (17, 512, 80)):
        scales = torch.linspace(0.5, 2.0, outputs, **_FLOAT)
        largest = LARGEST * signs.repeat(rows)[:rows, None].repeat(1, inputs)
        heaviest = ZERO // 2 * signs.repeat(outputs)[:outputs, None].repeat(1, inputs)
        uneven = heaviest.clone()  # as heavy a pair
        uneven[:, ::2], uneven[:, 1::2] = LARGEST * heaviest[:, ::2].sign(), heaviest[:, 1::2].sign()
        random = torch.randint(-LARGEST, LARGEST + 1, (rows, inputs), generator=generator, device="cpu")
        weight, _ = quantize_weight(torch.randn(outputs, inputs, generator=generator, **_FLOAT))
        for given, multiplied in ((largest, heaviest), (largest, uneven), (random, weight), (random, heaviest)):
            ready, factors = (given + ZERO).to(torch.uint8), multiplied.to(torch.int8)
            try:
                actual = make(factors, scales)(ready)
            except (RuntimeError, AttributeError, NotImplementedError):
                return False
            if not torch.equal(actual, _float64(factors, scales)(ready)):
                return False
    return True


def _call(make: Callable[[Tensor, Tensor], Multiply], rows: int, inputs: int, outputs: int) -> Callable[[], Tensor]:
    product = make(torch.ones(outputs, inputs, dtype=torch.int8, device="cpu"), torch.ones(outputs, **_FLOAT))
    given = torch.ones(rows, inputs, dtype=torch.uint8, device="cpu")
    return lambda: product(given)


def _float_calls(rows: int, inputs: int, outputs: int) -> list[Callable[[], Tensor]]:
    """The ways of linear.py to the same product in float32."""
    x, weight = torch.ones(rows, inputs, **_FLOAT), torch.ones(outputs, inputs, **_FLOAT)
    calls = [lambda: torch.nn.functional.linear(x, weight)]
    if step_passes.uses_panels():
        from fasttfm.cpu.panels import PanelProduct

        product = PanelProduct(weight, None, relu=False)
        calls.append(lambda: product(x))
    return calls


def _least_seconds(calls: Sequence[Callable[[], Tensor]]) -> list[float]:
    """The least time of each call."""
    for call in calls:
        call()  # makes what the library keeps
    times = [float("inf")] * len(calls)
    for turn in range(_CALLS):
        for n, call in enumerate(calls):
            if turn and times[n] > _HOPELESS * min(times):
                continue
            begin = time.perf_counter()
            call()
            times[n] = min(times[n], time.perf_counter() - begin)
    return times
