"""Every attention kernel in the interpreter against reference.py: forward, all gradients, the same dropout."""

import dataclasses
import math

import pytest
import torch
from accuracy import assert_as_accurate, solve, weigh_all
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from shared_fixtures import examples

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.chip import INTERPRETER

ROUTES = ("short", "flash", "heads", "softmax")
LONG = ("flash", "heads")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def tensors(dtype, B, H, L, S, D, Dv, key_heads=None):
    """query, key and value strided like the output of a projection."""
    shapes = {"query": (L, H, D), "key": (S, key_heads or H, D), "value": (S, key_heads or H, Dv)}
    return {name: torch.randn(B, *shape).to(dtype).transpose(1, 2) for name, shape in shapes.items()}


def compare(results, plain, exact, slack=None):
    """The rule of accuracy.py with one floor for all results, because a gradient that cancels is only rounding.

    slack: additional tolerance for the elements of a gradient, by name.
    """
    assert results.keys() == plain.keys() == exact.keys()
    largest = max((x.abs().max().item() for x in exact.values() if x.numel()), default=0.0)
    for what, x in results.items():
        more = 0.0 if slack is None else slack.get(what, 0.0)
        assert_as_accurate(x, plain[what], exact[what], what, largest=largest, slack=more)


def cancellation(route, inputs, **options):
    """Tolerance for each element of a gradient, by name, where terms cancel.

    In dS = P * (dP - delta) with delta = rowsum(P * dP), each term has a relative error of the unit roundoff u, so that
    the tolerance is tiny in float32. For long rows delta is rowsum(dO * O) of the stored output (Dao et al. 2022,
    algorithm 4); with one visible key, dS is only its rounding. Plain softmax subtracts exactly what it sums: the
    gradient of a mask shared by all keys is exactly 0.
    """
    rounding = torch.finfo(inputs["query"].dtype).eps / 2
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    output, weights = reference.attention(**exact, **options)  # (B, H, L, Dv), (B, H, L, S)
    dout, dp = (x.abs() for x in torch.autograd.grad(weigh_all((output,)), (output, weights)))
    delta = (dout * output.abs()).sum(-1, keepdim=True)  # (B, H, L, 1)
    if route not in LONG:
        delta = (dp * weights).sum(-1, keepdim=True)
    query, key, *_ = (x.detach().abs() for x in exact.values())
    error = (rounding * weights * (dp + delta)).detach()  # (B, H, L, S), of dS
    results = {}
    if route in LONG:
        scale = options.get("scale", query.shape[-1] ** -0.5)
        group = query.shape[1] // key.shape[1]  # query heads that share a key head
        of_key = scale * error.transpose(-2, -1) @ query
        results = {
            "gradient of query": scale * error @ key.repeat_interleave(group, dim=1),
            "gradient of key": of_key.unflatten(1, (key.shape[1], group)).sum(2),
        }
    if "mask" in inputs:
        results["gradient of mask"] = error.sum_to_size(inputs["mask"].shape)
    return results


