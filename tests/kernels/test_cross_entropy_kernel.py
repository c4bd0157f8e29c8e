"""The cross entropy kernels in the interpreter against the reference."""

import math

import pytest
import torch
from accuracy import assert_as_accurate, compare_with_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_fixtures import examples

from fasttfm import functional, reference
from fasttfm.functional.backends import backend
from fasttfm.kernels import cross_entropy as kernel
from fasttfm.kernels.chip import CHIPS, INTERPRETER
from fasttfm.kernels.tiles.rows import CROSS_ENTROPY

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAD = 0


def draw(rows, classes, dtype, spread=3.0):
    """Logits (rows, classes) and targets, every third of which is ignored."""
    generator = torch.Generator().manual_seed(rows * 7919 + classes)
    logits = (torch.randn(rows, classes, generator=generator) * spread).to(dtype)
    target = torch.randint(min(1, classes - 1), classes, (rows,), generator=generator)
    target[1::3] = PAD
    return logits, target


def specification(target, reduction, **options):
    def way(logits):
        loss, nll = reference.cross_entropy(logits, target, **options)
        count = (target != options["ignore_index"]).sum() if reduction == "mean" else 1
        return loss / count, nll / count

    return way


def forward(logits, target, smoothing, ignored=PAD, *, overwrite=True):
    launch = kernel.Forward(logits, target, label_smoothing=smoothing, ignore_index=ignored, overwrite=overwrite)
    return launch(logits, target)


def weigh_loss(outputs):
    return outputs[0] * 0.7


def check(logits, target, label_smoothing=0.1, reduction="sum", inplace=False, ignore_index=PAD):
    options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}

    def way(logits):
        logits = logits * 1 if inplace else logits
        return functional.cross_entropy(logits, target, reduction=reduction, inplace=inplace, **options)

    compare_with_reference(way, specification(target, reduction, **options), {"logits": logits}, weigh_loss)


@settings(max_examples=examples(12))
@given(
    rows=st.sampled_from([1, 2, 5]),
    classes=st.sampled_from([1, 2, 17, 300, 513, 1500]),
    dtype=st.sampled_from(DTYPES),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["sum", "mean"]),
    inplace=st.booleans(),
)
def test_loss_and_gradient_equal_the_reference_for_any_shape(rows, classes, dtype, label_smoothing, reduction, inplace):
    ignore_index = PAD if classes > 1 else -100
    check(*draw(rows, classes, dtype), label_smoothing, reduction, inplace, ignore_index)


@pytest.mark.parametrize("classes", [4095, 4096, 4097, 8193])
@pytest.mark.parametrize("inplace", [False, True])
def test_rows_longer_than_a_tile_are_summed_over_tiles(classes, inplace):
    check(*draw(3, classes, torch.bfloat16), inplace=inplace)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_maximum_may_come_in_any_tile(dtype):
    logits, target = draw(3, 9000, dtype)
    logits[0, 8999] = logits[1, 0] = logits[2, 4096] = 40.0
    check(logits, target, ignore_index=-100)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("first", [0, 4096])
def test_a_class_switched_off_by_minus_infinity_has_no_probability_and_no_gradient(first, inplace):
    logits, _ = draw(4, 9000, torch.float32)
    off = slice(first, first + 4096)  # whole tiles, also the first, when there is no maximum yet
    logits[:, off] = -math.inf
    logits[:, 8192:8196] = -math.inf
    target = torch.tensor([5, 6, 4095, 8999]) + (4096 if first == 0 else 0) * torch.tensor([1, 1, 1, 0])
    logits.requires_grad_()
    exact = torch.nn.functional.cross_entropy(logits.double(), target, reduction="sum")
    with backend("triton"):
        rows = logits * 1.0 if inplace else logits
        loss, _ = functional.cross_entropy(rows, target, reduction="sum", inplace=inplace)
        (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    assert (gradient[:, off] == 0).all()
    assert torch.allclose(gradient.sum(dim=1), torch.zeros(4), atol=1e-5)


@pytest.mark.parametrize("classes", [300, 9000])
@pytest.mark.parametrize("size", [100.0, 6e4])
@pytest.mark.parametrize("inplace", [False, True])
def test_large_logits_lose_no_digits(classes, size, inplace):
    """A log-sum-exp of this size would be rounded to 4e-6 or 4e-3, and with it every probability."""
    logits, target = draw(4, classes, torch.float32)
    logits = (logits + size).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    options = {"label_smoothing": 0.1, "ignore_index": PAD, "reduction": "sum"}
    expected = torch.nn.functional.cross_entropy(exact, target, **options)
    expected.backward()
    with backend("triton"):
        loss, _ = functional.cross_entropy(logits * 1.0, target, **options, inplace=inplace)
        loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (logits.grad - exact.grad).abs().max() < 2e-7


def test_statistics_are_float32_also_for_half_precision():
    logits, target = draw(5, 3000, torch.bfloat16)
    with backend("triton"):
        loss, _ = functional.cross_entropy(logits + 100, target, ignore_index=PAD)
    exact = torch.nn.functional.cross_entropy((logits + 100).double(), target, ignore_index=PAD)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)


