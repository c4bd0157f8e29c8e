"""What every registered operator owes PyTorch: opcheck, fake tensors, one compiled graph, a mask of torch's generator
where no seed is given, a refusal of second derivatives.

The calls are those that the public functions make, seen by a dispatch mode; an operator that none of them calls fails.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fasttfm import functional as F
from fasttfm.functional.operator import MARK

ROUTES = ["torch", "triton"]
REFUSAL = "second derivatives are not implemented|derivative for aten::_scaled_dot_product_.* is not implemented"
"""Ours, or torch's where the kernel is torch's own."""
SEED = torch.tensor([11])


class Calls(TorchDispatchMode):
    """Calls of every fasttfm operator, with copies of their arguments: the first of those that leave out the same
    tensors and choose the same."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, dict[Any, tuple]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fasttfm":
            choice = tuple(a if a is None or isinstance(a, bool | str) else type(a) for a in args)
            copies = tree_map_only(Tensor, lambda t: t.detach().clone(), args)
            self.seen.setdefault(func._schema.name.split("::")[1], {}).setdefault(choice, (func, copies))
        return func(*args, **(kwargs or {}))


def heads(queries: int, keys: int) -> list[tuple[int, ...]]:
    return [(2, 2, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8)]


DROP = {"dropout_p": 0.25, "seed": SEED}
LENGTHS, STARTS = torch.tensor([6, 3]), torch.tensor([0, 4, 9])
SCORED = {"window": (3, 1), "softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25])}
TARGET = torch.tensor([3, 0, 5, 1, 2])
TOKENS = torch.tensor([[1, 4, 0]])
NETWORK = [(7, 8), (40, 8), (40,), (8, 40), (8,)]
VECTOR, ROWS = (16,), (3, 16)

Use = tuple[Callable[..., Tensor], list[tuple[int, ...]]]
USES: dict[str, Use] = {
    "attention": (lambda q, k, v: F.attention(q, k, v, key_lengths=LENGTHS, causal=True, **DROP), heads(5, 6)),
    "attention, mask": (lambda q, k, v, m: F.attention(q, k, v, mask=m), [*heads(5, 6), (5, 6)]),
    "attention, long rows": (lambda q, k, v: F.attention(q, k, v, causal=True), heads(18, 20)),  # torch's on a CPU
    "attention, scored": (lambda q, k, v, s: F.attention(q, k, v, sinks=s, **SCORED), [*heads(5, 6), (2,)]),
    "sdpa": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), heads(5, 5)),
    "attention_weights": (lambda q, k, m: F.attention_weights(q, k, mask=m, **DROP), [*heads(5, 6)[:2], (5, 6)]),
    "attention_weights, lengths": (
        lambda q, k: F.attention_weights(q, k, key_lengths=LENGTHS, causal=True), heads(5, 6)[:2],
    ),
    "varlen": (lambda x: F.varlen_attention(x, x, x, STARTS, STARTS, 5, 5, **DROP), [(9, 2, 8)]),
    "varlen, scored": (
        lambda x, s: F.varlen_attention(x, x, x, STARTS, STARTS, 5, 5, sinks=s, **SCORED), [(9, 2, 8), (2,)],
    ),
    "joint, packed": (lambda x: F.joint_varlen_attention(x, None, STARTS, STARTS, 5, 5, **DROP), [(9, 3, 2, 8)]),
    "joint, packed, biases": (
        lambda x, q, b, c: F.joint_varlen_attention(x, q, STARTS, STARTS, 5, 5, biases=(b, c), **DROP),
        [(9, 2, 2, 8), (9, 2, 8), (32,), (16,)],
    ),
    "joint": (lambda x: F.joint_attention(x, key_lengths=LENGTHS[:1], causal=True, **DROP), [(1, 6, 3, 2, 8)]),
    "joint, biases": (
        lambda x, q, b, c: F.joint_attention(x, q, biases=(b, c), key_lengths=LENGTHS, **DROP),
        [(2, 6, 2, 2, 8), (2, 5, 2, 8), (32,), (16,)],
    ),
    "joint, mask": (lambda x: F.joint_attention(x, mask=torch.tensor([True] * 4 + [False] * 2)), [(1, 6, 3, 2, 8)]),
    "rotary": (lambda x: F.rotary(x, *F.rotary_tables(6, 8), interleaved=True), [(2, 2, 5, 8)]),
    "rotary, positions": (lambda x: F.rotary(x, *F.rotary_tables(6, 8), torch.arange(5)[None]), [(2, 2, 5, 8)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, w, b), [ROWS, VECTOR, VECTOR]),
    "layer_norm, no parameters": (lambda x: F.layer_norm(x, None, None), [ROWS]),
    "branch_layer_norm": (lambda x, w, b: sum(F.branch_layer_norm(x, w, b)), [ROWS, VECTOR, VECTOR]),
    "residual_layer_norm": (
        lambda x, r, w, b, c: sum(F.residual_layer_norm(x, r, w, b, x_bias=c, **DROP)),
        [ROWS, ROWS, VECTOR, VECTOR, VECTOR],
    ),
    "residual_layer_norm, post-norm": (
        lambda x, r, w, b: F.residual_layer_norm(x, r, w, b, post_norm=True, **DROP)[0],
        [ROWS, ROWS, VECTOR, VECTOR],
    ),
    "residual_layer_norm, no parameters": (lambda x, r: sum(F.residual_layer_norm(x, r, None, None)), [ROWS, ROWS]),
    "rms_norm": (lambda x, w: F.rms_norm(x, w), [ROWS, VECTOR]),
    "rms_norm, no weight": (lambda x: F.rms_norm(x, None), [ROWS]),
    "residual_rms_norm": (lambda x, r, w: sum(F.residual_rms_norm(x, r, w, **DROP)), [ROWS, ROWS, VECTOR]),
    "residual_rms_norm, no weight": (lambda x, r: sum(F.residual_rms_norm(x, r, None)), [ROWS, ROWS]),
    "residual_add": (lambda x, r: F.residual_add(x, r, **DROP), [ROWS, ROWS]),
    "feed_forward": (lambda *t: F.feed_forward(*t, **DROP), NETWORK),
    "feed_forward, gelu": (lambda *t: F.feed_forward(*t, activation="gelu", **DROP), NETWORK),
    "feed_forward, gelu_tanh": (lambda *t: F.feed_forward(*t, activation="gelu_tanh", **DROP), NETWORK),
    "feed_forward, no biases": (lambda x, a, b: F.feed_forward(x, a, None, b, None), [(7, 8), (40, 8), (8, 40)]),
    "embed": (lambda w: F.embed(TOKENS, w, scale=2.0, **DROP), [(9, 16)]),
    "embed, positions": (lambda w, p: F.embed(TOKENS, w, p, pad_id=0, first_position=1), [(9, 16), (4, 16)]),
    "cross_entropy": (lambda x: F.cross_entropy(x, TARGET, label_smoothing=0.1)[0], [(5, 9)]),
    "cross_entropy, in place": (lambda x: F.cross_entropy(x * 1.0, TARGET, inplace=True)[0], [(5, 9)]),
    "cross_entropy, each row": (
        lambda x: F.cross_entropy(x, TARGET, reduction="none", row_weights=x.detach()[:, 0].float())[0], [(5, 9)],
    ),
    "linear_cross_entropy, weighted": (
        lambda h, w: F.linear_cross_entropy(h, w, TARGET, row_weights=h.detach()[:, 0].float())[0], [(5, 8), (9, 8)],
    ),
    "linear_cross_entropy": (lambda h, w: F.linear_cross_entropy(h, w, TARGET)[0] * 0.5, [(5, 8), (9, 8)]),
    "linear_cross_entropy, low memory": (
        lambda h, w: F.linear_cross_entropy(h, w, TARGET, low_memory=True)[0], [(5, 8), (9, 8)],
    ),
}  # fmt: skip
"""A function of leaves that ends in something to differentiate, and the leaves' shapes."""


