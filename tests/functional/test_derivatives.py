"""torch.func's transforms of the operators give the first derivatives that autograd gives."""

import pytest
import torch

from fasttfm import functional as F
from fasttfm import reference

SEED = torch.tensor([11])
LENGTHS = torch.tensor([6, 3])
TARGET = torch.tensor([3, 0, 5, 1, 2])
HEADS = ((2, 2, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8))
LONG = ((1, 2, 18, 8), (1, 2, 20, 8), (1, 2, 20, 8))
VECTORS = ((3, 16), (3, 16), (16,), (16,))
NETWORK = ((7, 8), (40, 8), (40,), (8, 40), (8,))

DROPPED = {"dropout_p": 0.25, "seed": SEED}
FUNCTIONS = {
    "attention": (lambda f, *t: f.attention(*t, key_lengths=LENGTHS, causal=True), HEADS),
    "dropout": (lambda f, *t: f.attention(*t, dropout_p=0.25, seed=SEED), HEADS),
    "mask": (lambda f, q, k, v, m: f.attention(q, k, v, mask=m), (*HEADS, (5, 6))),
    "long rows": (lambda f, *t: f.attention(*t, causal=True), LONG),
    "layer_norm": (lambda f, x, r, w, b: f.layer_norm(x, w, b) + 0 * r, VECTORS),
    "residual_layer_norm": (lambda f, *t: f.residual_layer_norm(*t, dropout_p=0.25, seed=SEED)[0], VECTORS),
    "residual_rms_norm": (lambda f, *t: f.residual_rms_norm(*t, dropout_p=0.25, seed=SEED)[0], VECTORS[:3]),
    "feed_forward": (lambda f, *t: f.feed_forward(*t, dropout_p=0.25, seed=SEED), NETWORK),
    "feed_forward gelu": (lambda f, *t: f.feed_forward(*t, activation="gelu", **DROPPED), NETWORK),
    "embed": (lambda f, w, p: f.embed(torch.tensor([[1, 4, 0]]), w, p, pad_id=0), ((9, 16), (3, 16))),
    "cross_entropy": (lambda f, x: f.cross_entropy(x, TARGET, **SUMMED.get(f, {}))[0], ((5, 9),)),
    "linear_cross_entropy": (lambda f, h, w: f.linear_cross_entropy(h, w, TARGET)[0], ((5, 8), (9, 8))),
}
SUMMED = {F: {"reduction": "sum"}}


def given(name):
    torch.manual_seed(1)
    call, shapes = FUNCTIONS[name]

    def function(module, *tensors):
        output = call(module, *tensors)
        return output[0] if isinstance(output, tuple) else output

    return function, [torch.randn(shape) for shape in shapes]


@pytest.mark.sample(4)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_grad_vjp_and_jacrev_are_those_of_the_specification(name, backend):
    function, tensors = given(name)
    places = tuple(range(len(tensors)))
    weights = torch.cos(torch.arange(function(reference, *tensors).numel()) * 1.0)
    few = slice(0, 3)  # rows of the Jacobian that are compared

    def total(module):
        return lambda *t: (function(module, *t).flatten() * weights).sum()

    def some(module):
        return lambda *t: function(module, *t).reshape(-1)[few]

    with F.backend(backend):
        gradients = torch.func.grad(total(F), argnums=places)(*tensors)
        output, pull = torch.func.vjp(some(F), *tensors)
        pulled = pull(torch.ones_like(output))
        jacobians = torch.func.jacrev(some(F), argnums=places)(*tensors)
    leaves = [t.clone().requires_grad_() for t in tensors]
    close = {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(gradients, torch.autograd.grad(total(reference)(*leaves), leaves), **close)
    expected = some(reference)(*leaves)
    torch.testing.assert_close(output, expected, **close)
    torch.testing.assert_close(pulled, torch.autograd.grad(expected.sum(), leaves, retain_graph=True), **close)
    for row in range(expected.numel()):
        wanted = torch.autograd.grad(expected[row], leaves, retain_graph=True)
        torch.testing.assert_close(tuple(j[row] for j in jacobians), wanted, **close)