@pytest.mark.parametrize("view", ["columns of a wider tensor", "transposed", "expanded"])
def test_logits_need_not_be_contiguous(view):
    wide, target = draw(6, 40, torch.float32)
    logits = {
        "columns of a wider tensor": wide[:, 3:29],
        "transposed": wide[:, :6].t(),
        "expanded": wide[:1].expand(6, 40),
    }[view]
    check(logits, target % logits.shape[1])


def test_overwriting_touches_only_the_columns_of_its_rows():
    memory = torch.randn(4, 32)
    before = memory.clone()
    target = torch.tensor([1, PAD, 7, 19])
    logits = memory[:, 4:24]
    forward(logits, target, 0.1)
    expected = before[:, 4:24].requires_grad_()
    reference.cross_entropy(expected, target, label_smoothing=0.1, ignore_index=PAD)[0].backward()
    assert torch.allclose(memory[:, 4:24], expected.grad, atol=1e-6)
    assert torch.equal(memory[:, :4], before[:, :4])
    assert torch.equal(memory[:, 24:], before[:, 24:])


def test_ignored_rows_of_nan_have_zero_loss_and_gradient():
    logits, _ = draw(3, 600, torch.float32)
    logits[1] = math.nan
    target = torch.tensor([4, -100, 9])
    losses, _ = forward(logits, target, 0.1, -100)
    assert (losses[:, 1] == 0).all()
    assert (logits[1] == 0).all()
    assert torch.isfinite(losses).all()


def test_an_invalid_class_gives_a_loss_of_nan():
    logits, _ = draw(3, 50, torch.float32)
    losses, _ = forward(logits, torch.tensor([50, -7, 49]), 0.0, overwrite=False)
    assert losses.isnan().tolist() == [[True, True, False]] * 2


def test_rows_beyond_the_reach_of_32_bit_offsets():
    far = 2**31 + 64
    memory = torch.empty(far + 64, dtype=torch.float16)  # untouched pages take no memory
    logits = memory.as_strided((2, 40), (far, 1))
    logits.copy_(torch.randn(2, 40))
    target = torch.tensor([3, 11])
    expected, _ = reference.cross_entropy(logits.clone(), target)
    losses, _ = forward(logits, target, 0.0, overwrite=False)
    assert losses[0].sum().item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_gradient_is_scaled_in_place_within_its_own_columns():
    gradient = torch.randn(3, 700)
    before = gradient.clone()
    kernel.Scale(gradient)(gradient, torch.tensor(1.0))
    assert torch.equal(gradient, before)
    kernel.Scale(gradient)(gradient, torch.tensor(-2.5))
    assert torch.allclose(gradient, before * -2.5)
    strided = torch.ones(3, 10)
    kernel.Scale(strided[:, 2:8])(strided[:, 2:8], torch.tensor(3.0))
    assert strided.sum().item() == 3 * (4 + 6 * 3)


def test_no_rows_have_no_losses():
    losses, statistics = forward(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), 0.1, overwrite=False)
    assert losses.shape == statistics.shape == (2, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("low_memory", [False, True])
def test_linear_cross_entropy_equals_the_reference(dtype, low_memory):
    generator = torch.Generator().manual_seed(3)
    inputs = {
        "hidden": torch.randn(21, 24, generator=generator).to(dtype),
        "weight": (torch.randn(333, 24, generator=generator) * 0.3).to(dtype),
    }
    target = torch.randint(0, 333, (21,), generator=generator)
    target[::4] = PAD
    options = {"label_smoothing": 0.1, "ignore_index": PAD}

    def way(function, **more):
        return lambda hidden, weight: function(hidden, weight, target, **options, **more)

    ours = way(functional.linear_cross_entropy, low_memory=low_memory)
    compare_with_reference(ours, way(reference.linear_cross_entropy), inputs, weigh_loss)


@pytest.mark.parametrize("chip", [*CHIPS.values(), INTERPRETER], ids=lambda chip: chip.name)
def test_a_tile_never_exceeds_its_row_and_reads_at_least_sixteen_bytes_per_thread(chip):
    for size in kernel._SIZES:
        for tile in (CROSS_ENTROPY.shipped(chip, size), *CROSS_ENTROPY.alternatives(chip, size)):
            assert tile.columns <= size
            assert tile.columns >= 8 * chip.warp * tile.warps
            assert chip.warp * tile.warps <= 1024


def test_the_tile_of_every_number_of_classes_covers_a_row_or_loops():
    for classes in (1, 511, 512, 513, 4096, 4097, 37000, 250000):
        tile = CROSS_ENTROPY(INTERPRETER, kernel.size_class(classes))
        assert tile.columns >= classes or tile.columns == 4096


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [300, 8000, 37000])
def test_on_the_device(dtype, classes):
    logits, target = draw(64, classes, dtype)
    check(logits.cuda(), target.cuda(), inplace=True)
    check(logits.cuda(), target.cuda(), inplace=False)


@pytest.mark.gpu
def test_the_in_place_loss_allocates_no_second_tensor_of_the_size_of_logits():
    logits = torch.randn(2048, 8000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 8000, (2048,), device="cuda")
    separate = logits * 1
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss, _ = functional.cross_entropy(separate, target, inplace=True)
    (gradient,) = torch.autograd.grad(loss, separate)
    assert gradient.data_ptr() == separate.data_ptr()
    assert torch.cuda.max_memory_allocated() - before < separate.numel() * separate.element_size() // 10
    assert_as_accurate(loss, loss, torch.nn.functional.cross_entropy(logits.double(), target))
