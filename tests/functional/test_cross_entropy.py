"""cross_entropy and linear_cross_entropy as operators and on PyTorch's route: numbers, in chunks."""

import importlib

import pytest
import torch

from fasttfm import functional as F
from fasttfm import reference

from .agreement import Inside

ROWS = importlib.import_module("fasttfm.functional.loss")
LINEAR = importlib.import_module("fasttfm.functional.linear_cross_entropy")
PAD = 0
FORMS = ["rows", "linear", "linear, low memory"]
SMOOTHED = {"label_smoothing": 0.1, "ignore_index": PAD}
torch_loss = torch.nn.functional.cross_entropy


def draw(form, rows=37, classes=90, dtype=torch.float32):
    """Logits, or hidden and weight; and a target whose every third row is PAD."""
    generator = torch.Generator().manual_seed(rows + classes)
    shapes = [((rows, 16), 1), ((classes, 16), 0.3)] if form.startswith("linear") else [((rows, classes), 3)]
    leaves = [(torch.randn(shape, generator=generator) * size).to(dtype).requires_grad_() for shape, size in shapes]
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[::3] = PAD
    return leaves, target


def losses(form, leaves, target, **options):
    if form.startswith("linear"):
        return F.linear_cross_entropy(*leaves, target, low_memory=form != "linear", **options)
    return F.cross_entropy(leaves[0] * 1, target, **options)


def solve(function, leaves, *given, **options):
    loss, nll = function(*given, **options)
    return loss.detach(), nll.detach(), *torch.autograd.grad(loss * 0.7, leaves)


def cotangent(loss):
    return torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape)


# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("weighted", ["", "rows", "classes", "both"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.sample(16)
def test_weights_reductions_and_int32_are_torchs(form, route, weighted, reduction, label_smoothing):
    """The low-memory form with leading dimensions."""
    leaves, target = draw(form, 12, 50, torch.float64 if route == "torch" else torch.float32)
    class_weights = torch.rand(50).to(leaves[0]) if weighted in ("classes", "both") else None
    row_weights = torch.rand(12).to(leaves[0]) if weighted in ("rows", "both") else None

    def expected(smoothing):
        logits, given = leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1].t(), {"ignore_index": PAD}
        each = torch_loss(logits, target, class_weights, reduction="none", label_smoothing=smoothing, **given)
        per_row = (target != PAD) * (1.0 if class_weights is None else class_weights[target])
        per_row = per_row * (1.0 if row_weights is None else row_weights)
        each = each if row_weights is None else each * row_weights
        return each if reduction == "none" else each.sum() / (per_row.sum() if reduction == "mean" else 1.0)

    options = {"label_smoothing": label_smoothing, "ignore_index": PAD, "reduction": reduction}
    inputs, rows, of_rows = leaves, target.int(), row_weights
    if form == "linear, low memory":
        inputs, rows = [leaves[0].view(3, 4, 16), leaves[1]], rows.view(3, 4)
        of_rows = None if row_weights is None else row_weights.view(3, 4)
    options |= {"class_weights": class_weights, "row_weights": of_rows}
    with F.backend(route):
        loss, nll = losses(form, inputs, rows, **options)
        found = torch.autograd.grad((loss * cotangent(loss)).sum(), leaves)
    assert not nll.requires_grad
    assert loss.shape == (rows.shape if reduction == "none" else ())
    exact = expected(label_smoothing)
    torch.testing.assert_close(loss.flatten(), exact.flatten())
    torch.testing.assert_close(nll.flatten(), expected(0.0).flatten())
    torch.testing.assert_close(found, torch.autograd.grad((exact * cotangent(exact)).sum(), leaves))


