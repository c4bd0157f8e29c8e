"""Every registered operator under PyTorch's tools: opcheck, fake and meta tensors, torch.compile, torch.func, second
derivatives.

A dispatch mode records the calls of the public functions; an operator that none of them calls fails.
"""

from collections.abc import Callable
from typing import Any

import public_surface
import pytest
import torch
from public_surface import first, functions, public_name
from shared_fixtures import CASES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fasttfm import functional as F
from fasttfm.functional.operator import MARK

ROUTES = ["torch", "triton"]
SEED = torch.tensor([11])


class Calls(TorchDispatchMode):
    """Records calls of every fasttfm operator, with copies of their arguments: one per choice of absent tensors, flags
    and strings."""

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
TARGET, WEIGHTS = torch.tensor([3, 0, 5, 1, 2]), torch.tensor([0.5, 2.0, 1.0, 0.0, -1.0])
TOKENS = torch.tensor([[1, 4, 0]])
NETWORK = [(7, 8), (40, 8), (40,), (8, 40), (8,)]
VECTOR, ROWS = (16,), (3, 16)


Use = tuple[Callable[..., Tensor], list[tuple[int, ...]]]
MORE: dict[str, Use] = {
    "attention, mask": (lambda q, k, v, m: F.attention(q, k, v, mask=m), [*heads(5, 6), (5, 6)]),
    "attention, long rows": (lambda q, k, v: F.attention(q, k, v, causal=True), heads(18, 20)),  # torch's on a CPU
    "attention, sinks beside long rows": (lambda q, k, v, s: F.attention(q, k, v, sinks=s), [*heads(18, 20), (2,)]),
    "attention, scored": (lambda q, k, v, s: F.attention(q, k, v, sinks=s, **SCORED), [*heads(5, 6), (2,)]),
    "attention, dropout, scored": (lambda *t: F.attention(*t[:3], sinks=t[3], **SCORED, **DROP), [*heads(5, 6), (2,)]),
    "attention_weights, mask": (lambda q, k, m: F.attention_weights(q, k, mask=m, **DROP), [*heads(5, 6)[:2], (5, 6)]),
    "attention_weights, lengths": (lambda q, k: F.attention_weights(q, k, key_lengths=LENGTHS), heads(5, 6)[:2]),
    "sdpa": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), heads(5, 5)),
    "varlen, scored": (
        lambda x, s: F.varlen_attention(x, x, x, STARTS, STARTS, 5, 5, sinks=s, **SCORED), [(9, 2, 8), (2,)],
    ),
    "packed_qkv, mask": (
        lambda x: F.packed_qkv_attention(x, mask=torch.tensor([True] * 4 + [False] * 2)), [(1, 6, 3, 2, 8)]
    ),
    "packed_qkv, query": (
        lambda x, q: F.packed_qkv_attention(x, q, key_lengths=LENGTHS, **DROP), [(2, 6, 2, 2, 8), (2, 5, 2, 8)],
    ),
    "rotary, interleaved": (lambda x: F.rotary(x, *F.rotary_tables(6, 8), interleaved=True), [(2, 2, 5, 8)]),
    "rotary, positions": (lambda x: F.rotary(x, *F.rotary_tables(6, 8), torch.arange(5)[None]), [(2, 2, 5, 8)]),
    "layer_norm, no parameters": (lambda x: F.layer_norm(x, None, None), [ROWS]),
    "residual_layer_norm, bias": (
        lambda x, r, w, b, c: F.residual_layer_norm(x, r, w, b, x_bias=c, **DROP), [ROWS, ROWS, *[VECTOR] * 3],
    ),
    "residual_layer_norm, y alone": (
        lambda x, r, w, b: F.residual_layer_norm(x, r, w, b, **DROP)[0], [ROWS, ROWS, *[VECTOR] * 2],
    ),
    "residual_layer_norm, no parameters": (lambda x, r: F.residual_layer_norm(x, r, None, None), [ROWS, ROWS]),
    "residual_rms_norm, no weight": (lambda x, r: F.residual_rms_norm(x, r, None), [ROWS, ROWS]),
    "feed_forward, gelu": (lambda *t: F.feed_forward(*t, activation="gelu", **DROP), NETWORK),
    "feed_forward, no biases": (lambda x, a, b: F.feed_forward(x, a, None, b, None), [(7, 8), (40, 8), (8, 40)]),
    "embed, alone": (lambda w: F.embed(TOKENS, w, scale=2.0, **DROP), [(9, 16)]),
    "embed, padding": (lambda w, p: F.embed(TOKENS, w, p, pad_id=0, first_position=1), [(9, 16), (4, 16)]),
    "cross_entropy, smoothed": (
        lambda x: F.cross_entropy(x, TARGET, label_smoothing=0.1, ignore_index=0)[0], [(5, 9)],
    ),
    "cross_entropy, each row": (
        lambda x: F.cross_entropy(x, TARGET, reduction="none", row_weights=WEIGHTS)[0], [(5, 9)],
    ),
    "linear_cross_entropy, mean": (
        lambda h, w: F.linear_cross_entropy(h, w, TARGET, ignore_index=0, label_smoothing=0.1, reduction="mean")[0],
        [(5, 8), (9, 8)],
    ),
    "linear_cross_entropy, weighted": (
        lambda h, w: F.linear_cross_entropy(h, w, TARGET, row_weights=WEIGHTS)[0], [(5, 8), (9, 8)],
    ),
    "linear_cross_entropy, low memory": (
        lambda h, w: F.linear_cross_entropy(h, w, TARGET, low_memory=True)[0] * 0.5, [(5, 8), (9, 8)],
    ),
}  # fmt: skip
"""Differentiable functions of leaf tensors, and the shapes of the leaves, beside the calls of public_surface.py."""
USES = [name for name in functions() if public_name(name) in set(F.__all__) - {"scaled_dot_product_attention"}]
USES += list(MORE)


