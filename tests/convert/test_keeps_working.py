"""PyTorch features on a model with replaced modules: autocast, casts, checkpointing, second derivatives."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fasttfm
import fasttfm.nn

E, H, N, S = 16, 2, 2, 5


def layer(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(E, H, 24, **{"dropout": 0.0, "batch_first": True} | options)
    fasttfm.replace_modules(module)
    return module


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["autocast", "bfloat16", "float16"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_half_precision_is_as_near_to_float32_as_torch(norm_first: bool, dtype: torch.dtype | None) -> None:
    ours = layer(norm_first=norm_first)
    theirs = copy.deepcopy(ours)
    fasttfm.restore_modules(theirs)
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
    x = torch.randn(N, S, E, requires_grad=True)
    results = []
    for run in (module, lambda y: checkpoint(module, y, use_reentrant=use_reentrant)):
        module.zero_grad()
        torch.manual_seed(2)
        output = run(x)
        output.sin().sum().backward()
        results.append([output, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:a second derivative is computed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "encoder", "encoder, pre-norm", "decoder", "attention"])
def test_a_penalty_on_gradients_trains_as_torch_s(name: str, dtype: torch.dtype) -> None:
    def made(nn: Any) -> torch.nn.Module:
        if name in ("LayerNorm", "RMSNorm"):
            return getattr(nn, name)(E)
        if name == "attention":
            return nn.MultiheadAttention(E, H, batch_first=True)
        options = {"batch_first": True, "norm_first": "pre-norm" in name, "activation": "gelu"}
        kind = nn.TransformerDecoderLayer if name == "decoder" else nn.TransformerEncoderLayer
        return kind(E, H, 24, 0.0, **options)

    torch.manual_seed(0)
    theirs, ours = (made(nn).to(dtype) for nn in (torch.nn, fasttfm.nn))
    ours.load_state_dict(theirs.state_dict())
    results = []
    inputs = [torch.randn(N, S, E, dtype=dtype) for _ in range({"decoder": 2, "attention": 3}.get(name, 1))]
    for module in (theirs, ours):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            output = module(*leaves)
            output = output[0] if isinstance(output, tuple) else output
            penalty = sum(g.square().sum() for g in torch.autograd.grad(output.sin().sum(), leaves, create_graph=True))
            (output.sin().mean() + penalty).backward()
        results.append([x.grad for x in (*leaves, *module.parameters())])
    tolerance = {torch.float32: 2e-4, torch.float64: 1e-10}[dtype]
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)


def test_autocast_keeps_the_dtype_of_a_norm_s_input() -> None:
    x: Tensor = torch.randn(3, E).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fasttfm.nn.LayerNorm(E)(x).dtype == torch.bfloat16
        assert fasttfm.nn.LayerNorm(E)(x.float()).dtype == torch.float32
