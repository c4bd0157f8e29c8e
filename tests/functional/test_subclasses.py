"""Tensor subclasses: accepted, computed by their own rules, or refused in one line that names the argument."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from public_surface import functions
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask

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


def masked(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.MaskedTensor(x, x > 0)


def jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([*x], layout=torch.jagged)


@pytest.fixture
def mesh(tmp_path) -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


NAMES = [name for name in functions() if name in F.__all__ and name not in LEFT_TO_TORCH]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_a_subclass_that_overrides_torch_is_refused_and_a_plain_one_accepted(name, route):
    function, inputs = functions()[name]
    first, *others = (x.detach() for x in inputs)
    with F.backend(route):
        for x, message in (
            (first.as_subclass(Meaning), "is a Meaning, which fasttfm does not know: give"),
            (Quantised(first), "is a Quantised, which fasttfm does not know: give"),
            (masked(first), r"is a MaskedTensor: give get_data\(\)"),
        ):
            with pytest.raises(TypeError, match=rf"{name}: \w+ {message}") as error:
                function(x, *others)
            assert "\n" not in str(error.value)
        got, expected = function(first.as_subclass(Tagged), *others), function(first, *others)
    for a, b in zip(*((x,) if isinstance(x, Tensor) else x for x in (got, expected)), strict=True):
        assert torch.equal(a.as_subclass(Tensor), b)


@pytest.mark.parametrize("name", NAMES)
def test_a_distributed_tensor_is_refused_by_name(name, mesh):
    function, (first, *others) = functions()[name]
    x = torch.distributed.tensor.distribute_tensor(first.detach(), mesh, [torch.distributed.tensor.Replicate()])
    with pytest.raises(TypeError, match=rf"{name}: \w+ is a DTensor: give to_local\(\)"):
        function(x, *others)


@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("keys", [N, 9, 4])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_a_causal_bias_equals_its_mask(make, keys, route):
    query, (key, value) = torch.randn(HEADS), torch.randn(2, 2, 2, keys, 8)
    bias = make(N, keys)
    allowed = bias._materialize()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed).nan_to_num()
    with F.backend(route):
        for got in (
            F.scaled_dot_product_attention(query, key, value, bias),
            F.attention(query, key, value, mask=bias),
            F.attention_weights(query, key, mask=bias) @ value,
            F.packed_qkv_attention(torch.stack([key, value]).permute(1, 3, 0, 2, 4), query.transpose(1, 2), mask=bias)
            .unflatten(2, (2, 8)).transpose(1, 2),
        ):  # fmt: skip
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("options", [{"causal": True}, {"key": 5}])
def test_a_causal_bias_of_another_shape_or_beside_causal_is_refused(options):
    query = torch.randn(HEADS)
    key = torch.randn(2, 2, options.pop("key", N), 8)
    with pytest.raises(TypeError, match=r"mask is a CausalBias: it must be of \(L, S\) and without causal"):
        F.attention(query, key, key, mask=causal_upper_left(N, N), **options)


def test_scaled_dot_product_attention_leaves_nested_tensors_to_torch():
    rows = jagged(torch.randn(2, N, 2, 8)).transpose(1, 2).requires_grad_()
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


def test_modules_refuse_masks_that_they_cannot_read():
    x = torch.randn(1, N, E)
    layer = fasttfm.nn.TransformerEncoderLayer(E, 2, batch_first=True)
    block = create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device="cpu")
    for mask, message in ((causal_upper_left(N, N), "is_causal=True in its place"), (block, r"create_mask\(\)")):
        with pytest.raises(TypeError, match=f"mask is a (CausalBias|BlockMask): .*{message}"):
            layer(x, src_mask=mask)
        with pytest.raises(TypeError, match=f"mask is a (CausalBias|BlockMask): .*{message}"):
            fasttfm.nn.TransformerEncoder(layer, 1)(x, mask=mask)
    with pytest.raises(TypeError, match=r"attention: mask is a BlockMask: give what its mask_mod says"):
        F.attention(*torch.randn(3, *HEADS), mask=block)


def test_buffers_and_parameters_are_plain():
    w, x = torch.nn.Parameter(torch.randn(E)), torch.nn.Buffer(torch.randn(N, E))
    assert torch.equal(F.rms_norm(x, w), F.rms_norm(x.detach(), w.detach()))
