"""The feed-forward kernels in the interpreter against the reference, by every route."""

import pytest
import torch
from accuracy import compare_with_reference, solve
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_fixtures import examples

from fasttfm import functional, reference
from fasttfm.functional.backends import backend
from fasttfm.kernels import feed_forward as kernel
from fasttfm.kernels import product
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof import matrix
from fasttfm.kernels.tiles.feed_forward import PRODUCT, ROUTE, of_two_results
from fasttfm.kernels.tiles.rows import COLUMN_SUMS
from fasttfm.kernels.tiles.table import Tile

SEED, SITE = torch.tensor([-0x1234567890ABCDEF]), 4
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def tensors(rows, width, hidden, out, dtype, *, bias=True):
    generator = torch.Generator().manual_seed(rows + width + hidden)

    def draw(*shape):
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    inputs = {"x": draw(*rows, width) if isinstance(rows, tuple) else draw(rows, width)}
    inputs |= {"weight1": draw(hidden, width), "weight2": draw(out, hidden)}
    return inputs | ({"bias1": draw(hidden), "bias2": draw(out)} if bias else {})


def way(function, **options):
    def call(x, weight1, weight2, bias1=None, bias2=None):
        return function(x, weight1, bias1, weight2, bias2, **options)

    return call


def forward(x, weight1, weight2, bias1=None, bias2=None, **options):
    """Plans and runs the forward pass."""
    seed = SEED if options.get("dropout_p") else None
    return kernel.Forward(x, weight1, weight2, **options)(x, weight1, bias1, weight2, bias2, seed, SITE)


def backward(dout, x, kept, bits, weight1, weight2, *, biases=True, **options):
    """Plans and runs the backward pass."""
    seed = SEED if options.get("dropout_p") else None
    plan = kernel.Backward(x, kept, bits, weight2, bias1=biases, bias2=biases, **options)
    return plan(dout, x, kept, bits, weight1, weight2, seed, SITE)


