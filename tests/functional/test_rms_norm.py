"""RMSNorm as an operator: the PyTorch route and autograd. Refusals: test_layer_norm.py."""

from functools import partial

import pytest
import torch

from fasttfm import functional, reference
from fasttfm.functional.backends import backend
from fasttfm.kernels.tiles.rows import MAX_COLUMNS

from .test_layer_norm import PAIRS, SEED, assert_same, solve
from .test_layer_norm import leaf_tensors as norm_tensors

leaf_tensors = partial(norm_tensors, parameters=1)


@pytest.mark.parametrize(("x", "stream"), PAIRS, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25, 1.0])
def test_the_pytorch_route_equals_the_reference(x, stream, dropout_p):
    inputs = leaf_tensors((3, 5, 24), x, stream)
    options = {"dropout_p": dropout_p, "seed": SEED, "site": 2}
    assert_same(
        solve(functional.residual_rms_norm, inputs, **options), solve(reference.residual_rms_norm, inputs, **options)
    )
    x, _, weight = inputs
    assert_same(solve(functional.rms_norm, [x, weight]), solve(reference.rms_norm, [x, weight]))
    assert_same(
        solve(lambda x: functional.rms_norm(x, None, 0.1), [x]), solve(lambda x: reference.rms_norm(x, None, 0.1), [x])
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weight_in_half_precision(dtype):
    for route in ("torch", "triton"):
        inputs = leaf_tensors((4, 24), dtype, dtype, dtype)
        with backend(route):
            actual = solve(functional.residual_rms_norm, inputs)
        assert_same(actual, solve(reference.residual_rms_norm, inputs))


def test_the_gradient_of_the_weight_over_many_rows_of_half_precision_is_summed_in_float32():
    x, _, weight = leaf_tensors((4096, 16), torch.bfloat16)

    def weight_gradient(function, x, weight):
        y = function(x, weight)
        return torch.autograd.grad(y, weight, y.detach())[0]  # grows with every row

    actual = weight_gradient(functional.rms_norm, x, weight)
    exact = weight_gradient(reference.rms_norm, x.double(), weight.double())
    torch.testing.assert_close(actual.double(), exact, rtol=5e-3, atol=0)


def test_wider_rows_than_the_kernel_holds_are_left_to_torch():
    x, _, weight = leaf_tensors((2, MAX_COLUMNS + 1))
    with backend("triton"):
        actual = solve(functional.rms_norm, [x, weight])
    assert_same(actual, solve(reference.rms_norm, [x, weight]))
