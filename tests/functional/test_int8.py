"""Products in 8-bit integers: the same bits by every route, and no row that depends on another."""

from __future__ import annotations

import pytest
import torch

from fasttfm.functional import int8, step_passes
from fasttfm.functional.int8 import Int8Product, dequantize, quantize
from fasttfm.functional.linear import frozen_weights, linear

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
def test_a_row_is_at_most_half_a_step_away(route, dtype):
    x = rows_of(9, 70, dtype)
    quantized, scales = quantize(x)
    assert quantized.dtype == torch.int8
    assert quantized.abs().amax(dim=1).tolist() == [127] * 4 + [0] + [127] * 4
    assert ((dequantize(quantized, scales) - x.float()).abs() <= 0.5001 * scales[:, None]).all()
    repeated, _ = quantize(dequantize(quantized, scales))
    assert torch.equal(repeated, quantized)


def test_routes_give_the_same_bits(monkeypatch):
    if not step_passes.usable():
        pytest.skip("numba is not installed")
    weight, bias = rows_of(33, 70), torch.linspace(-1, 1, 33)
    results = []
    for compiled, onednn in ((True, True), (False, True), (True, False), (False, False)):
        monkeypatch.setattr(step_passes, "usable", lambda compiled=compiled: compiled)
        monkeypatch.setattr(int8, "onednn_multiplies", lambda onednn=onednn: onednn)
        for dtype in (torch.float32, torch.bfloat16):
            product = Int8Product(weight.to(dtype), bias, relu=True)
            results.append(product(rows_of(20, 70, dtype)))
    for dtype, first in zip((torch.float32, torch.bfloat16), results):
        assert first.dtype == dtype
        assert (first == 0).any()
        same = [each for each in results if each.dtype == dtype]
        assert len(same) == 4
        assert all(torch.equal(each, first) for each in same)


def test_sums_are_exact_and_rows_keep_to_themselves(route):
    weight, x = rows_of(64, 2048), rows_of(130, 2048)
    quantized, scales = quantize(x)
    weights, weight_scales = quantize(weight)
    exact = quantized.double() @ weights.double().T
    expected = exact.float() * weight_scales * scales[:, None]
    product = Int8Product(weight, None, relu=False)
    assert torch.equal(product(x), expected)
    for count in (1, 3, 129):
        assert torch.equal(product(x[-count:]), expected[-count:])


def test_what_is_no_number_stays_none(route):
    x = rows_of(3, 32)
    x[1, 4] = torch.nan
    x[2, 5] = torch.inf
    y = Int8Product(rows_of(8, 32), None, relu=False)(x)
    assert y[0].isfinite().all()
    assert not y[1:].isfinite().any()


def test_linear_multiplies_integers_where_it_is_told_to():
    layer = torch.nn.Linear(64, 48)
    x = rows_of(5, 64)
    with torch.inference_mode():
        with frozen_weights(layer, int8=True):
            actual = linear(x, layer.weight, layer.bias, relu=True)
        with frozen_weights(layer):
            plain = linear(x, layer.weight, layer.bias, relu=True)
    assert torch.equal(actual, Int8Product(layer.weight, layer.bias, relu=True)(x))
    assert not torch.equal(actual, plain)
    assert torch.allclose(actual, plain, atol=0.03 * float(plain.max()))
