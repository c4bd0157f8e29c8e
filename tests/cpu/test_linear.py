"""Linear layers with frozen weights match torch's, and never use stale weights."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as nnF

from fasttfm.cpu import linear as module
from fasttfm.cpu.linear import frozen, frozen_weights, linear
from fasttfm.cpu.row_classes import ROW_COUNTS, RowClasses, multiply, row_classes

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-12}
packs = pytest.mark.skipif(not module._packed_dtypes(), reason="needs oneDNN's prepacked weights")


def layer_of(rows=(3, 5), inputs=192, outputs=256, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(*rows, inputs, dtype=dtype), nn.Linear(inputs, outputs, dtype=dtype)


@pytest.fixture
def packed(monkeypatch):
    """Shapes of the weights in the order in which they were packed."""
    shapes = []

    def watched(make, weight, *args):
        shapes.append(tuple(weight.shape))
        return make(weight, *args)

    for name in ("_packed_product", "_panel_product"):
        monkeypatch.setattr(module, name, functools.partial(watched, getattr(module, name)))
    return shapes


@pytest.mark.sample(16)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("with_bias", "relu"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("rows", [(3, 5), (1,), (2, 1), (0,), (2, 3, 4), (), (900,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_call_inside_frozen_weights_matches_torch(dtype, rows, with_bias, relu, batch_invariant):
    x, layer = layer_of(rows, dtype=dtype)
    bias = layer.bias if with_bias else None
    with torch.inference_mode(), frozen_weights(layer, batch_invariant=batch_invariant):
        expected = nnF.linear(x.double(), layer.weight.double(), None if bias is None else bias.double())
        expected = expected.relu() if relu else expected
        for _ in range(2):  # packed, then cached
            actual = linear(x, layer.weight, bias, relu=relu)
            assert (actual.shape, actual.dtype) == (expected.shape, dtype)
            torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@packs
def test_views_of_one_parameter_are_packed_separately(packed):
    x, layer = layer_of(outputs=768)
    with torch.inference_mode(), frozen_weights(layer):
        for _ in range(3):
            for part in (slice(0, 256), slice(256, 768), slice(0, 768)):
                weight, bias = layer.weight[part], layer.bias[part]
                torch.testing.assert_close(linear(x, weight, bias), nnF.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    assert packed == [(256, 192), (512, 192), (768, 192)], "once each"


def test_layers_that_share_a_weight_keep_their_biases():
    x, layer = layer_of()
    other = nn.Linear(192, 256)
    other.weight = layer.weight
    with torch.inference_mode(), frozen_weights(nn.ModuleList([layer, other])):
        for bias in (layer.bias, other.bias, None, layer.bias):
            expected = nnF.linear(x, layer.weight, bias)
            torch.testing.assert_close(linear(x, layer.weight, bias), expected, rtol=1e-5, atol=1e-5)


@packs
def test_weights_are_packed_once_and_again_after_a_change(packed):
    x, layer = layer_of()
    adam = torch.optim.Adam(layer.parameters(), fused=True)

    def check(times: int) -> None:
        packed.clear()
        with torch.inference_mode(), frozen_weights(layer):
            for _ in range(2):
                torch.testing.assert_close(linear(x, layer.weight, layer.bias), layer(x), rtol=1e-5, atol=1e-5)
        assert len(packed) == times

    check(1)
    check(0)
    with torch.no_grad():
        layer.weight.mul_(2.0)
    check(1)
    layer(x).sum().backward()
    adam.step()
    check(1)
    layer.load_state_dict({name: 3.0 * value for name, value in layer.state_dict().items()})
    check(1)
    layer.double()
    with torch.no_grad():
        layer.weight.mul_(0.5)
    layer.float()  # perhaps at its old address: freed memory is reused
    check(1)
    layer.weight = nn.Parameter(layer.weight.detach() + 1.0)
    check(1)
    layer.weight.data.view(-1)[::10] = 0.0  # pruned, without a new version
    check(1)


def test_weights_are_frozen_only_inside_the_block_and_without_gradients():
    x, layer = layer_of()
    with frozen_weights(layer):
        assert not frozen(x)  # gradients are on
        for _ in range(3):
            linear(x, layer.weight, layer.bias, relu=True).sum().backward()
        with torch.no_grad():
            with frozen_weights(nn.Linear(2, 2)):
                pass
            assert frozen(x), "blocks nest"
            assert not frozen(x.to("meta"))
    (expected,) = torch.autograd.grad(layer(x).relu().sum(), layer.weight)
    torch.testing.assert_close(layer.weight.grad, 3 * expected)
    with torch.no_grad():
        assert not frozen(x)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 40), (512, 640)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_batch_invariant_rows_have_the_same_bits_at_any_row_count(dtype, inputs, outputs):
    """Rows whose product is rounding error alone, but not those that chose the classes."""
    rows = torch.randn(1500, inputs // 2) * torch.exp2(torch.randint(-6, 7, (1500, inputs // 2)))
    layer = nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        layer.weight[:, inputs // 2 :] = layer.weight[:, : inputs // 2].flip(1)
    x, layer = torch.cat([rows, -rows.flip(1)], dim=1).to(dtype), layer.to(dtype)
    with torch.inference_mode(), frozen_weights(layer, batch_invariant=True):
        alone = torch.cat([linear(row[None], layer.weight) for row in x])
        for count in (2, 3, 4, 7, 16, 31, 64, 100, 256, 257, 300, 900, 1500):
            assert torch.equal(linear(x[-count:], layer.weight), alone[-count:]), count


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 136), (3, 136), (3, 1), (1, 3), (31, 1)])
def test_rows_of_few_inputs_or_outputs_have_the_same_bits_at_any_row_count(inputs, outputs):
    x, layer = layer_of((257,), inputs, outputs)
    with torch.inference_mode(), frozen_weights(layer, batch_invariant=True):
        for bias in (layer.bias, None):
            together = linear(x, layer.weight, bias)
            for count in (1, 2, 3, 4, 8, 33):
                parts = torch.cat([linear(part, layer.weight, bias) for part in x.split(count)])
                assert torch.equal(parts, together), count


def test_row_classes_contain_only_counts_of_one_summation_order(threads):
    def never(rows):
        return False

    def classes(name, rows=never, with_threads=never, bias_first=never):
        """Of a product that sums in reverse order where rows(count), or with several threads with_threads(count)."""

        def make(weight, bias):
            def product(x):
                count, columns = len(x), range(x.shape[1])
                backwards = rows(count) or (torch.get_num_threads() > 1 and with_threads(count))
                terms = [x[:, k : k + 1] * weight[:, k] for k in (reversed(columns) if backwards else columns)]
                return sum([bias, *terms] if bias_first(count) else [*terms, bias])

            return product

        return row_classes(make, 64, 48, torch.float32, (name,))

    threads(1)
    assert classes("all alike") == RowClasses(ROW_COUNTS)
    assert classes("few", rows=lambda rows: rows <= 8) == RowClasses((16, 32, 40, 64, 96, 128, 192, 256))
    assert classes("bias", bias_first=lambda rows: rows == 1) == RowClasses(ROW_COUNTS[1:])
    assert classes("threads", with_threads=lambda rows: True) == RowClasses(ROW_COUNTS)
    threads(2)
    assert classes("all alike") == RowClasses(ROW_COUNTS)
    assert classes("many", with_threads=lambda rows: rows >= 64) == RowClasses((1, 2, 4, 8, 16, 32, 40))
    assert classes("threads", with_threads=lambda rows: True) == RowClasses(ROW_COUNTS, one_thread=True)
    assert torch.get_num_threads() == 2

    def last_row_differs(weight, bias):
        def product(x):
            y = x @ weight.t()
            y[-1] += len(x) > 1
            return y

        return product

    assert row_classes(last_row_differs, 64, 48, torch.float32, ("last row",)) == RowClasses((1,), one_thread=True)
    x, weight = torch.randn(3, 48), torch.randn(64, 48)
    product = multiply(last_row_differs(weight, None), x, RowClasses((1,), one_thread=True))
    assert torch.equal(product, torch.cat([row[None] @ weight.t() for row in x]))
