"""cross_entropy on the torch route and as an operator; inplace=True."""

import importlib

import pytest
import torch

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.functional import cross_entropy

ROWS = importlib.import_module("fasttfm.functional.loss")
PAD = 0
torch_loss = torch.nn.functional.cross_entropy


def draw(rows=13, classes=50, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + classes)
    logits = (torch.randn(rows, classes, generator=generator) * 3).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[::3] = PAD
    return logits.requires_grad_(), target


def solve(logits, target, **options):
    loss, nll = cross_entropy(logits * 1, target, **options)
    return loss.detach(), nll.detach(), torch.autograd.grad(loss * 0.7, logits)[0]


def cotangent(loss):
    return torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape)


@pytest.mark.parametrize("form", ["rows", "in place", "linear", "linear, low memory"])
@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("weighted", ["", "rows", "classes", "both"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.sample(24)
def test_weights_reductions_and_int32_are_torchs(form, route, weighted, reduction, label_smoothing):
    logits, target = draw(dtype=torch.float64 if route == "torch" else torch.float32)
    class_weights = torch.rand(50).to(logits) if weighted in ("classes", "both") else None
    row_weights = torch.rand(13).to(logits) if weighted in ("rows", "both") else None
    given = {"label_smoothing": label_smoothing, "ignore_index": PAD}

    def expected(logits, smoothing):
        each = torch_loss(logits, target, class_weights, reduction="none", **given | {"label_smoothing": smoothing})
        per_row = (target != PAD) * (1.0 if class_weights is None else class_weights[target])
        per_row = per_row * (1.0 if row_weights is None else row_weights)
        each = each if row_weights is None else each * row_weights
        return each if reduction == "none" else each.sum() / (per_row.sum() if reduction == "mean" else 1.0)

    options = {**given, "reduction": reduction, "class_weights": class_weights, "row_weights": row_weights}
    with F.backend(route):
        if form.startswith("linear"):
            hidden, weight = (torch.randn(n, 6, dtype=logits.dtype, requires_grad=True) for n in (13, 50))
            logits, inputs = hidden @ weight.t(), (hidden, weight)
            loss, nll = F.linear_cross_entropy(*inputs, target.int(), low_memory=form != "linear", **options)
        elif form == "in place" and reduction == "none":
            pytest.skip("refused")
        else:
            inputs = (logits,)
            loss, nll = cross_entropy(logits * 1, target.int(), inplace=form == "in place", **options)
        assert not nll.requires_grad
        found = torch.autograd.grad((loss * cotangent(loss)).sum(), inputs)
    exact = expected(logits, label_smoothing)
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(nll, expected(logits, 0.0))
    torch.testing.assert_close(found, torch.autograd.grad((exact * cotangent(exact)).sum(), inputs))


@pytest.mark.parametrize("route", ["torch", "pass", "triton"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("which", ["target", "another"])
def test_a_class_of_logit_minus_inf_has_torchs_loss_and_gradient(which, label_smoothing, route):
    logits, target = (
        torch.randn(64, 600 if route == "pass" else 9),
        torch.arange(64) % 9,
    )  # the loop takes many elements
    logits[3, target[3] + (which == "another") * (1 if target[3] < 8 else -1)] = -torch.inf
    ours, theirs, spec = (logits.clone().requires_grad_() for _ in range(3))
    options = {"label_smoothing": label_smoothing}
    with F.backend("triton" if route == "triton" else "torch"):
        loss, _ = F.cross_entropy(ours, target, reduction="sum", **options)
    expected = torch.nn.functional.cross_entropy(theirs, target, reduction="sum", **options)
    specified, _ = reference.cross_entropy(spec, target, **options)
    assert loss.isinf() == (label_smoothing > 0 or which == "target")
    gradients = [torch.autograd.grad(x, leaf)[0] for x, leaf in ((loss, ours), (expected, theirs), (specified, spec))]
    for got, gradient in ((loss.detach(), gradients[0]), (specified.detach(), gradients[2])):
        torch.testing.assert_close(got, expected.detach())
        torch.testing.assert_close(gradient, gradients[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_half_precision_keeps_float32_statistics_over_many_blocks(dtype, inplace, monkeypatch):
    monkeypatch.setattr(ROWS, "LOSS_BLOCK", 150)  # three rows
    logits, target = draw(dtype=dtype)
    loss, nll, gradient = solve(logits, target, label_smoothing=0.1, ignore_index=PAD, inplace=inplace)
    wide = logits.detach().double().requires_grad_()
    expected = torch_loss(wide, target, label_smoothing=0.1, ignore_index=PAD)
    assert loss.dtype == nll.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)
    exact = torch.autograd.grad(expected * 0.7, wide)[0]
    assert gradient.dtype == dtype
    rounding = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert (gradient.double() - exact).abs().max() <= rounding * exact.abs().max()


def test_an_empty_mean_is_nan_as_in_torch():
    logits, _ = draw()
    ignored = torch.zeros(13, dtype=torch.int64)
    assert cross_entropy(logits, ignored, ignore_index=0)[0].isnan()
    assert cross_entropy(logits, ignored, ignore_index=0, reduction="sum")[0] == 0
    weights = torch.ones(50)
    for inplace in (False, True):
        empty = torch.randn(0, 50, requires_grad=True)
        options = {"class_weights": weights, "inplace": inplace}
        assert all(x.isnan() for x in cross_entropy(empty * 1, ignored[:0], **options))


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_an_empty_linear_mean_has_zero_gradients_as_in_torch(rows, weighted):
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    options = {"class_weights": torch.ones(50)} if weighted else {}
    target = torch.zeros(rows, dtype=torch.int64)
    loss, nll = F.linear_cross_entropy(hidden, weight, target, ignore_index=0, reduction="mean", **options)
    assert loss.isnan()
    assert nll.isnan()
    assert not any(x.any() for x in torch.autograd.grad(loss, (hidden, weight)))


def test_logits_are_overwritten_only_in_place():
    logits, target = draw()
    copy = logits * 1
    before = copy.detach().clone()
    cross_entropy(copy, target)
    assert torch.equal(copy, before)
    with torch.no_grad():
        cross_entropy(copy, target, inplace=True)
    assert torch.equal(copy, before)


def test_overwritten_logits_hold_their_gradient():
    logits, target = draw()
    copy = logits * 1
    loss, _ = cross_entropy(copy, target, inplace=True)
    (gradient,) = torch.autograd.grad(loss, copy)
    assert gradient.data_ptr() == copy.data_ptr()
    torch.testing.assert_close(gradient, torch.autograd.grad(torch_loss(logits, target), logits)[0])


@pytest.mark.parametrize(("inplace", "tensors"), [(False, 4), (True, 1)])
def test_only_the_logits_are_saved_at_their_size(inplace, tensors):
    logits, target = draw(rows=100)
    saved = []
    copy = logits * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        cross_entropy(copy, target, inplace=inplace)
    assert copy.data_ptr() in saved
    assert len(saved) == tensors  # not in place also target, statistics and the factor of the mean


def test_another_reader_of_overwritten_logits_raises():
    logits, target = draw()
    copy = logits * 1
    square = copy * copy  # needs the logits in its backward pass
    loss, _ = cross_entropy(copy, target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + square.sum()).backward()


def test_overwritten_logits_can_be_differentiated_once():
    logits, target = draw()
    loss, _ = cross_entropy(logits * 1, target, inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        loss.backward()
    loss, _ = cross_entropy(logits * 1, target)
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, logits)[0], first)


def test_autocast_leaves_the_loss_in_float32():
    logits, target = draw()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cross_entropy(logits, target)[0], cross_entropy(logits.detach(), target)[0])
        loss, _ = cross_entropy(logits.bfloat16(), target)
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(13)}, r"must be \(M, V\) and \(M,\)"),
        ({"target": torch.zeros(12, dtype=torch.int64)}, "must be"),
        ({"target": torch.zeros(13, dtype=torch.int16)}, "target is torch.int16: it must hold int64 or int32"),
        ({"target": torch.full((13,), 50)}, "target holds 50: classes are numbered from 0 to 49"),
        ({"target": torch.full((13,), -7)}, "target holds -7"),
        ({"reduction": "max"}, "reduction is 'max': choose mean, sum or none"),
        ({"reduction": "none", "inplace": True}, "reduction is 'none': inplace=True needs mean or sum"),
        ({"class_weights": torch.ones(13)}, r"class_weights is \(13,\) of torch.float32: it must be \(50,\) floats"),
        ({"row_weights": torch.ones(13, dtype=torch.int64)}, r"row_weights is .*: it must be \(13,\) floats"),
        ({"row_weights": torch.ones(13, requires_grad=True)}, "row_weights requires a gradient.*reduction='none'"),
        ({"label_smoothing": -0.1}, "label_smoothing -0.1"),
        ({"logits": torch.zeros(50, 13).t().requires_grad_(), "inplace": True}, r"call .contiguous\(\)"),
        ({"logits": torch.zeros(1, 50).expand(13, 50).requires_grad_(), "inplace": True}, "separate rows"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    logits, target = draw()
    with pytest.raises(ValueError, match=message):
        cross_entropy(**({"logits": logits, "target": target} | change))


@pytest.mark.parametrize("form", ["rows", "linear"])
@pytest.mark.parametrize(("reduction", "weighted"), [("none", False), ("mean", True), ("mean", False), ("sum", False)])
def test_second_derivatives_with_weights_and_reductions(form, reduction, weighted):
    hidden, weight = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 5))
    target, weights = torch.tensor([1, PAD, 4, 2]), torch.rand(4).double() if weighted else None
    options = {"label_smoothing": 0.1, "ignore_index": PAD, "reduction": reduction, "row_weights": weights}

    def loss(hidden, weight):
        if form == "rows":
            return cross_entropy(hidden @ weight.t(), target, **options)[0].sum()
        return F.linear_cross_entropy(hidden, weight, target, **options)[0].sum()

    assert torch.autograd.gradgradcheck(loss, (hidden, weight))
