"""Products of panels: the numbers of float64, the same bits beside any rows, and nothing written outside of them; of
integers exactly."""

import itertools
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch.nn import functional as nnF

pytest.importorskip("numba")

from fasttfm.cpu import linear as linear_module
from fasttfm.cpu import step_passes
from fasttfm.cpu.int8 import LARGEST, ZERO, quantize_weight
from fasttfm.cpu.linear import FrozenLinear, frozen_weights
from fasttfm.cpu.panels import (
    _BLOCK,
    PANEL,
    TILE,
    UNROLLED,
    IntegerPanelProduct,
    PanelProduct,
    _multiply,
    multiplies_integers,
    multiplies_pairs,
    team,
)

BLOCK = _BLOCK // 4
"""Rows of a block in float32; of integers it is four times as many."""
ROWS = (*range(2 * TILE + 2), 31, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)
needs_avx2 = pytest.mark.skipif(not multiplies_integers(), reason="needs AVX2")
needs_pairs = pytest.mark.skipif(not multiplies_pairs(), reason="needs AVX512_BF16")


def product_of(inputs=48, outputs=40, bias=True, relu=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    given = torch.randn(outputs, generator=generator) if bias else None
    return weight, given, PanelProduct(weight, given, relu)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [1, PANEL - 1, PANEL, PANEL + 1, 8 * PANEL + 9])
def test_it_is_the_product_of_float64_for_any_number_of_rows(outputs, bias, relu):
    for inputs in (UNROLLED, 52, 516):
        weight, given, product = product_of(inputs, outputs, bias, relu)
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            expected = nnF.linear(x.double(), weight.double(), None if given is None else given.double())
            expected = expected.relu() if relu else expected
            torch.testing.assert_close(product(x).double(), expected, rtol=1e-5, atol=1e-5 * inputs**0.5)


def test_a_row_has_the_same_bits_beside_any_others_and_with_any_number_of_threads(threads):
    _, _, product = product_of(512, 200)
    x = torch.randn(700, 512) * torch.exp2(torch.randint(-6, 7, (700, 512)))
    threads(1)
    alone = torch.cat([product(row[None]) for row in x])
    for count in (1, 2, 3):
        threads(count)
        for rows in (*ROWS, len(x)):
            assert torch.equal(product(x[:rows]), alone[:rows]), (count, rows)
            assert torch.equal(product(x[len(x) - rows :]), alone[len(x) - rows :]), (count, rows)


def test_rows_that_are_a_view_and_a_weight_that_needs_a_gradient():
    weight, bias, _ = product_of()
    product = PanelProduct(weight.requires_grad_(), bias.requires_grad_(), False)
    x = torch.randn(48, 9).t()
    torch.testing.assert_close(product(x), nnF.linear(x, weight, bias).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_stay_in_their_row(value):
    weight, bias, product = product_of(relu=True)
    x = torch.randn(20, 48)
    x[7, 5] = value
    expected = nnF.linear(x, weight, bias).relu()
    torch.testing.assert_close(product(x), expected, rtol=1e-5, atol=1e-4, equal_nan=True)


@needs_pairs
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("outputs", [1, PANEL - 1, PANEL, PANEL + 1, 8 * PANEL + 9])
def test_of_bfloat16_it_is_the_product_rounded_once_whatever_stands_beside_a_row(threads, outputs, relu):
    for inputs in (UNROLLED, 52, 516):
        weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16()
        product, x = PanelProduct(weight, bias, relu), torch.randn(2 * BLOCK + 3, inputs).bfloat16()
        x[5, 2], x[6, 3] = float("nan"), float("inf")
        expected = nnF.linear(x.double(), weight.double(), bias.double())
        expected = expected.relu() if relu else expected
        threads(1)
        alone = torch.cat([product(row[None]) for row in x])
        torch.testing.assert_close(alone.double(), expected, rtol=2**-8, atol=1e-5 * inputs**0.5, equal_nan=True)
        threads(3)
        for rows in (*ROWS, len(x)):
            assert torch.equal(product(x[:rows]).view(torch.int16), alone[:rows].view(torch.int16)), rows


@needs_avx2
@pytest.mark.parametrize("outputs", [1, PANEL - 1, PANEL, PANEL + 1, 8 * PANEL + 9])
@pytest.mark.parametrize("inputs", [UNROLLED, 52, 2048])
def test_of_integers_it_is_exact_for_any_number_of_rows_and_threads(threads, inputs, outputs):
    weight, _ = quantize_weight(torch.randn(outputs, inputs))
    weight[0] = ZERO // 2  # with the largest rows the heaviest sums that there can be
    weight[-1, ::2], weight[-1, 1::2] = -LARGEST, -1
    scales = torch.linspace(0.5, 2.0, outputs)
    product = IntegerPanelProduct(weight, scales)
    for rows in (*ROWS, 4 * BLOCK, 4 * BLOCK + 1):
        x = torch.randint(1, 256, (rows, inputs), dtype=torch.uint8)
        x[: rows // 2 : 2], x[1 : rows // 2 : 2] = 255, 1
        expected = ((x.double() - ZERO) @ weight.double().T).float() * scales
        for count in (1, 3):
            threads(count)
            assert torch.equal(product(x), expected), (rows, count)


@needs_avx2
@pytest.mark.sample(1)
@pytest.mark.parametrize("without", ["avx512 avxvnni", "avx512vnni avxvnni"])
def test_older_processors_multiply_the_same(tmp_path, without):
    """In a process whose numba sees this processor without AVX-512, or without VNNI."""
    lines = f"""
        from llvmlite import binding
        features = binding.get_host_cpu_features()
        features.update((each, False) for each in features if each.startswith(tuple("{without}".split())))
        binding.get_host_cpu_features = lambda: features
        import torch
        from fasttfm.cpu import int8, panels
        assert not panels.adds_four_products()
        assert int8._is_exact(int8.ROUTES["panels"])
        weight, x = torch.randn(70, 48), torch.randn(13, 48)
        for rows in range(14):
            y = panels.PanelProduct(weight, None, relu=False)(x[:rows])
            torch.testing.assert_close(y, x[:rows] @ weight.T, rtol=1e-5, atol=1e-5)
        """
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(lines)], env=environment, check=True)


