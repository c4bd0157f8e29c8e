"""Linear layers with frozen weights compute what torch's do, and never with weights that have changed since."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as nnF

from fasttfm.cpu import linear as module
from fasttfm.cpu.linear import frozen, frozen_weights, linear
from fasttfm.cpu.row_classes import ROW_COUNTS, RowClasses, large_size, multiply, row_classes

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-12}
helped = pytest.mark.skipif(
    not module._packed_dtypes(), reason="this torch or processor has no oneDNN to lay weights out for"
)


def layer_of(rows=(3, 5), inputs=192, outputs=256, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(*rows, inputs, dtype=dtype), nn.Linear(inputs, outputs, dtype=dtype)


@pytest.fixture
def laid_out(monkeypatch):
    """Shapes of the weights in the order in which they were laid out."""
    seen = []

    def watch(name):
        make = getattr(module, name)

        def watched(weight, *arguments):
            seen.append(tuple(weight.shape))
            return make(weight, *arguments)

        monkeypatch.setattr(module, name, watched)

    watch("_packed_product")
    watch("_panel_product")
    return seen


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_use_in_a_block_gives_what_torch_gives(dtype, with_bias, relu, batch_invariant):
    x, layer = layer_of(dtype=dtype)
    bias = layer.bias if with_bias else None
    with torch.inference_mode(), frozen_weights(layer, batch_invariant=batch_invariant):
        expected = nnF.linear(x.double(), layer.weight.double(), None if bias is None else bias.double())
        expected = expected.relu() if relu else expected
        for _ in range(2):  # made, used again
            actual = linear(x, layer.weight, bias, relu=relu)
            assert (actual.shape, actual.dtype) == (expected.shape, dtype)
            torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("rows", [(1,), (2, 1), (5,), (0,), (2, 3, 4), (), (900,)])
def test_any_number_of_rows(rows, batch_invariant):
    x, layer = layer_of(rows)
    with torch.inference_mode(), frozen_weights(layer, batch_invariant=batch_invariant):
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
    assert laid_out == [(256, 192), (512, 192), (768, 192)], "once each"


@helped
def test_weights_are_laid_out_once_and_anew_when_they_have_changed(laid_out):
    x, layer = layer_of()
    adam = torch.optim.Adam(layer.parameters(), fused=True)

    def check(times: int) -> None:
        laid_out.clear()
        with torch.inference_mode(), frozen_weights(layer):
            for _ in range(2):
                torch.testing.assert_close(linear(x, layer.weight, layer.bias), layer(x), rtol=1e-5, atol=1e-5)
        assert len(laid_out) == times

    check(1)
    check(0)  # found again
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
    layer.float()  # perhaps where it was before: freed memory comes back
    check(1)
    layer.weight = nn.Parameter(layer.weight.detach() + 1.0)
    check(1)


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
            actual, expected = linear(x, layer.weight, layer.bias), layer(x)
            assert actual.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def test_with_gradients_or_outside_the_block_nothing_is_kept():
    x, layer = layer_of()
    with frozen_weights(layer):
        assert not frozen(x)  # gradients are on
        for _ in range(3):
            linear(x, layer.weight, layer.bias, relu=True).sum().backward()
        with torch.no_grad():
            assert frozen(x)
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
        kept = module.on_this_thread.kept
        with frozen_weights(other):
            assert module.on_this_thread.kept is not kept
        assert module.on_this_thread.kept is kept

        def look() -> None:
            with torch.no_grad():
                elsewhere.append(frozen(x))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert elsewhere == [False]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 40), (512, 640)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_however_many_are_multiplied(dtype, inputs, outputs):
    """Rows whose product is rounding alone, other ones than the classes were chosen by."""
    rows = torch.randn(1500, inputs // 2) * torch.exp2(torch.randint(-6, 7, (1500, inputs // 2)))
    layer = nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        layer.weight[:, inputs // 2 :] = layer.weight[:, : inputs // 2].flip(1)
    x, layer = torch.cat([rows, -rows.flip(1)], dim=1).to(dtype), layer.to(dtype)
    with torch.inference_mode(), frozen_weights(layer, batch_invariant=True):
        alone = torch.cat([linear(row[None], layer.weight) for row in x])
        for count in (2, 3, 4, 7, 16, 31, 64, 100, 256, 257, 300, 900, 1500):
            assert torch.equal(linear(x[-count:], layer.weight), alone[-count:]), count


def test_classes_of_rows_hold_only_those_that_sum_alike(threads):
    def classes(name, large=0, **differs):
        """Of a product that sums the other way round where it differs: by rows, or by rows when there are threads; or
        that adds the bias first and not last."""

        def make(weight, bias):
            def product(rows):
                backwards = differs.get("rows", no)(len(rows))
                if torch.get_num_threads() > 1:
                    backwards |= differs.get("threads", no)(len(rows))
                columns = range(rows.shape[1])
                terms = [rows[:, k : k + 1] * weight[:, k] for k in (reversed(columns) if backwards else columns)]
                bias_first = differs.get("bias", no)(len(rows))
                return sum([bias, *terms] if bias_first else [*terms, bias])

            return product

        return row_classes(make, 64, 48, torch.float32, (name,), large)

    def no(rows):
        return False

    threads(1)
    assert classes("all alike") == RowClasses(ROW_COUNTS)
    assert classes("few", rows=lambda rows: rows <= 8) == RowClasses((16, 32, 40, 64, 96, 128, 192, 256))
    assert classes("bias", bias=lambda rows: rows == 1) == RowClasses(ROW_COUNTS[1:])
    assert classes("threads", threads=lambda rows: True) == RowClasses(ROW_COUNTS)
    threads(2)
    assert classes("all alike") == RowClasses(ROW_COUNTS)
    assert classes("many", threads=lambda rows: rows >= 64) == RowClasses((1, 2, 4, 8, 16, 32, 40))
    assert classes("threads", threads=lambda rows: True) == RowClasses(ROW_COUNTS, one_thread=True)
    assert torch.get_num_threads() == 2
    assert classes("all alike", large=384) == RowClasses((*ROW_COUNTS, 384))
    assert classes("large differ", large=384, rows=lambda rows: rows > 256) == RowClasses(ROW_COUNTS)
    assert classes("many", large=384) == classes("many")
    alone = classes("threads", large=384, threads=lambda rows: True)
    assert alone == RowClasses((*ROW_COUNTS, 384), one_thread=True)


@pytest.mark.parametrize(
    ("rows", "size"), [(1, 0), (256, 0), (257, 384), (385, 512), (1024, 1024), (1025, 640), (1500, 768), (9000, 1024)]
)
def test_many_rows_are_filled_up_little(rows, size):
    assert large_size(rows) == size


def test_a_product_whose_last_row_differs_is_made_of_single_rows(threads):
    threads(2)

    def make(weight, bias):
        def product(rows):
            assert torch.get_num_threads() == 1
            result = rows @ weight.t()
            result[-1] += len(rows) > 1
            return result

        return product

    classes = row_classes(make, 64, 48, torch.float32, ("the last row",))
    assert classes == RowClasses((1,), one_thread=True)
    rows, weight = torch.randn(3, 48), torch.randn(64, 48)
    product = multiply(make(weight, None), rows, classes)
    assert torch.equal(product, torch.cat([rows[index : index + 1] @ weight.t() for index in range(3)]))