def use(name: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    torch.manual_seed(0)
    function, shapes = USES[name]
    return function, [torch.randn(shape, requires_grad=True) for shape in shapes]


def without_gradient() -> None:
    """Calls of what has no derivative."""
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8)
    table = torch.tensor([[3, 1], [0, 2]])
    options = {"cache_lengths": torch.tensor([2, 5]), "block_table": table, "window": (4, None), "causal": True}
    F.attention_with_cache(query, torch.randn(4, 2, 4, 8), torch.randn(4, 2, 4, 8), key, key, **options)


def registered() -> set[str]:
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("fasttfm::")}
    return {name for name in names if not name.startswith(("test_", "overhead", MARK))}


@pytest.fixture(scope="module", params=ROUTES)
def calls(request):
    with F.backend(request.param):
        with Calls() as calls:
            for function, leaf_tensors in map(use, USES):
                torch.autograd.grad(function(*leaf_tensors).sum(), leaf_tensors)
            without_gradient()
        yield {name: list(actual.values()) for name, actual in calls.seen.items()}


@pytest.mark.sample(1)
def test_every_operator_passes_opcheck_forward_and_backward(calls):
    assert set(calls) == registered()
    for actual in calls.values():
        for operator, args in actual:
            torch.library.opcheck(operator, args)


@pytest.mark.sample(6)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", USES)
def test_a_compiled_function_is_one_graph_with_the_same_output_and_gradients(name, route):
    function, leaf_tensors = use(name)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    grad = torch.cos(torch.arange(function(*leaf_tensors).numel()) + 1.0)
    with F.backend(route):
        results = []
        for call in (function, compiled):
            output = call(*leaf_tensors)
            results.append((output, *torch.autograd.grad((output.flatten() * grad).sum(), leaf_tensors)))
    torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=1e-4)
    assert results[1][0].any()


