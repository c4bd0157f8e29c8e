"""Registration of operators: direct calls and calls through the dispatcher agree, autocast, schemas, private names."""

import re
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fasttfm import functional
from fasttfm.functional.onlookers import formulas
from fasttfm.functional.operator import Operator, _every, lowered, without_views
from fasttfm.functional.record import WHOLE

states = []
"""(autocast enabled, autograd recording) inside each computation."""


class Scaled(NamedTuple):
    x: Tensor
    factor: Tensor
    offset: Tensor | None
    power: int


class Saved(NamedTuple):
    x: Tensor
    factor: Tensor
    has_offset: bool
    power: int


class Derived(NamedTuple):
    grad: Tensor
    saved: Saved


def compute(call):
    x, factor, offset, power = call
    states.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled() and x.requires_grad))
    return x * factor**power + (0 if offset is None else offset)


def derive(call):
    grad, (x, factor, _, power) = call
    return grad * factor**power, (grad * x).sum() * power * factor ** (power - 1)


def backward(_, saved, needs_grad, grad):
    dx, dfactor = _derive.call(grad, saved)
    return dx, dfactor, grad if needs_grad.offset else None


_derive = Operator(
    "test_scaled_backward",
    Derived,
    "(Tensor, Tensor)",
    lambda call: without_views(derive),
    lambda call: (torch.empty_like(call.grad), torch.empty_like(call.saved.factor)),
)
_scaled = Operator(
    "test_scaled",
    Scaled,
    "Tensor",
    lambda call: without_views(compute),
    lambda call: torch.empty_like(call.x),
    save=lambda call, output: (call.x, call.factor, call.offset is not None, call.power),
    saved=Saved,
    backward=backward,
    autocast=lowered("x", "factor", "offset"),
)


def scaled(*args):
    return _scaled.call(*args)


@pytest.fixture(autouse=True)
def _forget():
    states.clear()


@pytest.fixture
def through_dispatcher(monkeypatch):
    """Calls that went through the dispatcher."""
    calls = []
    operator = _scaled.dispatched
    monkeypatch.setattr(_scaled, "dispatched", lambda *args: calls.append(args) or operator(*args))
    return calls


def inputs(offset=True):
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    factor = torch.nn.Parameter(torch.tensor(1.5))
    return x, factor, torch.tensor([0.1, 0.2, 0.3], requires_grad=True) if offset else None


def solve(call, x, factor, offset, power=2):
    y = call(x, factor, offset, power)
    leaf_tensors = [t for t in (x, factor, offset) if t is not None]
    return y, *torch.autograd.grad(y, leaf_tensors, torch.tensor([1.0, 2.0, 3.0], dtype=y.dtype))


@pytest.mark.parametrize("offset", [False, True])
def test_plain_tensors_bypass_the_dispatcher_with_the_same_result(through_dispatcher, offset):
    arguments = inputs(offset)
    actual = solve(scaled, *arguments)
    assert not through_dispatcher
    for a, b in zip(actual, solve(torch.ops.fasttfm.test_scaled, *arguments), strict=True):
        assert torch.equal(a, b)
    assert "test_scaled" in actual[0].grad_fn.name()
    assert states == [(False, False)] * 2


def test_without_gradients_nothing_is_recorded(through_dispatcher):
    x, factor, _ = inputs()
    with torch.no_grad():
        assert not scaled(x, factor, None, 2).requires_grad
    with torch.inference_mode():
        assert scaled(x, factor, None, 2).is_inference()
    assert not scaled(x.detach(), factor.detach(), None, 2).requires_grad
    assert not through_dispatcher


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_autocast_casts_both_ways_and_is_off_inside(through_dispatcher):
    arguments = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        actual = solve(scaled, *arguments)
        assert not through_dispatcher
        with Seen():
            expected = solve(scaled, *arguments)
        assert torch.is_autocast_enabled("cpu")
    assert through_dispatcher
    assert actual[0].dtype == torch.bfloat16
    assert [g.dtype for g in actual[1:]] == [torch.float32] * 3
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert {autocast for autocast, _ in states} == {False}


