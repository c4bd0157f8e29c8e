"""Registration of operators: direct calls and calls through the dispatcher agree; autocast; cache keys."""

import re
import zlib

import pytest
import torch
from torch._inductor.codecache import FxGraphHashDetails

from fasttfm import functional as F
from fasttfm.functional.feed_forward import OPERATOR
from fasttfm.functional.onlookers import formulas
from fasttfm.functional.operator import _every
from fasttfm.functional.record import WHOLE

from .agreement import Seen
from .test_every_operator import use

SEED = torch.tensor([11])


@pytest.fixture
def through_dispatcher(monkeypatch):
    """Calls that went through the dispatcher."""
    calls = []
    operator = OPERATOR.dispatched
    monkeypatch.setattr(OPERATOR, "dispatched", lambda *args: calls.append(args) or operator(*args))
    return calls


def network(biased=True):
    leaves = [torch.randn(s, requires_grad=True) for s in ((3, 16), (40, 16), (40,), (24, 40), (24,))]
    return [x if biased or x.dim() > 1 else None for x in leaves]


def solve(leaves, call=lambda *x: F.feed_forward(*x, dropout_p=0.5, seed=SEED)):
    y = call(*leaves)
    return y, *torch.autograd.grad(y, [x for x in leaves if x is not None], torch.ones_like(y))


def by_dispatcher(*x):
    return torch.ops.fasttfm.feed_forward(*x, 0.5, SEED, 0, "relu", "auto")[0]


@pytest.mark.parametrize("biased", [True, False])
def test_plain_tensors_bypass_the_dispatcher_with_the_same_result(through_dispatcher, biased):
    leaves = network(biased)
    actual = solve(leaves)
    assert not through_dispatcher
    assert all(map(torch.equal, actual, solve(leaves, by_dispatcher)))
    assert "feed_forward" in actual[0].grad_fn.name()


def test_autocast_casts_both_ways_and_is_on_again_afterwards(through_dispatcher):
    """Even after a call without autocast."""
    leaves = network()
    assert solve(leaves)[0].dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        actual = solve(leaves)
        assert not through_dispatcher
        with Seen():
            expected = solve(leaves)
        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(ValueError, match="weight1"):
            F.feed_forward(torch.ones(3, 15), *leaves[1:])
        assert torch.is_autocast_enabled("cpu")
    assert through_dispatcher
    assert [x.dtype for x in actual] == [torch.bfloat16] + [torch.float32] * 5
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("operator", [each for each in _every if each.cast], ids=lambda each: each.name)
def test_the_tf32_setting_is_part_of_the_key(operator):
    """For every operator with products. Meta tensors stand in for a GPU's."""
    whole = torch.empty(4, dtype=torch.int64, device="meta")
    real, numbers = whole.float(), {bool: True, str: "relu", torch.dtype: torch.float32}
    kinds = [(type_.dtypes, field.type) for type_, field in zip(operator.layout.types, operator.layout.fields)]
    fields = [numbers.get(type_, 1) if k is None else whole if k is WHOLE else real for k, type_ in kinds]
    signatures = []
    for precision in ("tf32", torch.backends.cuda.matmul.fp32_precision):
        torch.backends.cuda.matmul.fp32_precision = precision
        signatures.append(operator._find(tuple(fields))[2])
    assert signatures[0] != signatures[1]


def test_the_schemas_are_part_of_torch_compiles_cache_key():
    ours = [packet for packet in formulas if not re.search("test_|overhead", str(packet))]
    schemas = "".join(str(packet.default._schema) for packet in ours)
    assert "fasttfm::attention(Tensor query" in schemas
    tag = FxGraphHashDetails(torch.fx.symbolic_trace(torch.nn.Identity()), [], {}, []).cache_key_tag
    assert tag.endswith(f"fasttfm {zlib.crc32(schemas.encode())}")


# ----------------------------------------------------------------------------------------------------------- autocast

CAST = {
    "attention, mask": 3, "attention": 3, "attention_weights, mask": 2, "attention_weights, lengths": 2, "sdpa": 3,
    "varlen_attention": 3, "packed_qkv, query": 2, "feed_forward": 5, "feed_forward, gelu": 5,
    "linear_cross_entropy": 2, "cross_entropy": 0, "layer_norm": 0, "residual_rms_norm": 0, "embed": 0,
}  # fmt: skip
"""Calls of test_every_operator.py, and how many of their leaves are cast: the first ones."""


@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("name", CAST)
def test_a_call_has_the_result_of_lowered_leaves_and_float32_gradients(name, route):
    (call, leaves), cast = use(name), CAST[name]
    leaves = [(0.5 * x.detach()).requires_grad_() for x in leaves]
    lowered = [x.detach().bfloat16() if n < cast else x.detach() for n, x in enumerate(leaves)]
    lowered = [x.requires_grad_() for x in lowered]
    results = []
    with F.backend(route):
        for inputs, enabled in ((leaves, True), (lowered, False)):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                output = call(*inputs)
            results.append((output, torch.autograd.grad(output.float().sum(), inputs)))
    (output, gradients), (expected, wanted) = results
    assert output.dtype == (torch.bfloat16 if cast and "entropy" not in name else torch.float32)
    assert torch.equal(output, expected)
    for gradient, want in zip(gradients, wanted, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, want.float(), rtol=2e-2, atol=2e-2)
