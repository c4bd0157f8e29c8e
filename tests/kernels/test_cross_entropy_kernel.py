"""The cross entropy kernels in the interpreter against the reference."""

import math

import pytest
import torch
from accuracy import compare_with_reference
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shared_fixtures import examples

from fasttfm import functional, reference
from fasttfm.functional.backends import backend
from fasttfm.kernels import cross_entropy as kernel

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


def check(logits, target, label_smoothing=0.1, reduction="sum", ignore_index=PAD):
    options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}

    def way(logits):
        return functional.cross_entropy(logits, target, reduction=reduction, **options)

    compare_with_reference(way, specification(target, reduction, **options), {"logits": logits}, weigh_loss)


@settings(max_examples=examples(12))
@given(
    rows=st.sampled_from([1, 2, 5]),
    classes=st.sampled_from([1, 2, 17, 300, 513, 1500]),
    dtype=st.sampled_from(DTYPES),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["sum", "mean"]),
)
@example(0, 9, torch.float32, 0.1, "sum")
def test_loss_and_gradient_equal_the_reference_for_any_shape(rows, classes, dtype, label_smoothing, reduction):
    ignore_index = PAD if classes > 1 else -100
    check(*draw(rows, classes, dtype), label_smoothing, reduction, ignore_index)


@pytest.mark.parametrize(
    ("classes", "dtype"),
    [(4095, torch.bfloat16), (4096, torch.float16), (4097, torch.float32), (8193, torch.bfloat16)],
)
def test_rows_longer_than_a_tile_are_summed_over_tiles(classes, dtype):
    check(*draw(3, classes, dtype))


@pytest.mark.parametrize("first", [0, 4096])
def test_a_class_switched_off_by_minus_infinity_has_no_probability_and_no_gradient(first):
    logits, _ = draw(4, 9000, torch.float32)
    off = slice(first, first + 4096)  # whole tiles, also the first, when there is no maximum yet
    logits[:, off] = logits[:, 8192:8196] = -math.inf
    target = torch.tensor([5, 6, 4095, 8999]) + (4096 if first == 0 else 0) * torch.tensor([1, 1, 1, 0])
    loss, gradient = differentiated(logits, target)
    exact = torch.nn.functional.cross_entropy(logits.double(), target, reduction="sum")
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    assert (gradient[:, off] == 0).all()
    assert torch.allclose(gradient.sum(dim=1), torch.zeros(4), atol=1e-5)


def differentiated(logits, target, **options):
    """The loss and the gradient of the logits by the kernels."""
    logits = logits.clone().requires_grad_()
    with backend("triton"):
        loss, _ = functional.cross_entropy(logits * 1, target, reduction="sum", **options)
        return loss, torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize(
    ("dtype", "size", "classes", "allowed"),
    [
        (torch.float32, 100.0, 9000, 2e-7),
        (torch.float32, 6e4, 300, 2e-7),
        (torch.float32, 6e4, 9000, 2e-7),
        (torch.bfloat16, 100.0, 3000, 8e-3),
    ],
)
def test_large_logits_lose_no_digits(dtype, size, classes, allowed):
    """A log-sum-exp of this size would be rounded to 4e-6 or 4e-3, and with it every probability."""
    logits, target = draw(4, classes, torch.float32)
    logits = (logits + size).to(dtype)
    options = {"label_smoothing": 0.1, "ignore_index": PAD}
    loss, gradient = differentiated(logits, target, **options)
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, target, reduction="sum", **options)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (gradient - torch.autograd.grad(expected, exact)[0]).abs().max() < allowed


@pytest.mark.parametrize("view", ["columns", "transposed", "expanded"])
def test_logits_need_not_be_contiguous(view):
    wide, target = draw(6, 40, torch.float32)
    views = {"columns": wide[:, 3:29], "transposed": wide[:, :6].t(), "expanded": wide[:1].expand(6, 40)}
    check(views[view], target % views[view].shape[1])


def test_overwriting_touches_only_the_columns_of_its_rows():
    memory = torch.randn(4, 32)
    before, target = memory.clone(), torch.tensor([1, PAD, 7, 19])
    forward(memory[:, 4:24], target, 0.1)
    expected = before[:, 4:24].requires_grad_()
    reference.cross_entropy(expected, target, label_smoothing=0.1, ignore_index=PAD)[0].backward()
    assert torch.allclose(memory[:, 4:24], expected.grad, atol=1e-6)
    assert torch.equal(memory[:, [0, 1, 2, 3, *range(24, 32)]], before[:, [0, 1, 2, 3, *range(24, 32)]])


def test_ignored_rows_of_nan_give_zero_and_invalid_classes_give_nan():
    logits, _ = draw(3, 600, torch.float32)
    logits[1] = math.nan
    losses, _ = forward(logits.clone(), torch.tensor([600, -100, -7]), 0.1, -100, overwrite=False)
    assert losses.isnan().tolist() == [[True, False, True]] * 2
    losses, _ = forward(logits, torch.tensor([4, -100, 599]), 0.1, -100)
    assert torch.isfinite(losses).all()
    assert not losses[:, 1].any()
    assert not logits[1].any()


def test_rows_beyond_the_reach_of_32_bit_offsets():
    far, target = 2**31 + 64, torch.tensor([3, 11])
    logits = torch.empty(far + 64, dtype=torch.float16).as_strided((2, 40), (far, 1))  # untouched pages take no memory
    logits.copy_(torch.randn(2, 40))
    expected, _ = reference.cross_entropy(logits.clone(), target)
    losses, _ = forward(logits, target, 0.0, overwrite=False)
    assert losses[0].sum().item() == pytest.approx(expected.item(), rel=1e-5)