def check(take, route, inputs, **options):
    """Compares a route, or attention_weights(), with the reference in the precision of the inputs and in float64."""
    take("softmax" if route == "weights" else route)

    def ours(value, **x):
        if route != "weights":
            return F.attention(value=value, **x, **options)
        weights = F.attention_weights(**x, **options)
        return weights @ value.repeat_interleave(weights.shape[1] // value.shape[1], 1)

    def theirs(**x):
        return reference.attention(**x, **options)[0]

    slack = cancellation(route, inputs, **options)
    compare(solve(ours, inputs), solve(theirs, inputs), solve(theirs, inputs, torch.float64), slack)


def seeded(p):
    return {"dropout_p": p, "seed": torch.tensor([77]), "site": 5} if p else {}


@st.composite
def calls(draw):
    """Shapes, dtype, masks and dropout of one call."""
    B, (H, key_heads) = draw(st.integers(1, 2)), draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    L, S = draw(st.sampled_from([1, 5, 16, 17, 35])), draw(st.sampled_from([1, 7, 16, 33]))
    D, Dv = draw(st.sampled_from([8, 16, 20])), draw(st.sampled_from([8, 24]))
    dtype = draw(st.sampled_from(DTYPES))
    options = {"causal": draw(st.booleans()), "causal_offset": draw(st.sampled_from([0, 0, -3, 9]))}
    if draw(st.booleans()):
        options["key_lengths"] = torch.tensor(draw(st.lists(st.integers(0, S), min_size=B, max_size=B)))
    options |= seeded(draw(st.sampled_from([0.0, 0.1, 0.5])))
    mask = draw(st.sampled_from(["none", "bool", "add"]))
    shape = [full if draw(st.booleans()) else 1 for full in (B, H, L, S)]
    return (B, H, L, S, D, Dv, key_heads), dtype, options, mask, shape


FAR = {"causal": True, "causal_offset": 70, **seeded(0.1)}
PADDED = {"causal": True, "causal_offset": 3, "key_lengths": torch.tensor([21, 9]), **seeded(0.2)}


@pytest.mark.parametrize("route", [*ROUTES, "weights"])
@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(call=calls())
@example(call=((1, 1, 5, 6, 8, 8, 1), torch.float32, seeded(1.0), "none", ()))
@example(call=((1, 1, 18, 20, 80, 40, 1), torch.float16, {"causal": True}, "bool", (18, 20)))
@example(call=((1, 1, 18, 20, 256, 40, 1), torch.float16, {"causal": True}, "none", ()))
# the gradient of a mask that is no sum must not share memory with a tensor that is scaled later
@example(call=((1, 1, 1, 7, 8, 8, 1), torch.float32, {}, "add", (1, 1, 1, 7)))
# many more keys than a tile has queries: the short route transposes the product for the gradient of the queries
@example(call=((1, 2, 20, 100, 20, 24, 2), torch.float32, FAR, "add", (1, 1, 20, 100)))
# masks per query head, and gradients of keys that are sums over the heads that share them
@example(call=((2, 4, 19, 21, 16, 24, 2), torch.float32, PADDED, "add", (1, 4, 19, 21)))
@example(call=((2, 6, 19, 21, 16, 24, 2), torch.bfloat16, PADDED, "bool", (2, 6, 19, 21)))
def test_kernel_equals_reference(take, route, call):
    shape, dtype, options, mask, mask_shape = call
    torch.manual_seed(sum(shape))
    inputs = tensors(dtype, *shape)
    if mask == "bool":
        options = options | {"mask": torch.rand(mask_shape) > 0.3}
    elif mask == "add":
        inputs["mask"] = torch.randn(mask_shape).to(dtype)  # an input, so that its gradient is compared too
    check(take, route, inputs, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("route", ["flash", "softmax"])
@pytest.mark.parametrize(("L", "S"), [(1, 1500), (1023, 1)])
def test_long_and_odd_lengths(take, route, L, S):
    check(take, route, tensors(torch.float32, 1, 1, L, S, 8, 8), **seeded(0.1))


def test_gradients_for_scores_of_a_thousand_are_as_accurate_as_torchs(take):
    """Weights computed from a rounded log-sum-exp would not sum to 1, and dS would not cancel."""
    inputs = tensors(torch.float32, 1, 2, 20, 30, 64, 64)
    for name in ("query", "key"):
        inputs[name][..., 0] = math.sqrt(1000 * math.sqrt(64))
    take("short")

    def plain(**x):
        return reference.attention(**x)[0]

    results, in_float32 = solve(F.attention, inputs), solve(plain, inputs)
    for what, exact in solve(plain, inputs, torch.float64).items():
        error, of_torch = ((x[what].double() - exact).abs().max() for x in (results, in_float32))
        assert error <= 2 * of_torch, f"{what}: error {error:.1e}, torch's {of_torch:.1e}"


@pytest.mark.parametrize("route", ROUTES)
def test_inputs_of_any_strides(take, route):
    take(route)
    sliced = torch.randn(2, 19, 3, 2, 10)[..., 1:9].unbind(2)  # unaligned slices of one projection, (B, L, H, D)
    q, k, v = (x.transpose(1, 2) for x in sliced)
    shared = torch.randn(1, 1, 19, 8).expand(2, 2, 19, 8)
    strided = torch.randn(2, 2, 8, 19).transpose(2, 3)  # unit stride not in the last dimension
    for inputs in ((q, k, v), (q, shared, shared), (strided, strided, v)):
        leaf_tensors = [x.detach().requires_grad_() for x in inputs]
        output, expected = F.attention(*leaf_tensors, causal=True), reference.attention(*leaf_tensors, causal=True)[0]
        grad = torch.randn(1, 2, 1, 8).expand(output.shape)
        torch.testing.assert_close(output, expected)
        results = torch.autograd.grad(output, leaf_tensors, grad)
        torch.testing.assert_close(results, torch.autograd.grad(expected, leaf_tensors, grad), atol=1e-5, rtol=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(1, 1, 1, 33), (2, 1, 35, 1), (1, 2, 35, 33), (33,), ()])
@pytest.mark.parametrize("shares", [1, 3])
def test_gradient_of_a_broadcast_mask_with_one_or_several_partial_sums(take, monkeypatch, shape, shares):
    chip = dataclasses.replace(INTERPRETER, processors=shares)
    monkeypatch.setattr(attention_launch, "chip", lambda device: chip)
    inputs = tensors(torch.float32, 2, 2, 35, 33, 8, 8) | {"mask": torch.randn(shape)}
    check(take, "flash", inputs, key_lengths=torch.tensor([33, 20]), **seeded(0.3))


# ------------------------------------------------------------------------------------- faults of other libraries


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_with_no_key_to_attend_gives_zeros_and_no_gradient(take, route, dtype):
    take(route)
    leaf_tensors = [torch.randn(3, 1, 5, 8).to(dtype).requires_grad_() for _ in range(3)]
    rows = torch.ones(5, 5, dtype=torch.bool)
    rows[2] = False
    added = torch.zeros(5, 5).masked_fill(~rows, -math.inf)
    for hidden in ({"mask": rows}, {"mask": added}, {"causal": True, "causal_offset": -3}):
        output = F.attention(*leaf_tensors, key_lengths=torch.tensor([5, 0, 3]), **hidden)
        assert torch.isfinite(output).all()
        assert not output[1].any()
        assert not output[:, :, 2].any()
        d_q, d_k, d_v = torch.autograd.grad(output.sum() + output[:, :, 2].square().sum(), leaf_tensors)
        assert all(torch.isfinite(g).all() for g in (d_q, d_k, d_v))
        assert not d_q[:, :, 2].any()
        assert not any(g[1].any() for g in (d_q, d_k, d_v))


@pytest.mark.parametrize("route", [*ROUTES, "explicit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lowest_number_in_a_mask_hides_and_one_that_base_2_reaches_does_not(take, route, dtype):
    """The same in the reference, in kernels and in PyTorch: a row hidden as a whole gives zeros, a row of -2.3e38 gives
    the mean."""
    take(route)
    q, k, v = (torch.randn(1, 2, 6, 8).to(dtype).requires_grad_() for _ in range(3))
    mask = torch.zeros(6, 6, dtype=dtype)
    mask[:, 4:] = mask[2] = torch.finfo(dtype).min
    mask[3] = -2.3e38
    infinite = mask.masked_fill(mask < reference.LOWEST, -math.inf)
    assert torch.isinf(infinite).sum(1).tolist() == [2, 2, 6, 0, 2, 2]
    with F.backend("torch" if route == "explicit" else "auto"):
        outputs = [F.attention(q, k, v, mask=each) for each in (mask, infinite)]
        weights = [F.attention_weights(q, k, mask=each) for each in (mask, infinite)]
    specified = [reference.attention(q, k, v, mask=each) for each in (mask, infinite)]
    for one, other in (outputs, weights, (specified[0][0], specified[1][0])):
        assert torch.equal(one, other)
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k), retain_graph=True) for x in (one, other))):
            assert torch.equal(a, b)
    assert not outputs[0][:, :, 2].any()
    assert not specified[0][0][:, :, 2].any()
    for output in (outputs[0], specified[0][0]):
        torch.testing.assert_close(output[:, :, 3], v.mean(2), atol=2e-2, rtol=2e-2)


