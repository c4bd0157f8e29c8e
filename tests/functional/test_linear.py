"""Linear layers with frozen weights compute what torch's do, and forget the weights when the block ends."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as nnF

from fasttfm.functional import linear as module
from fasttfm.functional.linear import frozen, frozen_weights, linear

helped = pytest.mark.skipif(not module._usable(), reason="this torch or processor has no oneDNN to lay weights out for")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}


def layer(rows=(3, 5), inputs=192, outputs=256, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(outputs, inputs, dtype=dtype))
    bias = torch.nn.Parameter(torch.randn(outputs, dtype=dtype))
    return torch.randn(*rows, inputs, dtype=dtype), weight, bias


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_use_in_a_block_gives_what_torch_gives(dtype, with_bias, relu):
    x, weight, bias = layer(dtype=dtype)
    bias = bias if with_bias else None
    with torch.inference_mode(), frozen_weights():
        expected = nnF.linear(x.double(), weight.double(), None if bias is None else bias.double())
        expected = expected.relu() if relu else expected
        for _ in range(3):  # noted, laid out, used again
            found = linear(x, weight, bias, relu=relu)
            assert (found.shape, found.dtype) == (expected.shape, dtype)
            torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])


@helped
def test_views_of_one_parameter_are_weights_of_their_own():
    x, weight, bias = layer(outputs=768)
    with torch.inference_mode(), frozen_weights():
        for _ in range(3):
            for part in (slice(0, 256), slice(256, 768), slice(0, 768)):
                torch.testing.assert_close(
                    linear(x, weight[part], bias[part]), nnF.linear(x, weight[part], bias[part]), rtol=1e-5, atol=1e-4
                )


@helped
def test_the_second_use_lays_out_and_the_end_of_the_block_forgets(monkeypatch):
    x, weight, bias = layer()
    laid_out = []
    packed = module._packed

    def watch(*arguments):
        made = packed(*arguments)
        laid_out.append(made[0] is not None and made[0].is_mkldnn)
        return made

    monkeypatch.setattr(module, "_packed", watch)
    for _ in range(2):
        with torch.inference_mode(), frozen_weights():
            first = linear(x, weight, bias)
            second = linear(x, weight, bias)
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-4)
        with torch.no_grad():
            weight.mul_(2.0)  # what was kept of the old weight must not answer for the new one
    assert laid_out == [False, True, False, True]


@helped
def test_autocast_is_obeyed():
    x, weight, bias = layer()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), frozen_weights():
        for _ in range(3):
            found = linear(x, weight, bias)
            expected = nnF.linear(x, weight, bias)
            assert found.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=0.1)


def test_with_gradients_or_outside_the_block_nothing_is_kept():
    x, weight, bias = layer()
    assert not frozen(x)
    with frozen_weights():
        assert not frozen(x)  # gradients are on
        for _ in range(3):
            out = linear(x, weight, bias, relu=True)
            out.sum().backward()
        with torch.no_grad():
            assert frozen(x) == module._usable()
            assert not frozen(x.to("meta"))
    reference = nnF.linear(x, weight, bias).relu().sum()
    (expected,) = torch.autograd.grad(reference, weight)
    torch.testing.assert_close(weight.grad, 3 * expected)
    with torch.no_grad():
        assert not frozen(x)


def test_blocks_may_lie_within_each_other():
    x, _, _ = layer()
    with torch.no_grad(), frozen_weights():
        with frozen_weights():
            pass
        assert frozen(x) == module._usable()