@pytest.mark.parametrize("route", ["torch", "pass", "triton"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("which", ["target", "another"])
def test_a_class_of_logit_minus_inf_has_torchs_loss_and_gradient(which, label_smoothing, route):
    # the compiled loop takes many elements
    logits, target = torch.randn(64, 600 if route == "pass" else 9), torch.arange(64) % 9
    logits[3, target[3] + (which == "another")] = -torch.inf
    options, found = {"label_smoothing": label_smoothing}, []
    for function in (F.cross_entropy, reference.cross_entropy, torch_loss):
        leaf = logits.clone().requires_grad_()
        summed = {} if function is reference.cross_entropy else {"reduction": "sum"}
        with F.backend("triton" if route == "triton" else "torch"):
            loss = function(leaf, target, **summed, **options)
        loss = loss[0] if isinstance(loss, tuple) else loss
        found.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    assert found[0][0].isinf() == (label_smoothing > 0 or which == "target")
    for each in found[:2]:
        torch.testing.assert_close(each, found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_half_precision_keeps_float32_statistics_over_many_blocks(dtype, monkeypatch):
    monkeypatch.setattr(ROWS, "LOSS_BLOCK", 150)  # three rows
    leaves, target = draw("rows", 13, 50, dtype)
    loss, nll, gradient = solve(losses, leaves, "rows", leaves, target, **SMOOTHED)
    wide = leaves[0].detach().double().requires_grad_()
    expected = torch_loss(wide, target, **SMOOTHED)
    assert loss.dtype == nll.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)
    exact = torch.autograd.grad(expected * 0.7, wide)[0]
    assert gradient.dtype == dtype
    rounding = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert (gradient.double() - exact).abs().max() <= rounding * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_are_as_exact_as_torchs_own_in_this_precision(dtype, monkeypatch):
    monkeypatch.setattr(LINEAR, "LOSS_CHUNK", 1000)  # several chunks, the last one short
    monkeypatch.setattr(ROWS, "LOSS_BLOCK", 400)
    leaves, target = draw("linear", dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = solve(reference.linear_cross_entropy, wide, *wide, target, **SMOOTHED)
    plain = solve(reference.linear_cross_entropy, leaves, *leaves, target, **SMOOTHED)
    actual, again = (solve(losses, leaves, "linear", leaves, target, reduction="sum", **SMOOTHED) for _ in range(2))
    assert all(map(torch.equal, actual, again))
    floor = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for ours, torchs, truth in zip(actual, plain, exact, strict=True):
        assert ours.dtype == torchs.dtype
        allowed = 2 * (torchs.double() - truth).abs().max() + floor * truth.abs().max()
        assert (ours.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_without_counted_rows_a_mean_is_nan_and_a_sum_0_as_in_torch(form, rows, weighted):
    leaves, _ = draw(form, rows)
    options = {"ignore_index": 0, "class_weights": torch.ones(90) if weighted else None}
    for reduction, value in (("mean", torch.nan), ("sum", 0.0)):
        loss, nll = losses(form, leaves, torch.zeros(rows, dtype=torch.int64), reduction=reduction, **options)
        torch.testing.assert_close(torch.stack([loss.detach(), nll]), torch.full((2,), value), equal_nan=True)
        assert not any(x.any() for x in torch.autograd.grad(loss, leaves))


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        ("rows", [1, 300, 2 * 300, 300 * 200]),  # also target, statistics and the factor of the mean
        ("linear", [300, *2 * [200 * 16], *2 * [300 * 16]]),
    ],
)
def test_only_these_tensors_are_saved(form, sizes):
    leaves, target = draw(form, 300, 200)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        losses(form, leaves, target)
    assert sorted(x.numel() for x in saved) == sizes


def test_the_logits_are_computed_in_chunks(monkeypatch):
    monkeypatch.setattr(LINEAR, "LOSS_CHUNK", 16 * 96)
    monkeypatch.setattr(ROWS, "LOSS_BLOCK", 4 * 96)
    leaves, target = draw("linear", 400, 96)
    with Inside() as inside:
        F.linear_cross_entropy(*leaves, target, **SMOOTHED)
    # Hidden is 400 x 16, weight's gradient 96 x 16, a chunk of logits 16 x 96; all logits would be 400 x 96.
    assert max(inside.sizes) <= 400 * 16