def test_autocast_is_on_again_after_an_error():
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="size of tensor"):
            scaled(torch.ones(3), torch.ones(2), None, 1)
        assert torch.is_autocast_enabled("cpu")


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
    from torch._inductor.codecache import FxGraphHashDetails

    ours = [packet for packet in formulas if not re.search("test_|overhead", str(packet))]
    schemas = "".join(str(packet.default._schema) for packet in ours)
    assert "fasttfm::attention(Tensor query" in schemas
    tag = torch.compiler.config.cache_key_tag
    assert tag.endswith(f"fasttfm {zlib.crc32(schemas.encode())}")
    assert FxGraphHashDetails(torch.fx.symbolic_trace(torch.nn.Identity()), [], {}, []).cache_key_tag == tag


def test_the_schema_flattens_nested_records():
    assert str(_derive.dispatched._schema) == (
        "fasttfm::test_scaled_backward(Tensor grad, Tensor x, Tensor factor, bool has_offset, int power) "
        "-> (Tensor, Tensor)"
    )


@pytest.mark.parametrize("call", [scaled, torch.ops.fasttfm.test_scaled], ids=["direct", "dispatcher"])
def test_the_route_is_decided_once_for_both_passes(call, routed):
    """A setting that changes between forward and backward does not change the route."""
    operator, setting, seen = routed
    call = operator.call if call is scaled else operator.dispatched
    x = torch.ones(3, requires_grad=True)
    y = call(x, "auto")
    setting[0] = "slow"
    y.sum().backward()
    assert seen == [("forward", "fast"), ("backward", "fast")]


class Routed(NamedTuple):
    x: Tensor
    route: str


class RoutedSaved(NamedTuple):
    route: str


@pytest.fixture(scope="module")
def routed_operator():
    setting, seen = ["fast"], []

    def compute(call):
        seen.append(("forward", call.route))
        return call.x * 2

    def backward(_, saved, needs_grad, grad):
        seen.append(("backward", saved.route))
        return (grad * 2,)

    operator = Operator(
        "test_routed",
        Routed,
        "Tensor",
        lambda call: without_views(compute),
        lambda call: torch.empty_like(call.x),
        decide=lambda call: setting[0] if call.route == "auto" else call.route,
        save=lambda call, output: (call.route,),
        saved=RoutedSaved,
        backward=backward,
    )
    return operator, setting, seen


@pytest.fixture
def routed(routed_operator):
    routed_operator[1][0] = "fast"
    routed_operator[2].clear()
    return routed_operator


PRIVATE = {
    "torch._C._len_torch_dispatch_stack", "torch._C._are_functorch_transforms_active", "forward_ad._current_level",
    "torch._C._is_any_autocast_enabled", "torch._C._autograd._top_saved_tensors_default_hooks", "torch._C._dynamo",
    "_profiler._is_profiler_enabled", "torch._C._disabled_torch_function_impl", "torch._foreach_mul",
    "torch._foreach_copy_", "torch.ops.aten._softmax_backward_data",
    *(f"torch.ops.aten._scaled_dot_product_{kernel}{direction}" for direction in ("", "_backward")
      for kernel in ("cudnn_attention", "flash_attention_for_cpu")),
}  # fmt: skip
"""Private names of torch that operators use; the reason for each stands where it is used."""


def test_only_these_private_names_of_torch_are_used():
    """Tests of plans, flops and subclasses notice if one of them stops working."""
    text = "".join(path.read_text() for path in Path(functional.__file__).parent.rglob("*.py"))
    taken = set(re.findall(r"(?<![\w.])(?:torch|_profiler|forward_ad)(?:\.\w+)*\._[a-z]\w*", text))
    assert re.findall(r"_torchdynamo\w+", text) == ["_torchdynamo_inline"]
    assert taken - {"torch._subclasses", "torch._dynamo", "torch.utils._python_dispatch"} == PRIVATE
