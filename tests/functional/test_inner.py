"""Inner: an operator inside a larger autograd node computes the same bits, and is planned once."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fasttfm.functional.attention.operator import OPERATOR as ATTENTION
from fasttfm.functional.backends import backend
from fasttfm.functional.feed_forward import OPERATOR as FEED_FORWARD
from fasttfm.functional.operator import Inner
from fasttfm.functional.residual_add import OPERATOR as RESIDUAL_ADD
from fasttfm.functional.residual_norm import OPERATOR as RESIDUAL_NORM
from fasttfm.kernels.launch import interpreted

ROUTES = ["auto", "triton"] if interpreted() else ["auto"]
SEED = torch.tensor([11])
VECTOR, ROWS, HEADS = torch.randn(16), torch.randn(2, 5, 16), torch.randn(2, 5, 2, 8)
NETWORK = torch.randn(32, 16), torch.randn(32), torch.randn(16, 32), VECTOR
CALLS = {
    "residual_norm": (RESIDUAL_NORM, (ROWS, VECTOR, ROWS + 1, VECTOR, VECTOR, SEED, 1e-5, 0.5, 1, False)),
    "layer_norm": (RESIDUAL_NORM, (ROWS, None, None, VECTOR, VECTOR, None, 1e-5, 0.0, 0, False)),
    "residual_add": (RESIDUAL_ADD, (ROWS, ROWS + 1, 0.5, SEED, 3)),
    "feed_forward": (FEED_FORWARD, (ROWS, *NETWORK, 0.5, SEED, 2, "relu")),
    "attention": (
        ATTENTION,
        (HEADS, torch.randn(2, 5, 2, 2, 8), *[None] * 8, SEED, 0, 0, False, 0, -1, 0.0, 0, 0.5, 0.3, 1, False, False),
    ),
}
"""Operators, each with the fields of a call."""


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("route", ROUTES)
def test_outputs_and_gradients_are_those_of_the_operator(name, route):
    of, fields = CALLS[name]
    leaves = [x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in fields]
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    no_mask = SimpleNamespace(mask=False, sinks=False)
    with backend(route):
        expected = [x for x in of.call(*leaves, route) if x is not None and x.requires_grad]
        gradients = [torch.randn_like(x) for x in expected]
        expected_gradients = torch.autograd.grad(expected, wanted, gradients)
        inner, planned = Inner(of), len(of.plans)
        given = (*gradients, *[None] * (of.differentiable - len(gradients)))
        with torch.no_grad():
            for _ in range(2):  # planned, then computed
                outputs, saved = inner(*fields, route)
                computed = of.backward(lambda call: inner.backward(*call), saved, no_mask, *given)
                results = [x for x in computed if x is not None]
                assert type(saved) is of.saved
                assert all(map(torch.equal, outputs, expected))
                assert len(results) == len(wanted)
                assert all(map(torch.equal, results, expected_gradients))
    assert len(of.plans) == planned


def test_wrong_arguments_are_refused_at_the_first_call():
    for weight, eps, words in ((torch.ones(3), 1e-5, r"weight \(3,\) must be \(16,\)"), (VECTOR, "a", "eps is 'a'")):
        with pytest.raises((ValueError, TypeError), match=words):
            Inner(RESIDUAL_NORM)(ROWS, None, None, weight, None, None, eps, 0.0, 0, False, "auto")
