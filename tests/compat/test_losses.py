"""Drop-in losses: signatures, dtypes, and torch's module on them; numbers are in tests/peer_tests/pytorch.py."""

import inspect

import pytest
import torch
from torch import nn

from fasttfm.compat import losses
from fasttfm.functional import backend

CHUNKED = hasattr(nn.functional, "linear_cross_entropy")
needs_torch_213 = pytest.mark.skipif(not CHUNKED, reason="torch 2.13 brought linear_cross_entropy")


@pytest.mark.parametrize("name", ["cross_entropy", pytest.param("linear_cross_entropy", marks=needs_torch_213)])
def test_the_signatures_equal_torchs(name):
    ours, theirs = (inspect.signature(getattr(library, name)).parameters for library in (losses, nn.functional))
    assert list(ours) == list(theirs)
    for parameter, own in ours.items():
        assert (own.kind, own.default) == (theirs[parameter].kind, theirs[parameter].default)


@needs_torch_213
@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_torchs_module_runs_on_our_loss(monkeypatch, route, reduction):
    weight = torch.rand(11)
    module = nn.LinearCrossEntropyLoss(6, 11, reduction=reduction, weight=weight, ignore_index=3)
    x, target = torch.randn(9, 6, requires_grad=True), torch.arange(9)
    expected = module(x, target)
    gradients = torch.autograd.grad(expected.sum(), (x, *module.parameters()))
    monkeypatch.setattr(nn.functional, "linear_cross_entropy", losses.linear_cross_entropy)
    with backend(route):
        found = module(x, target)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), (x, *module.parameters())), gradients)


def test_targets_may_be_int32():
    x, weight, target = torch.randn(9, 6), torch.randn(11, 6), torch.arange(9)
    expected = nn.functional.cross_entropy(x @ weight.t(), target)
    torch.testing.assert_close(losses.linear_cross_entropy(x, weight, target.int()), expected)
    torch.testing.assert_close(losses.cross_entropy(x @ weight.t(), target.int()), expected)
