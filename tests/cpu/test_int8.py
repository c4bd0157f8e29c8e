"""Products in 8-bit integers: the same bits by panels and in float64, independent rows, float32 without them."""

import pytest
import torch

from fasttfm.cpu import int8, step_passes
from fasttfm.cpu.int8 import LARGEST, ZERO, Int8Product, dequantize, quantize_rows, quantize_weight
from fasttfm.cpu.linear import frozen_weights, linear

ROUTES = ("numba", "torch")


@pytest.fixture(params=ROUTES)
def route(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(step_passes, "usable", lambda: False)
    elif not step_passes.usable():
        pytest.skip("numba is not installed")
    return request.param


def rows_of(count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, width, generator=generator) * torch.logspace(-3, 3, count)[:, None]
    rows[count // 2] = 0.0
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda x: str(x)[6:])
def test_rows_are_quantized_to_half_a_step(route, dtype):
    x = rows_of(9, 70, dtype)
    quantized, scales = quantize_rows(x)
    assert quantized.dtype == torch.uint8
    distances = quantized.int() - ZERO
    assert distances.abs().amax(dim=1).tolist() == [LARGEST] * 4 + [0] + [LARGEST] * 4
    assert ((dequantize(distances, scales) - x.float()).abs() <= 0.5001 * scales[:, None]).all()


@pytest.mark.parametrize("inputs", [1, 2, 7, 70, 512])
@pytest.mark.parametrize("drawn", ["normal", "equal", "halves", "one", "extreme"])
def test_weights_are_quantized_to_half_a_step_and_pairs_fit_16_bits(inputs, drawn):
    weight = rows_of(9, inputs)
    if drawn == "equal":  # two halves in a pair
        weight = weight[:, :1].expand(9, inputs)
    elif drawn == "halves":
        weight = torch.tensor([62.5, -64.5]).repeat(9, inputs)[:, :inputs]
    elif drawn == "one":
        weight = torch.nn.functional.one_hot(torch.arange(9) % inputs, inputs) * -1e-20
    elif drawn == "extreme":
        weight = weight * torch.logspace(-33, 33, 9)[:, None]
    quantized, scales = quantize_weight(weight)
    assert quantized.dtype == torch.int8
    assert quantized.shape == weight.shape
    pairs = torch.nn.functional.pad(quantized.int().abs(), (0, inputs % 2)).view(9, -1, 2).sum(2).amax(1)
    assert ((pairs == LARGEST) | ((pairs == 0) & (weight == 0).all(1))).all()
    assert pairs.max() * 255 < 2**15
    distance = (quantized.double() * scales.double()[:, None] - weight.double()).abs()
    assert (distance <= 0.5001 * scales.double()[:, None]).all()
    for _ in range(3):  # requantizing is exact
        repeated, scales = quantize_weight(dequantize(quantized, scales))
        assert torch.equal(repeated, quantized)


@pytest.mark.parametrize("inputs", [64, 70, 72])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda x: str(x)[6:])
def test_panels_and_float64_give_the_same_bits(monkeypatch, inputs, dtype):
    if int8.route() is None:
        pytest.skip("needs numba and AVX2")
    weight, bias, x = rows_of(33, inputs, dtype), torch.linspace(-1, 1, 33), rows_of(20, inputs, dtype)
    ours = Int8Product(weight, bias, relu=True)(x)
    monkeypatch.setattr(step_passes, "usable", lambda: False)
    assert torch.equal(ours, Int8Product(weight, bias, relu=True)(x))
    assert ours.dtype == dtype
    assert (ours == 0).any()


def test_sums_are_exact_and_rows_independent(route):
    weight, x = rows_of(64, 2048), rows_of(130, 2048)
    quantized, scales = quantize_rows(x)
    weights, weight_scales = quantize_weight(weight)
    exact = (quantized.double() - ZERO) @ weights.double().T
    expected = exact.float() * weight_scales * scales[:, None]
    product = Int8Product(weight, None, relu=False)
    assert torch.equal(product(x), expected)
    for count in (1, 3, 129):
        assert torch.equal(product(x[-count:]), expected[-count:])


def test_rows_with_nan_or_inf_stay_not_finite(route):
    x = rows_of(3, 32)
    x[1, 4] = torch.nan
    x[2, 5] = torch.inf
    y = Int8Product(rows_of(8, 32), None, relu=False)(x)
    assert y[0].isfinite().all()
    assert not y[1:].isfinite().any()


def test_without_numba_int8_computes_in_float32_and_warns(monkeypatch):
    monkeypatch.setattr(step_passes, "usable", lambda: False)
    assert int8.route() is None
    layer, x = torch.nn.Linear(64, 48), rows_of(5, 64)
    with torch.inference_mode():
        with frozen_weights(layer, int8=True):
            actual = linear(x, layer.weight, layer.bias)
        with frozen_weights(layer):
            assert torch.equal(actual, linear(x, layer.weight, layer.bias))
    int8.warn_without_route.cache_clear()
    with pytest.warns(RuntimeWarning, match="computes in float32"):
        int8.warn_without_route()
