"""Products in 8-bit integers: the same bits on every backend, independent rows, and the choice of the backend."""

import itertools
import time
import warnings

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
        monkeypatch.setattr(int8, "route", lambda: None)
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


def test_the_scale_of_a_weight_row_with_nan_or_inf_is_not_finite():
    weight = rows_of(3, 8)
    weight[0, 2], weight[1, 3] = torch.nan, torch.inf
    assert quantize_weight(weight)[1].isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("inputs", [64, 70, 72])
def test_backends_give_the_same_bits(monkeypatch, inputs):
    if not step_passes.usable():
        pytest.skip("numba is not installed")
    weight, bias = rows_of(33, inputs), torch.linspace(-1, 1, 33)
    results, routes = [], int8.exact_routes()
    for compiled, name in itertools.product((True, False), routes):
        if name == "panels" and not compiled:
            continue
        monkeypatch.setattr(step_passes, "usable", lambda compiled=compiled: compiled)
        monkeypatch.setattr(int8, "route", lambda name=name: name)
        for dtype in (torch.float32, torch.bfloat16):
            product = Int8Product(weight.to(dtype), bias, relu=True)
            results.append(product(rows_of(20, inputs, dtype)))
    for dtype, first in zip((torch.float32, torch.bfloat16), results):
        assert first.dtype == dtype
        assert (first == 0).any()
        same = [each for each in results if each.dtype == dtype]
        assert len(same) == 2 * len(routes) - ("panels" in routes)
        assert all(torch.equal(each, first) for each in same)


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


def test_linear_multiplies_integers_with_int8(monkeypatch):
    layer = torch.nn.Linear(64, 48)
    x = rows_of(5, 64)
    monkeypatch.setattr(int8, "route", lambda: int8.exact_routes()[0])
    with torch.inference_mode():
        with frozen_weights(layer, int8=True):
            actual = linear(x, layer.weight, layer.bias, relu=True)
        with frozen_weights(layer):
            plain = linear(x, layer.weight, layer.bias, relu=True)
    assert torch.equal(actual, Int8Product(layer.weight, layer.bias, relu=True)(x))
    assert not torch.equal(actual, plain)
    assert torch.allclose(actual, plain, atol=0.03 * float(plain.max()))


@pytest.fixture
def choosing(monkeypatch):
    """Calls route() anew with these backends and float64."""

    def choose(**backends):
        monkeypatch.setattr(int8, "ROUTES", {**backends, "float64": int8._float64})
        int8.route.cache_clear()
        return int8.route()

    yield choose
    int8.route.cache_clear()


def slowly(quantized, scales):
    product = int8._float64(quantized, scales)

    def multiply(rows):
        time.sleep(0.05)
        return product(rows)

    return multiply


def saturating(quantized, scales, together=4):
    """Sums of `together` products saturated to 16 bits; processors without VNNI add two."""

    def multiply(rows):
        terms = rows.int()[:, None, :] * quantized.int()[None]
        sums = terms.unflatten(-1, (-1, together)).sum(-1).clamp(-(2**15), 2**15 - 1)
        return (sums.sum(-1) - ZERO * quantized.int().sum(-1)).float() * scales

    return multiply


def test_sums_of_two_products_do_not_saturate():
    assert int8._is_exact(lambda *weight: saturating(*weight, together=2))
    assert not int8._is_exact(saturating)


def absent(quantized, scales):
    raise NotImplementedError("no such operator")


def at_once(quantized, scales):
    """Exact, and faster than anything: results of the timed shape are precomputed."""
    product, ready = int8._float64(quantized, scales), torch.zeros(int8._SHAPE[0], int8._SHAPE[2])
    timed = (quantized.shape[0], quantized.shape[1]) == (int8._SHAPE[2], int8._SHAPE[1])
    return (lambda rows: ready) if timed else product


def test_the_backend_is_the_fastest_exact_one(choosing):
    assert choosing(first=slowly, second=at_once) == "second"
    assert choosing(first=at_once, second=slowly) == "first"
    assert choosing(first=saturating, second=at_once) == "second"
    assert choosing(first=absent, second=at_once) == "second"


def test_our_own_product_needs_no_timing(choosing):
    """Beside other processes the timed calls may name any backend, and float32 gives other numbers."""
    assert choosing(first=at_once, panels=slowly) == "panels"
    assert choosing(first=at_once, panels=saturating) == "first"


def test_a_backend_that_was_interrupted_once_is_timed_again():
    calls = iter([0.0, 0.05] + 30 * [0.0])  # warm-up, then the first turn
    times = int8._least_seconds([lambda: time.sleep(0.001), lambda: time.sleep(next(calls))])
    assert times[1] < times[0]


def test_without_an_exact_and_fast_backend_int8_computes_in_float32_and_warns_once(choosing):
    assert choosing(first=slowly, second=saturating) is None
    layer, x = torch.nn.Linear(64, 48), rows_of(5, 64)
    with torch.inference_mode():
        with frozen_weights(layer, int8=True):
            actual = linear(x, layer.weight, layer.bias)
        with frozen_weights(layer):
            assert torch.equal(actual, linear(x, layer.weight, layer.bias))
    int8.warn_without_route.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        int8.warn_without_route()
        int8.warn_without_route()
    assert ["computes in float32" in str(each.message) for each in caught] == [True]
    int8.warn_without_route.cache_clear()
    assert choosing(first=at_once) == "first"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        int8.warn_without_route()
