"""linear_cross_entropy on the torch route and as an operator, and its memory."""

import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fasttfm import reference
from fasttfm.functional import linear_cross_entropy

LINEAR = importlib.import_module("fasttfm.functional.linear_cross_entropy")
ROWS = importlib.import_module("fasttfm.functional.loss")
PAD = 0
OPTIONS = {"label_smoothing": 0.1, "ignore_index": PAD}


def draw(rows=37, width=16, classes=90, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + classes)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = (torch.randn(classes, width, generator=generator) * 0.3).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[::3] = PAD
    return hidden.requires_grad_(), weight.requires_grad_(), target


def gradients(function, hidden, weight, target, **options):
    loss, nll = function(hidden, weight, target, **options)
    return loss.detach(), nll.detach(), *torch.autograd.grad(loss * 0.7, (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_are_as_exact_as_torchs_own_in_this_precision(dtype, monkeypatch):
    monkeypatch.setattr(LINEAR, "LOSS_CHUNK", 1000)  # several chunks, the last one short
    monkeypatch.setattr(ROWS, "LOSS_BLOCK", 400)
    inputs = draw(dtype=dtype)
    exact = gradients(
        reference.linear_cross_entropy,
        *(x.detach().double().requires_grad_() for x in inputs[:2]),
        inputs[2],
        **OPTIONS,
    )
    plain = gradients(reference.linear_cross_entropy, *inputs, **OPTIONS)
    actual = gradients(linear_cross_entropy, *inputs, **OPTIONS)
    floor = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for ours, torchs, truth in zip(actual, plain, exact, strict=True):
        assert ours.dtype == torchs.dtype
        allowed = 2 * (torchs.double() - truth).abs().max() + floor * truth.abs().max()
        assert (ours.double() - truth).abs().max() <= allowed


def test_hidden_may_have_leading_dimensions():
    hidden, weight, target = draw(rows=12)
    flat = gradients(linear_cross_entropy, hidden, weight, target, **OPTIONS)
    batched = gradients(
        linear_cross_entropy, hidden.detach().view(3, 4, 16).requires_grad_(), weight, target.view(3, 4), **OPTIONS
    )
    torch.testing.assert_close(batched[0], flat[0])
    torch.testing.assert_close(batched[2].view(12, 16), flat[2])


@pytest.mark.parametrize("rows", [0, 5])
def test_all_rows_ignored(rows):
    hidden, weight, _ = draw(rows=max(rows, 1))
    hidden = hidden.detach()[:rows].requires_grad_()
    actual = gradients(linear_cross_entropy, hidden, weight, torch.zeros(rows, dtype=torch.int64), **OPTIONS)
    assert actual[0] == actual[1] == 0
    assert actual[2].shape == hidden.shape
    assert (actual[2] == 0).all()
    assert (actual[3] == 0).all()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_gradient_that_is_not_required_is_not_computed(frozen):
    hidden, weight, target = draw()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    with Recorded() as seen:
        loss, _ = linear_cross_entropy(hidden, weight, target, **OPTIONS)
    assert seen["mm"] == 2
    loss.backward()
    other = weight if frozen == "hidden" else hidden
    expected_loss, _ = reference.linear_cross_entropy(hidden, weight, target, **OPTIONS)
    torch.testing.assert_close(other.grad, torch.autograd.grad(expected_loss, other)[0])


def test_without_gradients_only_the_loss_is_computed():
    hidden, weight, target = draw()
    with torch.no_grad(), Recorded() as seen:
        loss, nll = linear_cross_entropy(hidden, weight, target, **OPTIONS)
    assert seen["mm"] == 1
    assert not loss.requires_grad
    torch.testing.assert_close(
        (loss, nll), reference.linear_cross_entropy(hidden.detach(), weight.detach(), target, **OPTIONS)
    )


class Recorded(TorchDispatchMode):
    """Counts ATen operators inside fasttfm's, and records the size of their largest output."""

    def __init__(self):
        super().__init__()
        self.counts, self.largest = {}, 0

    def __getitem__(self, name):
        return self.counts.get(name, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        if func.namespace == "fasttfm":
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


def test_the_logits_are_computed_in_chunks(monkeypatch):
    monkeypatch.setattr(LINEAR, "LOSS_CHUNK", 16 * 96)
    monkeypatch.setattr(ROWS, "LOSS_BLOCK", 4 * 96)
    hidden, weight, target = draw(rows=400, classes=96)
    with Recorded() as seen:
        linear_cross_entropy(hidden, weight, target, **OPTIONS)
    # Hidden is 400 x 16, weight's gradient 96 x 16, a chunk of logits 16 x 96 floats; all logits would be 400 x 96.
    assert seen.largest <= 4 * 400 * 16


def test_the_gradients_and_the_inputs_are_saved():
    hidden, weight, target = draw(rows=300, classes=200)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        linear_cross_entropy(hidden, weight, target, **OPTIONS)
    assert sorted(saved) == sorted([*2 * [hidden.numel(), weight.numel()], target.numel()])


def test_autocast_casts_the_products_and_not_the_gradients():
    hidden, weight, target = draw(rows=64, width=32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = gradients(linear_cross_entropy, hidden, weight, target, **OPTIONS)
    halves = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    expected = gradients(linear_cross_entropy, *halves, target, **OPTIONS)
    assert [x.dtype for x in actual] == [torch.float32] * 4
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[2].bfloat16(), expected[2])
    torch.testing.assert_close(actual[3], expected[3].float(), rtol=1e-2, atol=1e-2)


def test_backward_can_be_called_again():
    hidden, weight, target = draw()
    loss, _ = linear_cross_entropy(hidden, weight, target, **OPTIONS)
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(loss * 2, hidden)[0], 2 * first)


def test_it_is_deterministic():
    inputs = draw(rows=300, classes=500)
    first, second = (gradients(linear_cross_entropy, *inputs, **OPTIONS) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(9, 5)}, r"must be \(\.\.\., N\), \(V, N\) and \(\.\.\.\)"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, "must be"),
        ({"target": torch.zeros(37)}, "int64"),
        ({"label_smoothing": 1.5}, "label_smoothing 1.5"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    hidden, weight, target = draw()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**({"hidden": hidden, "weight": weight, "target": target} | change))
