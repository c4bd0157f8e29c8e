"""The LayerNorm and RMSNorm kernels in the interpreter against the reference."""

import pytest
import torch
from accuracy import compare, compare_with_reference, solve
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shared_fixtures import examples

from fasttfm import functional, reference
from fasttfm.functional.backends import backend
from fasttfm.functional.operator import Inner
from fasttfm.functional.residual_norm import OPERATOR
from fasttfm.kernels import layer_norm as kernel
from fasttfm.kernels.chip import INTERPRETER

SEED = torch.tensor([0x1234567890ABCDEF])
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]
"""Dtypes of x and of the residual stream."""
NORMS = ("layer_norm", "rms_norm")


def tensors(shape, x_dtype, stream_dtype, *, weight=True, bias=True):
    generator = torch.Generator().manual_seed(sum(shape) + 1)

    def draw(*size):
        return torch.randn(size, generator=generator)

    inputs = {"x": (draw(*shape) + 0.5).to(x_dtype), "residual": draw(*shape).to(stream_dtype)}
    if weight:
        inputs["weight"] = draw(shape[-1]) + 1
    if bias:
        inputs["bias"] = draw(shape[-1])
    return inputs


def plain(inputs):
    """The inputs without the residual stream."""
    return {name: value for name, value in inputs.items() if name != "residual"}


def check(inputs, dropout_p=0.0, weigh=None, eps=1e-5, norm="layer_norm"):
    """Compares the kernel with the reference in float64 and in the precision of the inputs."""
    options = {"eps": eps, "dropout_p": dropout_p, "seed": SEED, "site": 5}

    def way(module):
        def normalize(x, residual=None, weight=None, bias=None):
            parameters = (weight, bias) if norm == "layer_norm" else (weight,)
            if residual is None:
                return getattr(module, norm)(x, *parameters, eps)
            return getattr(module, f"residual_{norm}")(x, residual, *parameters, **options)

        return normalize

    compare_with_reference(way(functional), way(reference), inputs, weigh)


def check_add(inputs):
    def add(module):
        return lambda x, residual: module.residual_add(x, residual, dropout_p=0.3, seed=SEED, site=9)

    compare_with_reference(add(functional), add(reference), {name: inputs[name] for name in ("x", "residual")})


@settings(max_examples=examples(20))
@given(
    rows=st.sampled_from([1, 3, 17, 33]),
    columns=st.sampled_from([1, 7, 17, 64, 96, 130, 257]),
    dtypes=st.sampled_from(PAIRS),
    dropout_p=st.sampled_from([0.0, 0.1, 0.5]),
    weight=st.booleans(),
    bias=st.booleans(),
    norm=st.sampled_from(NORMS),
)
@example(5, 24, PAIRS[0], 1.0, True, True, "layer_norm")
def test_residual_norms_equal_the_reference_for_any_shape(rows, columns, dtypes, dropout_p, weight, bias, norm):
    inputs = tensors((rows, columns), *dtypes, weight=weight, bias=bias and norm == "layer_norm")
    check(inputs, dropout_p, norm=norm)


@pytest.mark.parametrize(("x", "stream"), PAIRS, ids=str)
def test_forward_and_all_gradients_equal_the_reference_in_every_dtype(x, stream):
    inputs = tensors((2, 5, 72), x, stream)
    check(inputs, dropout_p=0.3)
    check(plain(inputs))
    check_add(inputs)


@pytest.mark.parametrize(
    ("rows", "columns", "x", "stream", "norm"),
    [
        (3, 1023, torch.float32, torch.float32, "layer_norm"),
        (3, 1500, torch.bfloat16, torch.float32, "rms_norm"),
        # too wide to sum in registers
        (3, kernel.WIDEST + 1, torch.bfloat16, torch.float32, "rms_norm"),
        (2, 6001, torch.float16, torch.float16, "layer_norm"),
        pytest.param(2, kernel.MAX_COLUMNS, torch.bfloat16, torch.float32, "layer_norm", marks=pytest.mark.whole),
        pytest.param(2, kernel.MAX_COLUMNS, torch.float32, torch.float32, "rms_norm", marks=pytest.mark.whole),
        (0, 40, torch.float32, torch.float32, "rms_norm"),
        (0, kernel.WIDEST + 1, torch.float32, torch.float32, "layer_norm"),
    ],
    ids=str,
)
def test_rows_of_odd_widths_up_to_the_widest_and_no_rows(rows, columns, x, stream, norm):
    inputs = tensors((rows, columns), x, stream, bias=norm == "layer_norm")
    check(inputs, dropout_p=0.1, norm=norm)
    check_add(inputs)
    check(plain(inputs), norm=norm)


