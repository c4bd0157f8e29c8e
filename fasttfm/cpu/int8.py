"""Matrix products in 8-bit integers, with one scale per weight output and one per input row.

    y[m, n] = (sum_k (r[m, k] - 128) w[n, k]) * weight_scale[n] * row_scale[m] + bias[n]

r = 128 + round(x / row_scale), row_scale = max |x| / 127 of the row. Adjacent inputs of the weight form pairs, (0, 1),
(2, 3) and so on: an output's scale is the largest |a| + |b| of its pairs / 127, so that the quantized |a| + |b| <= 128.
Then the sum of two products fits 16 bits: processors without an instruction for four products (VNNI, AMX) add two at a
time, and would saturate. Integer sums are exact, so the result of a row depends neither on the rest of the batch nor on
the operator. Not every operator is exact or fast on every processor: route() tries them. Quantizing rows and scaling
results is one pass each with numba, several without, with the same bits.
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


Multiply = Callable[[Tensor], Tensor]
"""From uint8 rows (M, K) to their sums with a weight, (M, N) float32, scaled by output."""


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
    from fasttfm.cpu.panel_tiles import UNROLLED
    from fasttfm.cpu.panels import IntegerPanelProduct, multiplies_integers

    if not multiplies_integers():
        raise NotImplementedError("the processor has no AVX2")
    fits = quantized.shape[1] % UNROLLED == 0 and quantized.shape[1] < 1 << 16
    return IntegerPanelProduct(quantized, scales) if fits else _float64(quantized, scales)


def _float64(quantized: Tensor, scales: Tensor) -> Multiply:
    weight = quantized.double()
    return lambda rows: torch.nn.functional.linear(rows.double() - ZERO, weight).float() * scales


ROUTES: dict[str, Callable[[Tensor, Tensor], Multiply]] = {
    "onednn.qlinear_pointwise": _onednn,
    "torch._int_mm": _torch,
    "panels": _panels,
    "float64": _float64,
}
"""Backend -> function from a weight (N, K) int8 and its scales (N,) float32 to their product."""
_FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
_PANELS, _SLOW = "panels", "float64"
"""Exact on every processor, fast on none: the fallback of Int8Product where route() is None."""
_SHAPE = 32, 512, 256
"""Rows, inputs and outputs of the timed product."""
_CALLS = 25
_HOPELESS, _CHANCES = 3.0, 3
"""A backend this many times slower than the fastest in so many turns is not timed again; one may be an accident."""


@functools.cache
def route() -> str | None:
    """The backend of ROUTES that computes in int8 on this machine; None for float32.

    Our own panels where they are exact: they were the fastest, float32 included, on every processor measured. Else the
    fastest exact one, or None if float32 is faster than all of them.

    Some processors saturate sums of two products at 16 bits, some operators have no fast path for a processor, and
    neither operator is documented: so products of extreme values are compared with exact ones, then timed. The timed
    calls alternate, because other processes may slow any of them. Takes some milliseconds, once per process.
    """
    names = [name for name in exact_routes() if name != _SLOW]
    if _PANELS in names:
        return _PANELS
    times = _least_seconds([*(_call(ROUTES[name], *_SHAPE) for name in names), *_float_calls(*_SHAPE)])
    best = min(range(len(times)), key=times.__getitem__)
    return names[best] if best < len(names) else None


def multiplier(quantized: Tensor, scales: Tensor) -> Multiply:
    """The product with a weight (N, K) int8 and its scales (N,) float32, by route() or an exact fallback."""
    return ROUTES[route() or _SLOW](quantized, scales)


def exact_routes() -> list[str]:
    """The backends of ROUTES whose products are exact on this processor, with this torch."""
    return [name for name, make in ROUTES.items() if _is_exact(make)]


@functools.cache
def warn_without_route() -> None:
    """Warn, once per process, that int8 is computed in float32 because route() is None."""
    if route() is None:
        warnings.warn(
            "int8 computes in float32: no 8-bit product on this processor is both exact and faster than float32",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_exact(make: Callable[[Tensor, Tensor], Multiply]) -> bool:
    """Return whether products of extreme and of random values are exact; False if the operator is missing."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.tensor([1, -1, 1, 1, -1], device="cpu")
    for rows, inputs, outputs in ((3, 96, 64), (17, 512, 80)):
        scales = torch.linspace(0.5, 2.0, outputs, **_FLOAT)
        largest = LARGEST * signs.repeat(rows)[:rows, None].repeat(1, inputs)
        heaviest = ZERO // 2 * signs.repeat(outputs)[:outputs, None].repeat(1, inputs)
        uneven = heaviest.clone()  # pairs of the same sum
        uneven[:, ::2], uneven[:, 1::2] = LARGEST * heaviest[:, ::2].sign(), heaviest[:, 1::2].sign()
        random = torch.randint(-LARGEST, LARGEST + 1, (rows, inputs), generator=generator, device="cpu")
        weight, _ = quantize_weight(torch.randn(outputs, inputs, generator=generator, **_FLOAT))
        for x, w in ((largest, heaviest), (largest, uneven), (random, weight), (random, heaviest)):
            x, w = (x + ZERO).to(torch.uint8), w.to(torch.int8)
            try:
                actual = make(w, scales)(x)
            except (RuntimeError, AttributeError, NotImplementedError):
                return False
            if not torch.equal(actual, _float64(w, scales)(x)):
                return False
    return True


def _call(make: Callable[[Tensor, Tensor], Multiply], rows: int, inputs: int, outputs: int) -> Callable[[], Tensor]:
    product = make(torch.ones(outputs, inputs, dtype=torch.int8, device="cpu"), torch.ones(outputs, **_FLOAT))
    x = torch.ones(rows, inputs, dtype=torch.uint8, device="cpu")
    return lambda: product(x)


def _float_calls(rows: int, inputs: int, outputs: int) -> list[Callable[[], Tensor]]:
    """The same product in float32 by each backend of linear.py."""
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
        call()  # warm-up: libraries build their primitives
    times = [float("inf")] * len(calls)
    for turn in range(_CALLS):
        for n, call in enumerate(calls):
            if turn >= _CHANCES and times[n] > _HOPELESS * min(times):
                continue
            begin = time.perf_counter()
            call()
            times[n] = min(times[n], time.perf_counter() - begin)
    return times
