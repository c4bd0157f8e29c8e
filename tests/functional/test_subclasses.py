"""Tensor subclasses: accepted, computed by their own rules, or refused in one line that names the argument."""

from typing import Any

import pytest
import torch
from public_surface import functions
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fasttfm.nn
from fasttfm import functional as F

LEFT_TO_TORCH = {"scaled_dot_product_attention", "residual_add"}
N, E = 6, 16
HEADS = (2, 2, N, 8)


class Tagged(Tensor):
    """Overrides nothing."""


class Meaning(Tensor):
    """Overrides __torch_function__."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


class Quantised(Tensor):
    """Overrides __torch_dispatch__, and computes nothing."""

    @staticmethod
    def __new__(cls, x: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return NotImplemented


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("name", [name for name in functions() if name in F.__all__ and name not in LEFT_TO_TORCH])
def test_a_subclass_that_overrides_torch_is_refused_and_a_plain_one_accepted(name, route):
    function, inputs = functions()[name]
    first, *others = (x.detach() for x in inputs)
    with F.backend(route):
        for x, message in (
            (first.as_subclass(Meaning), "is a Meaning, which fasttfm does not know: give"),
            (Quantised(first), "is a Quantised, which fasttfm does not know: give"),
            (torch.masked.MaskedTensor(first, first > 0), r"is a MaskedTensor: give get_data\(\)"),
        ):
            with pytest.raises(TypeError, match=rf"{name}: \w+ {message}") as error:
                function(x, *others)
            assert "\n" not in str(error.value)
        got, expected = function(first.as_subclass(Tagged), *others), function(first, *others)
    for a, b in zip(*((x,) if isinstance(x, Tensor) else x for x in (got, expected)), strict=True):
        assert torch.equal(a.as_subclass(Tensor), b)


@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("keys", [N, 9, 4])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_a_causal_bias_equals_its_mask(make, keys, route):
    query, (key, value) = torch.randn(HEADS), torch.randn(2, 2, 2, keys, 8)
    bias = make(N, keys)
    allowed = bias._materialize()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed).nan_to_num()
    packed_kv = torch.stack([key, value]).permute(1, 3, 0, 2, 4)
    with F.backend(route):
        joined = F.packed_qkv_attention(packed_kv, query.transpose(1, 2), mask=bias)
        for got in (
            F.scaled_dot_product_attention(query, key, value, bias),
            F.attention(query, key, value, mask=bias),
            F.attention_weights(query, key, mask=bias) @ value,
            joined.unflatten(2, (2, 8)).transpose(1, 2),
        ):
            torch.testing.assert_close(got, expected)


def test_a_causal_bias_of_another_shape_or_beside_causal_is_refused():
    bias, query = causal_upper_left(N, N), torch.randn(HEADS)
    for key, causal in ((query, True), (query[:, :, :5], False)):
        with pytest.raises(TypeError, match=r"mask is a CausalBias: it must be of \(L, S\) and without causal"):
            F.attention(query, key, key, mask=bias, causal=causal)


def test_scaled_dot_product_attention_leaves_nested_tensors_to_torch():
    rows = torch.nested.nested_tensor([*torch.randn(2, N, 2, 8)], layout=torch.jagged).transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)
    got = F.scaled_dot_product_attention(rows, rows, rows)
    torch.testing.assert_close(got.values(), expected.values())
    with pytest.raises(TypeError, match=r"attention: query is a nested tensor: give values\(\) of it"):
        F.attention(rows, rows, rows)


@pytest.mark.parametrize("grad", [True, False])
def test_modules_leave_subclasses_to_torch(grad):
    x = torch.randn(2, N, E)
    for name, arguments in (("LayerNorm", (E,)), ("RMSNorm", (E,)), ("TransformerEncoderLayer", (E, 2, 32, 0.0))):
        theirs, ours = getattr(torch.nn, name)(*arguments), getattr(fasttfm.nn, name)(*arguments)
        ours.load_state_dict(theirs.state_dict())
        with torch.set_grad_enabled(grad):
            got, expected = ours(x.as_subclass(Meaning)), theirs(x.as_subclass(Meaning))
            torch.testing.assert_close(ours(x.as_subclass(Tagged)), expected.as_subclass(Tagged))
        assert type(got) is type(expected)
        torch.testing.assert_close(got, expected)
