"""What every registered operator owes PyTorch: opcheck, fake tensors, a refusal of second derivatives.

The calls are those that the public functions make, seen by a dispatch mode; an operator that none of them calls fails.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fasttfm import functional as F

ROUTES = ["torch", "triton"]
REFUSAL = "second derivatives are not implemented|derivative for aten::_scaled_dot_product_.* is not implemented"
"""Ours, or torch's where the kernel is torch's own."""
SEED = torch.tensor([11])


class Calls(TorchDispatchMode):
    """The first calls of every fasttfm operator, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fasttfm":
            actual = self.seen.setdefault(func._schema.name.split("::")[1], [])
            if len(actual) < 2:
                actual.append((func, tree_map_only(Tensor, lambda t: t.detach().clone(), args)))
        return func(*args, **(kwargs or {}))


def rotary(x):
    return F.rotary(x, *F.rotary_tables(6, 8), interleaved=True)


def uses() -> Iterator[tuple[Callable[..., Tensor], list[Tensor]]]:
    """A function of leaves that ends in something to differentiate, for every public operator."""
    drop = {"dropout_p": 0.25, "seed": SEED}
    lengths, starts = torch.tensor([6, 3]), torch.tensor([0, 4, 9])
    target = torch.tensor([3, 0, 5, 1, 2])

    def leaf_tensors(*shapes):
        return [torch.randn(shape, requires_grad=True) for shape in shapes]

    heads = [(2, 2, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)]
    yield lambda q, k, v: F.attention(q, k, v, key_lengths=lengths, causal=True, **drop), leaf_tensors(*heads)
    yield lambda q, k, v, m: F.attention(q, k, v, mask=m), leaf_tensors(*heads, (5, 6))
    long = [(2, 2, 18, 8), (2, 2, 20, 8), (2, 2, 20, 8)]
    yield lambda q, k, v: F.attention(q, k, v, causal=True), leaf_tensors(*long)  # torch's own kernel on a CPU
    yield lambda q, k, m: F.attention_weights(q, k, mask=m, **drop), leaf_tensors(*heads[:2], (5, 6))
    yield lambda x: F.varlen_attention(x, x, x, starts, starts, 5, 5, **drop), leaf_tensors((9, 2, 8))
    yield lambda x: F.joint_varlen_attention(x, None, starts, starts, 5, 5, **drop), leaf_tensors((9, 3, 2, 8))
    yield lambda x: F.joint_attention(x, key_lengths=lengths[:1], causal=True, **drop), leaf_tensors((1, 6, 3, 2, 8))
    yield rotary, leaf_tensors(heads[0])
    yield lambda x, w, b: F.layer_norm(x, w, b), leaf_tensors((3, 16), (16,), (16,))
    yield (
        lambda x, r, w, b: sum(F.residual_layer_norm(x, r, w, b, **drop)[:2]),
        leaf_tensors((3, 16), (3, 16), (16,), (16,)),
    )
    yield lambda x, w: F.rms_norm(x, w), leaf_tensors((3, 16), (16,))
    yield lambda x, r, w: sum(F.residual_rms_norm(x, r, w, **drop)), leaf_tensors((3, 16), (3, 16), (16,))
    yield lambda x, r: F.residual_add(x, r, **drop), leaf_tensors((3, 16), (3, 16))
    for activation in ("relu", "gelu"):
        options = {**drop, "activation": activation}
        yield lambda *t, o=options: F.feed_forward(*t, **o), leaf_tensors((7, 8), (40, 8), (40,), (8, 40), (8,))
    yield lambda w: F.embed(torch.tensor([[1, 4, 0]]), w, scale=2.0, **drop), leaf_tensors((9, 16))
    yield lambda x: F.cross_entropy(x, target, label_smoothing=0.1)[0], leaf_tensors((5, 9))
    yield lambda x: F.cross_entropy(x * 1.0, target, inplace=True)[0], leaf_tensors((5, 9))
    yield lambda h, w: F.linear_cross_entropy(h, w, target)[0] * 0.5, leaf_tensors((5, 8), (9, 8))
    yield lambda h, w: F.linear_cross_entropy(h, w, target, low_memory=True)[0], leaf_tensors((5, 8), (9, 8))


def without_gradient() -> None:
    """Calls of what has no derivative."""
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8)
    table = torch.tensor([[3, 1], [0, 2]])
    options = {"cache_lengths": torch.tensor([2, 5]), "block_table": table, "window": (4, None), "causal": True}
    F.attention_with_cache(query, torch.randn(4, 2, 4, 8), torch.randn(4, 2, 4, 8), key, key, **options)


def registered() -> set[str]:
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("fasttfm::")}
    return {name for name in names if not name.startswith(("test_", "overhead"))}


@pytest.fixture(scope="module", params=ROUTES)
def calls(request):
    torch.manual_seed(0)
    with F.backend(request.param):
        with Calls() as calls:
            for use, leaf_tensors in uses():
                torch.autograd.grad(use(*leaf_tensors).sum(), leaf_tensors)
            without_gradient()
        yield calls.seen


@pytest.mark.sample(1)
def test_every_operator_passes_opcheck_forward_and_backward(calls):
    assert set(calls) == registered()
    for actual in calls.values():
        for operator, args in actual:
            torch.library.opcheck(operator, args)


@pytest.mark.parametrize("route", ROUTES)
def test_norms_without_parameters_pass_opcheck(route):
    """What they leave out are empty outputs, each of its own."""
    x, residual = (torch.randn(3, 16, requires_grad=True) for _ in range(2))
    with F.backend(route), Calls() as calls:
        for loss in (
            sum(F.residual_layer_norm(x, residual, None, None)),
            sum(F.residual_rms_norm(x, residual, None)),
            F.rms_norm(x, None),
            F.layer_norm(x, None, None),
        ):
            loss.sum().backward()
    assert {"residual_norm", "residual_norm_backward"} <= set(calls.seen)
    for actual in calls.seen.values():
        for operator, args in actual:
            torch.library.opcheck(operator, args)


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
    torch.manual_seed(0)
    with F.backend(route):
        for use, leaf_tensors in uses():
            wanted = torch.autograd.grad(use(*leaf_tensors).square().sum(), leaf_tensors)
            first = torch.autograd.grad(use(*leaf_tensors).square().sum(), leaf_tensors, create_graph=True)
            torch.testing.assert_close(first, wanted)
            for leaf in leaf_tensors if use is not rotary else ():  # it is linear, and its second derivative its own
                with pytest.raises(RuntimeError, match=REFUSAL):
                    torch.autograd.grad(sum(d.square().sum() for d in first), leaf, retain_graph=True)


def test_a_gradient_that_the_forward_pass_computed_is_no_constant_of_a_second_derivative():
    """Also where another path to the leaf exists, which alone would give a number."""
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    target = torch.tensor([3, 0, 5, 1, 2])
    for loss, leaf in (
        (F.linear_cross_entropy(x * 1.0, weight, target)[0], x),
        (F.linear_cross_entropy(x * 1.0, weight.detach(), target)[0], x),
        (F.linear_cross_entropy(x.detach(), weight * 1.0, target)[0], weight),
        (F.cross_entropy(x * 1.0, target, inplace=True)[0], x),
    ):
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
            torch.autograd.grad(gradient.square().sum() + leaf.square().sum(), leaf)