DRAWING = {
    "attention": lambda: F.attention(*torch.ones(3, 1, 1, 30, 8), dropout_p=0.5),
    "attention_weights": lambda: F.attention_weights(*torch.ones(2, 1, 1, 30, 8), dropout_p=0.5),
    "residual_add": lambda: F.residual_add(torch.ones(8, 64), torch.zeros(8, 64), dropout_p=0.5),
    "feed_forward": lambda: F.feed_forward(
        torch.ones(3, 8), torch.ones(40, 8), None, torch.ones(8, 40), None, dropout_p=0.5
    ),
    "embed": lambda: F.embed(torch.ones(2, 9, dtype=torch.int64), torch.ones(4, 16), dropout_p=0.5),
}


@pytest.mark.parametrize("name", DRAWING)
def test_torchs_generator_decides_the_mask_when_no_seed_is_given(name):
    torch.manual_seed(3)
    first, second = DRAWING[name](), DRAWING[name]()
    torch.manual_seed(3)
    assert torch.equal(DRAWING[name](), first)
    assert not torch.equal(first, second)


def test_opcheck_s_own_gradient_is_refused_where_an_operator_has_none(calls):
    """What only a backward pass calls, and the edge that carries a gradient there: opcheck of them with inputs that
    require a gradient ends in our refusal, and in nothing else."""
    for name in ("gradient_edge", "scale_gradients"):
        operator, args = calls[name][0]
        args = tree_map_only(Tensor, lambda t: t.clone().requires_grad_(), args)
        found = torch.library.opcheck(operator, args, raise_exception=False)
        refused = {check: str(result) for check, result in found.items() if result != "SUCCESS"}
        assert list(refused) == ["test_aot_dispatch_dynamic"], name
        assert "second derivatives are not implemented" in refused["test_aot_dispatch_dynamic"]


def test_fake_tensors_give_the_shapes_dtypes_and_strides_of_the_real_ones(calls):
    for name, actual in calls.items():
        for operator, args in actual:
            real = operator(*tree_map_only(Tensor, torch.clone, args))
            with FakeTensorMode() as mode:
                fake = operator(*tree_map_only(Tensor, mode.from_tensor, args))
            pairs = [(real, fake)] if isinstance(real, Tensor) else list(zip(real or (), fake or (), strict=True))
            for a, b in pairs:
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), name


@pytest.mark.parametrize("route", ROUTES)
def test_a_first_derivative_can_be_recorded_and_every_second_one_is_refused(route):
    with F.backend(route):
        for name in USES:
            function, leaf_tensors = use(name)
            wanted = torch.autograd.grad(function(*leaf_tensors).square().sum(), leaf_tensors)
            first = torch.autograd.grad(function(*leaf_tensors).square().sum(), leaf_tensors, create_graph=True)
            torch.testing.assert_close(first, wanted)
            # rotary is linear, its second derivative its own; PyTorch composes changed scores of its own operators
            own = name.startswith("rotary") or (name.endswith("scored") and route == "torch")
            for leaf in leaf_tensors if not own else ():
                with pytest.raises(RuntimeError, match=REFUSAL):
                    torch.autograd.grad(sum(d.square().sum() for d in first), leaf, retain_graph=True)


def test_a_gradient_that_the_forward_pass_computed_is_no_constant_of_a_second_derivative():
    """Also where another path to the leaf exists, which alone would give a number."""
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    for loss, leaf in (
        (F.linear_cross_entropy(x * 1.0, weight, TARGET)[0], x),
        (F.linear_cross_entropy(x * 1.0, weight.detach(), TARGET)[0], x),
        (F.linear_cross_entropy(x.detach(), weight * 1.0, TARGET)[0], weight),
        (F.cross_entropy(x * 1.0, TARGET, inplace=True)[0], x),
    ):
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
            torch.autograd.grad(gradient.square().sum() + leaf.square().sum(), leaf)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", [name for name in USES if not name.startswith("rotary") and "scored" not in name])
def test_torch_func_s_gradient_of_a_gradient_is_refused(name, route):
    """Changed scores are composed of PyTorch's own operators under torch.func, which have it."""
    function, leaf_tensors = use(name)
    first, *others = (x.detach() for x in leaf_tensors)

    def gradient(x):
        return torch.func.grad(lambda y: function(y, *others).square().sum())(x)

    with F.backend(route), pytest.raises(RuntimeError, match=REFUSAL):
        torch.func.grad(lambda x: gradient(x).square().sum())(first)


def test_a_penalty_on_the_gradient_may_be_computed_where_nobody_differentiates_it():
    x = torch.randn(3, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(F.layer_norm(x, None, None).square().sum(), x, create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(RuntimeError, match=r"residual_norm_backward cannot be differentiated: second derivatives"):
        gradient.square().sum().backward()