@pytest.mark.parametrize("outputs", [PANEL, PANEL + 3, 2 * PANEL - 1])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, BLOCK + 1])
@pytest.mark.parametrize(
    "kind", ["float32", pytest.param("uint16", marks=needs_pairs), pytest.param("uint8", marks=needs_avx2)]
)
def test_nothing_is_written_before_or_behind_the_output(kind, rows, outputs):
    product = product_of(48, outputs)[2]
    if kind == "uint16":
        product = PanelProduct(torch.ones(outputs, 48).bfloat16(), None, relu=False)
    if kind == "uint8":
        product = IntegerPanelProduct(torch.ones(outputs, 48, dtype=torch.int8), torch.ones(outputs))
    around = np.full((rows + 4, outputs), 7, np.uint16 if kind == "uint16" else np.float32)
    x = np.full((rows, 48), 0x3F80 if kind == "uint16" else 130, kind)  # 1.0
    _multiply(team(), x, product._panels, product._of_outputs, False, around[2:-2])
    assert (around[:2] == 7).all()
    assert (around[-2:] == 7).all()
    assert (around[2:-2] != 7).any(axis=1).all()


def test_weights_share_memory_in_which_each_begins_with_a_cache_line_and_none_reaches_into_another():
    products = [product_of(UNROLLED * (n + 1), 200 * n + 1)[2] for n in range(6)]
    spans = sorted((each._panels.ctypes.data, each._panels.ctypes.data + each._panels.nbytes) for each in products)
    assert all(begin % 64 == 0 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


@pytest.mark.parametrize(("inputs", "taken"), [(256, True), (254, False)])
def test_linear_takes_it_where_the_processor_is_one_that_it_was_measured_on(monkeypatch, inputs, taken):
    layer = torch.nn.Linear(inputs, 256)
    x = torch.randn(3, inputs)
    for processors, expected in (((torch.backends.cpu.get_cpu_capability(),), taken), ((), False)):
        monkeypatch.setattr(step_passes, "PANELS", processors)
        with torch.inference_mode(), frozen_weights(torch.nn.Sequential(layer), batch_invariant=True):
            linear_module.on_this_thread.kept.clear()
            product = FrozenLinear(layer.weight, layer.bias)
            assert isinstance(product._product, PanelProduct) == expected
            assert product.size(3) == 3 or not expected, "rows are not filled up"
            torch.testing.assert_close(product.of_rows(3)(x), layer(x), rtol=1e-5, atol=1e-5)
