"""RMSNorm on LayerNorm's kernels, through the interpreter, against the reference: what differs from LayerNorm. Tiles,
strides and sums over programs are the same kernels' (test_layer_norm.py).
"""

import pytest
import torch
from accuracy import compare_with_reference, solve
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_fixtures import examples
from test_layer_norm import PAIRS, SEED

from fasttfm import functional, reference
from fasttfm.functional.backends import backend


def tensors(shape, x_dtype, stream_dtype, *, weight=True):
    generator = torch.Generator().manual_seed(sum(shape))
    inputs = {"x": (torch.randn(shape, generator=generator) + 0.5).to(x_dtype)}
    inputs["residual"] = torch.randn(shape, generator=generator).to(stream_dtype)
    if weight:
        inputs["weight"] = torch.randn(shape[-1], generator=generator) + 1
    return inputs


def check(inputs, dropout_p=0.0, weigh=None, eps=1e-6):
    """The kernel against the reference in float64 and in the inputs' own precision; without a residual, alone."""

    def way(module):
        def normalise(x, residual=None, weight=None):
            if residual is None:
                return module.rms_norm(x, weight, eps)
            return module.residual_rms_norm(x, residual, weight, eps, dropout_p=dropout_p, seed=SEED, site=5)

        return normalise

    compare_with_reference(way(functional), way(reference), inputs, weigh)


def alone(inputs):
    return {name: value for name, value in inputs.items() if name != "residual"}


@settings(max_examples=examples(8))
@given(
    rows=st.sampled_from([1, 3, 17, 33]),
    columns=st.sampled_from([1, 7, 17, 64, 96, 130, 257]),
    dtypes=st.sampled_from(PAIRS),
    dropout_p=st.sampled_from([0.0, 0.1, 0.5]),
    weight=st.booleans(),
)
def test_residual_rms_norm_equals_the_reference_for_any_shape(rows, columns, dtypes, dropout_p, weight):
    check(tensors((rows, columns), *dtypes, weight=weight), dropout_p)


@pytest.mark.parametrize("columns", [1023, 1500, 4097])
def test_rows_of_odd_width_also_those_too_wide_to_sum_in_registers(columns):
    inputs = tensors((3, columns), torch.bfloat16, torch.float32)
    check(inputs, dropout_p=0.1)
    check(alone(inputs))


def test_the_mean_is_not_subtracted():
    x = torch.randn(3, 40) + 100.0
    with backend("triton"):
        y = functional.rms_norm(x, None)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (40,), eps=1e-6))
    assert y.mean() > 0.9


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_eps_is_added_to_the_mean_square(eps):
    check({"x": torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) * 1e-2}, eps=eps)


def test_no_rows_give_no_output_and_a_zero_gradient():
    for columns in (40, 4097):
        inputs = alone(tensors((0, columns), torch.float32, torch.float32))
        with backend("triton"):
            actual = solve(lambda x, weight: functional.rms_norm(x, weight), inputs)
        assert actual["output 0"].shape == (0, columns)
        assert not actual["gradient of weight"].any()
