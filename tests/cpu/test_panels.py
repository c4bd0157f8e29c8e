"""Products with a packed weight: their numbers, batch-invariant bits, and memory bounds."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn import functional as nnF

pytest.importorskip("numba")

from fasttfm.cpu import amx
from fasttfm.cpu.int8 import LARGEST, ZERO, quantize_weight
from fasttfm.cpu.panel_tiles import _BLOCK, PANEL, TILE, UNROLLED
from fasttfm.cpu.panels import IntegerPanelProduct, PanelProduct, multiplies_integers, multiplies_pairs

BLOCK = _BLOCK // 4
"""Rows of a block in float32; four times as many in integers."""
BOUNDS = *range(15, 18), *range(31, 34), 48, 49, *range(BLOCK - 1, BLOCK + 2), 3 * BLOCK + 5, 4 * BLOCK, 4 * BLOCK + 1
ROWS = *range(2 * TILE + 2), *BOUNDS
needs_avx2 = pytest.mark.skipif(not multiplies_integers(), reason="needs AVX2")
needs_pairs = pytest.mark.skipif(not multiplies_pairs(), reason="needs AVX512_BF16")
TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-8, "uint8": 0.0}
kinds = pytest.mark.parametrize(
    "kind", ["float32", pytest.param("bfloat16", marks=needs_pairs), pytest.param("uint8", marks=needs_avx2)]
)


def example(kind, inputs, outputs, with_bias=False, relu=False):
    """A product, max(ROWS) rows for it, and their exact results."""
    if kind == "uint8":
        weight, _ = quantize_weight(torch.randn(outputs, inputs))
        weight[0] = ZERO // 2  # with the largest rows, the largest possible sums
        weight[-1, ::2], weight[-1, 1::2] = -LARGEST, -1
        scales = torch.linspace(0.5, 2.0, outputs)
        x = torch.randint(1, 256, (max(ROWS), inputs), dtype=torch.uint8)
        x[: max(ROWS) // 2 : 2], x[1 : max(ROWS) // 2 : 2] = 255, 1
        return IntegerPanelProduct(weight, scales), x, ((x.double() - ZERO) @ weight.double().T).float() * scales
    shapes = (max(ROWS), inputs), (outputs, inputs), (outputs,)
    x, weight, bias = (torch.randn(*shape).to(getattr(torch, kind)) for shape in shapes)
    x[5, 2], x[6, 3] = float("nan"), float("inf")
    expected = nnF.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    return PanelProduct(weight, bias if with_bias else None, relu), x, expected.relu() if relu else expected


@pytest.mark.parametrize("outputs", [1, PANEL - 1, PANEL, PANEL + 1, 8 * PANEL + 9])
@pytest.mark.parametrize(("with_bias", "relu"), [(False, False), (True, True)], ids=["plain", "bias and relu"])
@kinds
def test_products_are_accurate_and_a_row_has_the_same_bits_in_any_batch(threads, kind, with_bias, relu, outputs):
    for inputs in (UNROLLED, 52, 516, 2048 if kind == "uint8" else 512):
        product, x, expected = example(kind, inputs, outputs, with_bias, relu)
        threads(1)
        alone = torch.cat([product(row[None]) for row in x])
        bounds = {"rtol": TOLERANCE[kind], "atol": min(TOLERANCE[kind], 1e-5) * inputs**0.5}
        torch.testing.assert_close(alone.double(), expected.double(), equal_nan=True, **bounds)
        for count in (1, 2, 3):
            threads(count)
            for rows in ROWS:
                for part in (slice(0, rows), slice(len(x) - rows, len(x))):
                    same = torch.equal(product(x[part]).view(torch.uint8), alone[part].view(torch.uint8))
                    assert same, (inputs, count, rows)


@needs_avx2
@pytest.mark.sample(1)
@pytest.mark.parametrize("without", ["avx512 avxvnni", "avx512vnni avxvnni amx"])
def test_older_processors_compute_the_same(tmp_path, without):
    """In a process whose numba sees this processor without AVX-512, or without VNNI."""
    lines = f"""
        from llvmlite import binding
        features = binding.get_host_cpu_features()
        features.update((each, False) for each in features if each.startswith(tuple("{without}".split())))
        binding.get_host_cpu_features = lambda: features
        import torch
        from fasttfm.cpu import amx, panel_tiles, panels
        from fasttfm.cpu.int8 import quantize_weight
        assert not panel_tiles.adds_four_products() and not amx.usable()
        x, (weight, _) = torch.randint(1, 256, (13, 48), dtype=torch.uint8), quantize_weight(torch.randn(70, 48))
        x[0], weight[0], weight[1, ::2], weight[1, 1::2] = 255, 64, -127, -1  # the largest possible sums
        exact = ((x.double() - 128) @ weight.double().T).float()
        assert torch.equal(panels.IntegerPanelProduct(weight, torch.ones(70))(x), exact)
        weight, x = torch.randn(70, 48), torch.randn(13, 48)
        for rows in range(14):
            y = panels.PanelProduct(weight, None, relu=False)(x[:rows])
            torch.testing.assert_close(y, x[:rows] @ weight.T, rtol=1e-5, atol=1e-5)
        """
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(lines)], env=environment, check=True)


@pytest.mark.parametrize("outputs", [PANEL, PANEL + 3, 2 * PANEL - 1])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 17, 33, BLOCK + 1])
@pytest.mark.parametrize("inputs", [48, 64])
@kinds
def test_nothing_is_written_outside_the_output(kind, inputs, rows, outputs):
    product, x, _ = example(kind, inputs, outputs)
    around = torch.full((rows + 4, outputs), 7.0, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    product(x[-rows:], out=around[2:-2])
    assert (around[:2] == 7).all()
    assert (around[-2:] == 7).all()
    assert (around[2:-2] != 7).any(axis=1).all()


@pytest.mark.skipif(not amx.usable(), reason="needs AMX")
@pytest.mark.parametrize("kind", ["bfloat16", "uint8"])
def test_tiles_agree_with_vectors_and_are_used_for_whole_lines(monkeypatch, kind):
    assert [amx.takes(count) for count in (64, 96, 128, 1000)] == [True, False, True, False]
    for inputs, outputs in ((64, 33), (192, PANEL), (512, 3 * PANEL + 1)):
        product, x, _ = example(kind, inputs, outputs, kind == "bfloat16", kind == "bfloat16")
        x = x[8:]  # without NaN
        assert product.launch(x, product(x))[0] is amx.multiply
        tiles = product(x)
        with monkeypatch.context() as changed:
            changed.setattr(amx, "takes", lambda count: False)
            # two roundings to bfloat16 of sums in another order: one unit in the last place apart at most
            torch.testing.assert_close(tiles, product(x), rtol=2 * TOLERANCE[kind], atol=TOLERANCE[kind])
