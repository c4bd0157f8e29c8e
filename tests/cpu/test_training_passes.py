"""The compiled loops of a training step on a CPU against the PyTorch backend."""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from waiting import PATIENCE

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.cpu import training_passes

pytest.importorskip("numba")

from fasttfm.cpu import thread_team

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def by_pytorch(monkeypatch):
    """Runs a function without the compiled loops."""

    def run(function):
        with monkeypatch.context() as patch:
            patch.setattr(training_passes, "takes", lambda *_: False)
            return function()

    return run


def tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def same(x: Tensor, y: Tensor) -> None:
    """Assert that x and y of order 1 differ by one rounding at most."""
    torch.testing.assert_close(x, y, rtol=2 * torch.finfo(x.dtype).eps, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 300, 128), (3, 5, 13), (2, 3, 1)])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_keep_masks_are_the_bits_of_the_reference(shape, p):
    seed = torch.tensor([-(2**62) - 12345])
    assert torch.equal(training_passes.keep_mask(shape, p, seed, 7), reference.keep_mask(shape, p, seed, 7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_residual_layer_norm_and_its_gradients_match_pytorch(p, dtype, by_pytorch):
    """A branch of dtype and a float32 stream, as under autocast; sums over rows differ in order."""
    from fasttfm.functional.residual_norm import residual_layer_norm

    rows, width = 517, 96

    def run():
        x = tensor(dtype, rows, width).requires_grad_()
        residual = tensor(torch.float32, rows, width, seed=1).requires_grad_()
        weight, bias = (tensor(torch.float32, width, seed=seed).requires_grad_() for seed in (2, 3))
        seed = torch.tensor([-(2**62) - 12345])
        y, s = residual_layer_norm(x, residual, weight, bias, 1e-5, dropout_p=p, seed=seed, site=3)
        grads = [tensor(each.dtype, rows, width, seed=4 + i) for i, each in enumerate((y, s))]
        return y, s, *torch.autograd.grad([y, s], [x, residual, weight, bias], grads)

    assert training_passes.takes(torch.empty(rows, width))
    of_sums = 10 * rows * torch.finfo(torch.float32).eps  # terms of order 10
    for value, expected in zip(run(), by_pytorch(run), strict=True):
        bounds = {"rtol": max(2 * torch.finfo(value.dtype).eps, 1e-5), "atol": 2e-5 if value.dim() > 1 else of_sums}
        torch.testing.assert_close(value, expected, **bounds)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(("p", "pad_id"), [(0.0, None), (0.3, None), (0.3, 2), (1.0, 0)])
def test_the_gradient_of_an_embedding_has_pytorchs_bits(p, pad_id, tokens, dtype, by_pytorch):
    """Rows of few, many and no tokens; gradients of -0.0, whose sign a sum that starts at 0 loses."""
    ids = torch.randint(0, 40, (7, 60), generator=torch.Generator().manual_seed(0)).to(tokens)
    weight = tensor(dtype, 50, 100).requires_grad_()
    y = F.embed(ids, weight, scale=3.3, pad_id=pad_id, dropout_p=p, seed=torch.tensor([5]))
    grad = tensor(dtype, *y.shape, seed=1)
    grad[:, ::9] = -0.0

    def run():
        return torch.autograd.grad(y, weight, grad, retain_graph=True)[0]

    assert training_passes.takes(grad)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(run().view(bits), by_pytorch(run).view(bits))


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tanh_gelu_and_its_gradient_match_the_formula(dtype, drops):
    far = torch.tensor([0.0, 1e-30, 12.9, 13.1, 80.0, 1e10, 1e30, torch.finfo(dtype).max])
    x = torch.cat([torch.linspace(-15, 15, 700 * 16), far, -far]).to(dtype).view(-1, 16)
    grad = tensor(dtype, *x.shape)
    keep = tensor(torch.float32, *x.shape, seed=1) > 0 if drops else torch.empty(0, dtype=torch.bool)
    wide = x.double().requires_grad_()
    with torch.enable_grad():
        expected = reference.gelu(wide, tanh=True) * (keep if drops else 1.0)
        expected.backward(grad.double())
    hidden = training_passes.gelu_tanh(x, keep)
    d_x, again = training_passes.gelu_tanh_gradient(grad.clone(), x, keep)
    assert torch.equal(hidden, again)
    same(hidden, expected.detach().to(dtype))
    near = x.abs() < 1e10  # beyond, the formula has inf * 0
    same(d_x[near], wide.grad.to(dtype)[near])
    torch.testing.assert_close(d_x[~near], torch.where(x > 0, grad, 0.0)[~near] * (keep[~near] if drops else 1.0))
    nan, all_kept = torch.full((1, 16), torch.nan), torch.empty(0, dtype=torch.bool)
    assert training_passes.gelu_tanh(nan, all_kept).isnan().all()
    assert training_passes.gelu_tanh_gradient(torch.ones(1, 16), nan, all_kept)[0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}], ids=str)