# ----------------------------------------------------------------------------------------------- packed sequences


@pytest.mark.parametrize("route", [*ROUTES, "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("causal", "p", "heads"), [(False, 0.0, 2), (True, 0.2, 2), (True, 0.2, 4)])
def test_packed_sequences_equal_the_reference(take, route, dtype, causal, p, heads):
    """With two key heads, which four query heads share."""
    take(route)
    cu_seqlens_q = torch.tensor([0, 5, 5, 20, 24], dtype=torch.int32)  # a sequence without queries,
    cu_seqlens_k = torch.tensor([0, 3, 16, 16, 20], dtype=torch.int32)  # one without keys,
    shapes = {"query": (27, heads, 8), "key": (22, 2, 8), "value": (22, 2, 12)}  # and padding after the last
    inputs = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    options = {"causal": causal, **seeded(p)}

    def ours(**x):
        return F.varlen_attention(
            **x, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=19, max_seqlen_k=17, **options
        )

    def theirs(**x):
        return reference.varlen_attention(**x, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)

    with F.backend("torch" if route == "torch" else "triton"):
        results = solve(ours, inputs)
    compare(results, solve(theirs, inputs), solve(theirs, inputs, torch.float64))


@pytest.mark.parametrize("route", [*ROUTES, "torch"])
def test_packed_sequences_do_not_see_nan_in_others(take, route):
    """Nor in the padding after the last one, which may have any content."""
    take(route)
    starts = torch.tensor([0, 4, 9, 9, 12])
    x = torch.randn(14, 1, 8)
    x[4:9] = x[12:] = math.nan
    x.requires_grad_()
    clean = torch.cat([torch.arange(4), torch.arange(9, 12)])
    with F.backend("torch" if route == "torch" else "triton"):
        output = F.varlen_attention(x, x, x, starts, starts, 5, 5)
        (gradient,) = torch.autograd.grad(output[clean].square().sum(), x)
    short = x.detach()[clean].requires_grad_()
    starts = torch.tensor([0, 4, 7])
    expected = reference.varlen_attention(short, short, short, starts, starts)
    torch.testing.assert_close(output[clean], expected)
    torch.testing.assert_close(gradient[clean], *torch.autograd.grad(expected.square().sum(), short))
