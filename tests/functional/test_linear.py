"""Linear layers with frozen weights compute what torch's do, and never with weights that have changed since."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as nnF

from fasttfm.functional import linear as module
from fasttfm.functional.linear import frozen, frozen_weights, linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}
helped = pytest.mark.skipif(not module._usable(), reason="this torch or processor has no oneDNN to lay weights out for")


def layer_of(rows=(3, 5), inputs=192, outputs=256, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(*rows, inputs, dtype=dtype), nn.Linear(inputs, outputs, dtype=dtype)


@pytest.fixture
def laid_out(monkeypatch):
    """Whether each use of a weight that may be laid out found it so."""
    seen = []
    packed = module._packed

    def watch(*arguments):
        made = packed(*arguments)
        seen.append(made[0] is not None and made[0].is_mkldnn)
        return made

    monkeypatch.setattr(module, "_packed", watch)
    return seen


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_use_in_a_block_gives_what_torch_gives(dtype, with_bias, relu):
    x, layer = layer_of(dtype=dtype)
    bias = layer.bias if with_bias else None
    with torch.inference_mode(), frozen_weights(layer):
        expected = nnF.linear(x.double(), layer.weight.double(), None if bias is None else bias.double())
        expected = expected.relu() if relu else expected
        for _ in range(3):  # noted, laid out, used again
            found = linear(x, layer.weight, bias, relu=relu)
            assert (found.shape, found.dtype) == (expected.shape, dtype)
            torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [(1,), (2, 1), (5,), (0,), (2, 3, 4), ()])
def test_any_number_of_rows(rows):
    x, layer = layer_of(rows)
    with torch.inference_mode(), frozen_weights(layer):
        for _ in range(3):
            torch.testing.assert_close(linear(x, layer.weight, layer.bias), layer(x), rtol=1e-5, atol=1e-5)


@helped
def test_views_of_one_parameter_are_weights_of_their_own(laid_out):
    x, layer = layer_of(outputs=768)
    with torch.inference_mode(), frozen_weights(layer):
        for _ in range(3):
            for part in (slice(0, 256), slice(256, 768), slice(0, 768)):
                weight, bias = layer.weight[part], layer.bias[part]
                torch.testing.assert_close(linear(x, weight, bias), nnF.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    assert laid_out == 3 * [False] + 6 * [True]


@helped
def test_weights_are_laid_out_at_their_second_use_and_anew_when_they_have_changed(laid_out):
    x, layer = layer_of()
    adam = torch.optim.Adam(layer.parameters(), fused=True)

    def check(*expected_uses: bool) -> None:
        laid_out.clear()
        with torch.inference_mode(), frozen_weights(layer):
            for _ in expected_uses:
                torch.testing.assert_close(linear(x, layer.weight, layer.bias), layer(x), rtol=1e-5, atol=1e-5)
        assert laid_out == list(expected_uses)

    check(False, True)
    check(True)  # found again
    with torch.no_grad():
        layer.weight.mul_(2.0)
    check(False, True)
    layer(x).sum().backward()
    adam.step()
    check(False, True)
    layer.load_state_dict({name: 3.0 * value for name, value in layer.state_dict().items()})
    check(False, True)
    layer.double().float()
    check(False, True)
    layer.weight = nn.Parameter(layer.weight.detach() + 1.0)
    check(False, True)


@helped
def test_what_is_kept_goes_with_the_model():
    x, layer = layer_of()
    gc.collect()
    before = len(module._of_models)
    with torch.inference_mode(), frozen_weights(layer):
        linear(x, layer.weight)
    assert len(module._of_models) == before + 1
    del layer
    gc.collect()
    assert len(module._of_models) == before


@helped
def test_autocast_is_obeyed():
    x, layer = layer_of()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), frozen_weights(layer):
        for _ in range(3):
            found, expected = linear(x, layer.weight, layer.bias), layer(x)
            assert found.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_with_gradients_or_outside_the_block_nothing_is_kept():
    x, layer = layer_of()
    with frozen_weights(layer):
        assert not frozen(x)  # gradients are on
        for _ in range(3):
            linear(x, layer.weight, layer.bias, relu=True).sum().backward()
        with torch.no_grad():
            assert frozen(x) == module._usable()
            assert not frozen(x.to("meta"))
    (expected,) = torch.autograd.grad(layer(x).relu().sum(), layer.weight)
    torch.testing.assert_close(layer.weight.grad, 3 * expected)
    with torch.no_grad():
        assert not frozen(x)


@helped
def test_blocks_may_lie_within_each_other_and_are_a_threads_own():
    x, layer = layer_of()
    _, other = layer_of()
    elsewhere = []
    with torch.no_grad(), frozen_weights(layer):
        kept = module._thread.kept
        with frozen_weights(other):
            assert module._thread.kept is not kept
        assert module._thread.kept is kept

        def look() -> None:
            with torch.no_grad():
                elsewhere.append(frozen(x))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert elsewhere == [False]