def test_torch_computes_rows_that_are_too_wide_for_the_kernel():
    check({"x": torch.randn(2, kernel.MAX_COLUMNS + 1)})
    with pytest.raises(ValueError, match="at most 8192"):
        kernel.tile(INTERPRETER, kernel.MAX_COLUMNS + 1, backward=False)


def test_programs_with_several_tiles_of_several_rows_sum_every_row_once():
    tile = kernel.tile(INTERPRETER, 20, backward=True)
    assert tile.rows > 1
    rows = tile.rows * (4 * INTERPRETER.processors + 1) + 3  # more tiles than programs, and a partial one
    check(tensors((rows, 20), torch.float32, torch.float32))


@pytest.mark.sample(4)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(("x", "stream"), [*PAIRS[:1], *PAIRS[2:]], ids=str)
@pytest.mark.parametrize("columns", [72, kernel.WIDEST + 1], ids=["in registers", "wide"])
def test_the_bias_of_x_has_its_gradient(dropout_p, x, stream, columns):
    inputs = tensors((40 if columns == 72 else 3, columns), x, stream)
    inputs["x_bias"] = torch.randn(columns)
    options = {"dropout_p": dropout_p, "seed": SEED, "site": 5}

    def specified(x, residual, weight, bias, x_bias):
        return reference.residual_layer_norm((x + x_bias.to(x.dtype)), residual, weight, bias, **options)

    def ours(**tensors):
        return functional.residual_layer_norm(**tensors, **options)

    expected, exact = solve(specified, inputs), solve(specified, inputs, torch.float64)
    for route in ("torch", "triton"):
        with backend(route):
            compare(solve(ours, inputs), expected, exact)


@pytest.mark.parametrize("columns", [72, kernel.WIDEST + 1], ids=["in registers", "wide"])
@pytest.mark.parametrize("route", ["torch", "triton"])
def test_the_gradient_of_a_second_use_of_y_is_added(route, columns):
    x, residual, weight, bias = tensors((5, columns), torch.float32, torch.float32).values()
    _, saved = Inner(OPERATOR)(x, None, residual, weight, bias, SEED, 1e-5, 0.3, 5, False, route)
    dy, dy2, ds = torch.randn(3, 5, columns)
    both, added = (OPERATOR.derivative.call(*dys, ds, saved) for dys in ((dy, dy2), (dy + dy2, None)))
    assert all(map(torch.equal, both[:2], added[:2]))
    assert all(map(torch.equal, both[3:], added[3:]))
    assert not torch.equal(both[0], OPERATOR.derivative.call(dy, None, ds, saved)[0])


def only(position):
    return lambda outputs: (outputs[position].double() * torch.linspace(-1, 1, outputs[position].shape[-1])).sum()


@pytest.mark.parametrize("position", [0, 1], ids=["only y is used", "only s is used"])
def test_gradients_when_only_one_output_is_used(position):
    inputs = tensors((5, 24), torch.bfloat16, torch.float32, weight=position == 0, bias=position == 0)
    check(inputs, 0.25, only(position))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_are_float32_whatever_the_dtype(dtype):
    x = (torch.randn(4, 96) * 3 + 100).to(dtype)
    _, _, mean, rstd = kernel.Forward(x, None)(x, None, None, None, None, 1e-5)
    assert mean.dtype == rstd.dtype == torch.float32
    torch.testing.assert_close(mean, x.double().mean(-1).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd, (x.double().var(-1, correction=0) + 1e-5).rsqrt().float(), rtol=1e-5, atol=0)


def test_a_large_mean_does_not_swallow_the_variance():
    """Mean of squares minus square of the mean would cancel all digits."""
    x = torch.randn(3, 64) + 3000.0
    y, *_ = kernel.Forward(x, None)(x, None, None, None, None, 1e-5)
    torch.testing.assert_close(y.double(), reference.layer_norm(x.double(), None, None), rtol=0, atol=2e-3)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_eps_is_added_to_the_variance(eps, norm):
    check({"x": torch.randn(3, 40) * 1e-2, "weight": torch.randn(40)}, eps=eps, norm=norm)


def test_expanded_and_transposed_inputs_and_gradients():
    inputs = {
        "x": torch.randn(3, 1, 36).expand(3, 4, 36),
        "residual": torch.randn(36, 4, 3).permute(2, 1, 0),
        "weight": torch.randn(72)[::2],
        "bias": torch.randn(1).expand(36),
    }
    check(inputs, dropout_p=0.2)
    check(inputs, dropout_p=0.2, weigh=lambda outputs: outputs[0].sum() + outputs[1].sum())  # an expanded gradient
