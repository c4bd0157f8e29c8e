"""replace_modules and restore_modules on unusual models: shared, hooked, wrapped, frozen, on the meta device; and with
PyTorch's features: autocast, casts, checkpointing, second derivatives."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import fasttfm
import fasttfm.nn

N, S, E, H, F = 2, 5, 8, 2, 12


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(E, H, F, **{"dropout": 0.0, "batch_first": True} | options)


def both_agree(theirs: nn.Module, ours: nn.Module) -> None:
    """Compare outputs and parameter gradients."""
    x = torch.randn(N, S, E)
    results = []
    for module in (theirs, ours):
        module.zero_grad()
        output = module(x)
        output.sin().sum().backward()
        results.append([output, *(p.grad for p in module.parameters() if p.grad is not None)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


class Chain(nn.Module):
    """nn.Sequential that is not one of torch's classes."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def test_a_layer_that_occurs_twice_stays_one_layer() -> None:
    shared, other = layer(), layer(norm_first=True)
    other.self_attn.in_proj_weight = shared.self_attn.in_proj_weight  # a weight that two layers share
    theirs = Chain(shared, other, shared)
    ours = copy.deepcopy(theirs)
    assert not fasttfm.replace_modules(ours).left
    assert ours.parts[0] is ours.parts[2]
    assert ours.parts[1].self_attn.in_proj_weight is ours.parts[0].self_attn.in_proj_weight
    both_agree(theirs, ours)


def test_a_meta_model_is_replaced_and_then_materialized() -> None:
    with torch.device("meta"):
        model = layer()
        fasttfm.replace_modules(model)
        assert model(torch.empty(N, S, E)).shape == (N, S, E)
    model.to_empty(device="cpu").load_state_dict(layer().state_dict())
    both_agree(layer(), model)


class LowRank(nn.Module):
    """A Linear with a low-rank update, as adapters insert it."""

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


def adapted(model: Any) -> None:
    model.linear1, model.linear2 = LowRank(model.linear1), LowRank(model.linear2)


def adapted_output_projection(model: Any) -> None:
    """torch.nn reads weight and bias of the output projection but never calls it."""
    model.self_attn.out_proj = LowRank(model.self_attn.out_proj)
    model.self_attn.out_proj.register_forward_hook(lambda *_: pytest.fail("torch.nn does not call it"))


def weight_normed(model: Any) -> None:
    parametrizations.weight_norm(model.linear2)
    parametrizations.weight_norm(model.self_attn.out_proj)


def parametrised_attention(model: Any) -> None:
    parametrize.register_parametrization(model.self_attn, "in_proj_weight", Half())
    parametrize.register_parametrization(model.norm1, "weight", Half())


def pruned(model: Any) -> None:
    for module, name in ((model.linear2, "weight"), (model.linear2, "bias"), (model.norm2, "weight")):
        prune.random_unstructured(module, name, amount=0.5)
    prune.random_unstructured(model.self_attn, "in_proj_weight", amount=0.5)


def hooked(model: Any) -> None:
    model.linear2.register_forward_hook(lambda module, inputs, output: output * 3)
    model.self_attn.register_forward_hook(lambda module, inputs, output: (output[0] + 1, None))
    model.dropout1.register_full_backward_hook(lambda module, wanted, given: (given[0] * 2,))


CHANGES = [adapted, adapted_output_projection, weight_normed, parametrised_attention, pruned, hooked]


@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_modified_submodules_are_called(change: Any, norm_first: bool, route: str) -> None:
    theirs, ours = layer(norm_first=norm_first), layer(norm_first=norm_first)
    for model in (theirs, ours):  # what is pruned cannot be copied
        torch.manual_seed(1)
        change(model)
    report = fasttfm.replace_modules(ours)
    left = {"self_attn", "norm1"} if change is parametrised_attention else set()
    assert report.left.keys() == left
    assert all("derived from torch.nn." in reason for reason in report.left.values())
    with fasttfm.functional.backend(route):
        both_agree(theirs, ours)


def test_symbolic_tracing_needs_torch_s_modules() -> None:
    model = Chain(layer(), nn.LayerNorm(E))
    x = torch.randn(N, S, E)
    expected = torch.fx.symbolic_trace(model)(x)
    fasttfm.replace_modules(model)
    with pytest.raises(Exception, match=r"(?i)trac|proxy|symbolic"):
        torch.fx.symbolic_trace(model)
    fasttfm.restore_modules(model)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), expected)


# PyTorch's features


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["autocast", "bfloat16", "float16"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_half_precision_is_as_near_to_float32_as_torch(norm_first: bool, dtype: torch.dtype | None) -> None:
    theirs, ours = layer(norm_first=norm_first), layer(norm_first=norm_first)
    fasttfm.replace_modules(ours)
    x = torch.randn(N, S, E)
    exact = theirs(x)
    errors = []
    for module in (theirs, ours):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is None):
            output = module.to(dtype or x.dtype)(x.to(dtype or x.dtype))
        assert dtype in (None, output.dtype)
        errors.append((output.float() - exact).abs().max())
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(output.sum(), list(module.parameters())))
    assert errors[1] <= 2 * errors[0] + (2**-8 if dtype is None else torch.finfo(dtype).eps)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_draws_the_same_dropout(use_reentrant: bool) -> None:
    module = layer(dropout=0.5)
    fasttfm.replace_modules(module)
    x = torch.randn(N, S, E, requires_grad=True)
    results = []
    for run in (module, lambda y: checkpoint(module, y, use_reentrant=use_reentrant)):
        module.zero_grad()
        torch.manual_seed(2)
        output = run(x)
        output.sin().sum().backward()
        results.append([output, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_autocast_keeps_the_dtype_of_a_norm_s_input() -> None:
    x = torch.randn(3, E).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fasttfm.nn.LayerNorm(E)(x).dtype == torch.bfloat16
        assert fasttfm.nn.LayerNorm(E)(x.float()).dtype == torch.float32