def use(name: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    torch.manual_seed(0)
    function, inputs = MORE[name] if name in MORE else functions(3, dropout_p=0.25)[name]
    leaf_tensors = [torch.randn(x).requires_grad_() if isinstance(x, tuple) else x for x in inputs]

    def summed(*x: Tensor) -> Tensor:
        outputs = function(*x)
        return sum(outputs) if isinstance(outputs, tuple) else outputs

    return summed, leaf_tensors


def rarely_called() -> None:
    """Call operators without a derivative."""
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
            rarely_called()
        yield {name: list(actual.values()) for name, actual in calls.seen.items()}


@pytest.mark.sample(1)
def test_every_operator_passes_opcheck_forward_and_backward(calls):
    """Also under AOTAutograd with dynamic shapes; in the gate one call of each operator."""
    assert set(calls) == registered()
    for actual in calls.values():
        for number, (operator, args) in enumerate(actual):
            fewer = {"test_utils": ("test_schema", "test_faketensor")} if number and CASES == "gate" else {}
            torch.library.opcheck(operator, args, **fewer)


@pytest.mark.sample(3)
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


WITHOUT_DROPOUT = {"layer_norm", "rms_norm", "rotary", "cross_entropy", "linear_cross_entropy"}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", [name for name in functions() if name.split(".")[-1] not in WITHOUT_DROPOUT])
def test_without_a_seed_torchs_generator_draws_the_mask(name, monkeypatch):
    monkeypatch.setattr(public_surface, "SEED", None)
    call, inputs = functions(dropout_p=0.5)[name]
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append([first(call(*inputs)) for _ in range(2)])
    assert all(map(torch.equal, *results))
    assert not torch.equal(*results[0])


@pytest.mark.filterwarnings("ignore:a second derivative is computed")
@pytest.mark.parametrize("name", USES)
def test_second_derivatives_equal_finite_differences(name):
    function, leaf_tensors = use(name)
    leaf_tensors = [leaf.detach().double().requires_grad_() for leaf in leaf_tensors]
    assert torch.autograd.gradgradcheck(function, leaf_tensors, fast_mode=True)