def test_cross_entropy_and_its_gradient_match_pytorch(options, smoothing, dtype, by_pytorch):
    raw, target = (torch.randn(70, 515) * 3).to(dtype), torch.randint(515, (70,))
    raw[4, 7], target[::5] = -math.inf, -100

    def solve():
        logits = raw.clone().requires_grad_()
        loss, nll = F.cross_entropy(logits * 1.0, target, label_smoothing=smoothing, **options)
        return loss.detach(), nll, *torch.autograd.grad(loss, logits)

    if smoothing:
        raw[4, 7] = -9.0
    expected, actual = by_pytorch(solve), solve()
    for x, wanted in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(x, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual[2], expected[2], rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert not actual[2][::5].any()


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
def test_cross_entropy_of_nan_or_inf_is_nan(value):
    logits = torch.randn(70, 515)
    logits[3, 9] = value
    logits.requires_grad_()
    loss, _ = F.cross_entropy(logits, torch.zeros(70, dtype=torch.int64), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isnan()
    assert gradient.isnan().all(1).nonzero().tolist() == [[3]]


def every_pass(dtype: torch.dtype) -> dict[str, tuple[Tensor, ...]]:
    """The results of each loop at a size of several parts, the last one short."""
    seed = torch.tensor([-(2**62)])
    rows, dy, before = (tensor(dtype, 4133, 96, seed=2 + n) for n in range(3))
    weight, bias = (tensor(torch.float32, 96, seed=5 + n) for n in range(2))
    y, s, *statistics, keep = training_passes.residual_layer_norm(rows, dy, weight, bias, 1e-5, 0.3, seed, 2)
    classes = torch.arange(len(rows)) % rows.shape[1]
    _, statistics_of_classes = training_passes.cross_entropy(rows, classes, None, 0.1, None, None)
    return {
        "keep_mask": (training_passes.keep_mask((5, 300, 130), 0.3, seed, 7),),
        "gelu_tanh": (training_passes.gelu_tanh(before, keep),),
        "gelu_tanh_gradient": training_passes.gelu_tanh_gradient(dy.clone(), before, keep),
        "residual_layer_norm": (y, s, *statistics, keep),
        "without_dropout": training_passes.residual_layer_norm(rows, dy, weight, bias, 1e-5, 0.0, None, 0),
        "residual_layer_norm_gradient": training_passes.residual_layer_norm_gradient(
            dy, rows, s, tuple(statistics), weight, keep, 1.5
        ),
        "embedding_gradient": (training_passes.embedding_gradient(rows, classes, 5000, 3, keep, 1.5, 0.7),),
        "cross_entropy": training_passes.cross_entropy(rows, classes, None, 0.1, None, None),
        "cross_entropy_gradient": (
            training_passes.cross_entropy_gradient(rows, classes, None, 0.1, torch.tensor(0.5), statistics_of_classes),
        ),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype, threads):
    threads(1)
    expected = every_pass(dtype)
    for count in (2, 4, 8):
        threads(count)
        assert thread_team.team()[0] == count
        for name, values in every_pass(dtype).items():
            assert all(torch.equal(x, y) for x, y in zip(values, expected[name], strict=True)), (name, count)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_computes_on_one_thread():
    """A fork has none of its parent's threads: waiting for them, as PyTorch's own operators do, would hang."""
    program = """
import os, torch
from fasttfm.cpu import training_passes
torch.set_num_threads(2)
draw = lambda: training_passes.keep_mask((1, 400, 512), 0.3, torch.tensor([7]), 1).numpy().sum()
count = draw()
pid = os.fork()
if not pid:
    os._exit(0 if training_passes.team() == (1, 0, 0) and draw() == count else 9)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == "0\n"