def by_launches(first, second, **options):
    """The network as a differentiable function, with a route for each pass."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight1, bias1, weight2, bias2):
            out, *kept = forward(x, weight1, weight2, bias1, bias2, route=first, **options)
            ctx.save_for_backward(x, *kept, weight1, weight2)
            return out

        @staticmethod
        def backward(ctx, dout):
            return backward(dout.contiguous(), *ctx.saved_tensors, route=second, **options)

    return Function.apply


def check(inputs, dropout_p=0.0, activation="relu"):
    options = {"dropout_p": dropout_p, "seed": SEED, "site": SITE, "activation": activation}
    compare_with_reference(way(functional.feed_forward, **options), way(reference.feed_forward, **options), inputs)


@settings(max_examples=examples(20))
@given(
    rows=st.sampled_from([1, 3, 33]),
    width=st.sampled_from([1, 17, 32, 40]),
    hidden=st.sampled_from([1, 31, 64, 70]),
    out=st.sampled_from([1, 24, 33]),
    dtype=st.sampled_from(DTYPES),
    dropout_p=st.sampled_from([0.0, 0.1, 0.5]),
    bias=st.booleans(),
    activation=st.sampled_from(["relu", "gelu", "gelu_tanh"]),
)
def test_feed_forward_equals_the_reference_for_any_shape(rows, width, hidden, out, dtype, dropout_p, bias, activation):
    inputs = tensors(rows, width, hidden, out, dtype, bias=bias)
    check(inputs | {"x": 3 * inputs["x"]}, dropout_p, activation)


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "hidden", "out"), [(16, 16_384, 8), (16_384, 33, 8), (8, 33, 16_384)], ids=["hidden", "in", "out"]
)
def test_networks_as_wide_as_those_of_large_models(width, hidden, out):
    check(tensors(3, width, hidden, out, torch.float32), dropout_p=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("first", "second"),
    [("fused", "fused"), ("cublas", "fused"), ("cublas", "cublas"), ("fused", "cublas")],
    ids=["all fused", "fused from the sign of hidden", "cuBLAS and one pass", "bits unused"],
)
def test_every_route_equals_the_reference(first, second, dtype):
    inputs = tensors(37, 40, 72, 24, dtype)
    specified = way(reference.feed_forward, dropout_p=0.25, seed=SEED, site=SITE)
    compare_with_reference(way(by_launches(first, second, dropout_p=0.25)), specified, inputs)


def test_the_bits_are_the_open_elements_in_an_eighth_of_a_bool_masks_bytes():
    inputs = tensors(21, 24, 75, 8, torch.float32)
    _, hidden, bits = forward(**inputs, dropout_p=0.4, route="fused")
    before = torch.nn.functional.linear(inputs["x"], inputs["weight1"], inputs["bias1"])
    expected = (before > 0) & reference.keep_mask((1, 21, 75), 0.4, SEED, SITE)[0]
    unpacked = (bits[:, :, None] >> torch.arange(32)) & 1
    assert torch.equal(unpacked.view(21, -1)[:, :75].bool(), expected)
    assert not unpacked.view(21, -1)[:, 75:].any()
    assert torch.equal(hidden > 0, expected)
    _, _, bits = forward(**tensors(21, 24, 1024, 8, torch.float32), route="fused")
    assert bits.numel() * bits.element_size() * 8 == 21 * 1024


def test_more_tiles_than_a_group_has_are_all_computed(monkeypatch):
    """Groups have 8 tiles of rows; here are 10 tiles of rows by 3 of columns."""
    monkeypatch.setattr(product, "PRODUCT", lambda *size: Tile(16, 32, 4, 1, 16))
    check(tensors(150, 24, 70, 40, torch.float32), dropout_p=0.2)


def test_programs_with_several_tiles_of_rows_sum_every_row_once(monkeypatch):
    monkeypatch.setattr(product, "gate_programs", lambda chip, M: 2)
    inputs = tensors(75, 24, 40, 8, torch.float32)  # five tiles for two programs
    results = solve(way(by_launches("cublas", "cublas", dropout_p=0.25)), inputs)
    expected = solve(way(reference.feed_forward, dropout_p=0.25, seed=SEED, site=SITE), inputs)
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("route", ["fused", "cublas"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 1.0])
def test_hidden_is_dropped_exactly_where_the_reference_drops(route, dropout_p):
    x = torch.ones(19, 8)
    weight1 = torch.ones(130, 8)  # every hidden element is 8
    _, hidden, _ = forward(x, weight1, weight1.t().contiguous(), dropout_p=dropout_p, route=route)
    assert torch.equal(hidden, 8.0 * reference.keep_mask((1, 19, 130), dropout_p, SEED, SITE)[0])


def test_dropping_everything_leaves_the_second_bias_and_no_gradient():
    inputs = tensors(5, 16, 40, 24, torch.float32)
    with backend("triton"):
        results = solve(way(functional.feed_forward, dropout_p=1.0, seed=SEED), inputs)
    assert torch.equal(results["output 0"], inputs["bias2"].expand(5, 24))
    for name in ("x", "weight1", "bias1", "weight2"):
        assert not results[f"gradient of {name}"].any()


@pytest.mark.parametrize("route", ["fused", "cublas"])
def test_nan_propagates(route):
    inputs = tensors(3, 16, 40, 24, torch.float32)
    inputs["x"][1, 3] = torch.nan
    out, *kept = forward(**inputs, route=route)
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()
    dx, *_ = backward(torch.ones_like(out), inputs["x"], *kept, inputs["weight1"], inputs["weight2"], route=route)
    assert dx.isfinite().all()  # the gradient of out is finite


def test_hidden_values_that_round_to_zero_pass_no_gradient():
    """A value below the smallest of float16 is stored as 0, and its bit must be 0 too."""
    x = torch.full((1, 8), 2.0**-13, dtype=torch.float16)
    weight1 = torch.full((32, 8), 2.0**-16, dtype=torch.float16)  # hidden would be 2**-26
    weight2 = torch.ones(8, 32, dtype=torch.float16)
    out, hidden, bits = forward(x, weight1, weight2, route="fused")
    assert not out.any()
    assert not hidden.any()
    assert not bits.any()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_no_rows_give_no_output_and_zero_gradients(activation):
    check(tensors(0, 16, 40, 24, torch.float32), dropout_p=0.1, activation=activation)


def test_expanded_and_transposed_inputs_and_gradients():
    inputs = tensors(12, 16, 40, 24, torch.float32)
    inputs["x"] = torch.randn(16, 1, 5).expand(16, 3, 5).permute(1, 2, 0)
    inputs["weight1"] = torch.randn(16, 40).t()
    inputs["weight2"] = torch.randn(40, 24).t()
    inputs["bias1"] = torch.randn(1).expand(40)
    check(inputs, dropout_p=0.2)
    with backend("triton"):
        results = solve(way(functional.feed_forward), inputs, weigh=lambda outputs: outputs[0].sum())
    exact = solve(way(reference.feed_forward), inputs, weigh=lambda outputs: outputs[0].sum())
    torch.testing.assert_close(results, exact, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------------------- tiles and routes


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_every_tile_that_a_chip_can_take_is_listed_for_compilation(chip, activation):
    places = ("ROWS", "COLUMNS", "DEPTH")
    listed = {
        (case.kernel, case.dtype, case.num_warps, case.num_stages, *map(case.arguments.get, places))
        for case in matrix.families()["feed_forward"](chip)
        if case.arguments["ACTIVATION"] == activation
    }
    gate = COLUMN_SUMS(chip)
    for kind in ("fp32", "fp16", "bf16"):
        for size in ("large", "small"):
            tile = PRODUCT(chip, kind, size)
            assert tile.columns % 32 == 0
            half = tile if activation == "relu" else of_two_results(tile)
            assert half.rows == tile.rows  # else a bias gradient would have another number of partial sums
            for jit, each in ((kernel._forward, tile), (kernel._backward, half)):
                assert (jit, kind, each.warps, each.stages, each.rows, each.columns, each.depth) in listed
        assert (kernel._gate, kind, gate.warps, gate.stages, gate.rows, gate.columns, None) in listed


def test_cublas_is_used_where_triton_cannot_use_matrix_units():
    for name in ("sm_60", "sm_70", "sm_75"):
        for kind in ("fp32", "fp16", "bf16"):
            for each in ("forward", "forward+dropout", "forward+gelu", "backward", "backward+bits", "backward+gelu"):
                assert ROUTE(CHIPS[name], kind, each) == "cublas"
    assert ROUTE(CHIPS["sm_90"], "bf16", "backward+bits") == "fused"
    assert ROUTE(CHIPS["sm_90"], "bf16", "backward+gelu") == "cublas"  # an H100: slower than PyTorch
    assert ROUTE(CHIPS["sm_80"], "bf16", "backward") == "fused"
    assert ROUTE(CHIPS["sm_90"], "bf16", "forward+dropout") == "fused"
    assert ROUTE(CHIPS["sm_90"], "bf16", "forward") == "cublas"  # cuBLASLt fuses bias and ReLU for nothing
    assert ROUTE(CHIPS["sm_90"], "fp32", "backward") == "cublas"
    assert ROUTE(CHIPS["sm_90"], "tf32", "backward+bits") == "fused"
