"""Everything but attention: LayerNorm, residual + dropout + LayerNorm, feed-forward, losses, embedding.

M rows, N width, F hidden width, V vocabulary. Norms' weights are float32 beside half-precision rows, as under autocast.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as nnF
from torch import Tensor

from benchmarks.measure import numerics
from benchmarks.measure import providers as peers
from benchmarks.measure.case import Case, Setting, Work
from benchmarks.measure.providers import Absent, Provider
from fasttfm import functional as F
from fasttfm.functional.activations import ACTIVATIONS
from fasttfm.kernels.proof import costs
from fasttfm.kernels.proof.costs import Cost


def _case(name: str, shape: dict[str, Any], passes: str, setting: Setting, cost: tuple[Cost, Cost], make: Any) -> Case:
    """cost: of the forward pass and of the backward."""
    total = {"backward": cost[1], "forward+backward": cost[0] + cost[1]}.get(passes, cost[0])
    return Case(group="kernels", name=name, shape=shape, dtype=setting.dtype_name, passes=passes, cost=total, make=make)


def _random(*shape: int, setting: Setting, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
    x = torch.randn(*shape, device=setting.device) * scale
    return x.to(setting.dtype if dtype is None else dtype).requires_grad_()


def layer_norm(M: int, N: int, passes: str, setting: Setting, *, compile: bool = True) -> Case:
    size = setting.dtype.itemsize
    # backward reads x and dy and writes dx: a residual norm's, whose residual is the one input
    cost = costs.layer_norm(M, N, size), costs.residual_layer_norm_backward(M, N, size, stream=False, dropout=False)

    def make(setting: Setting) -> Work:
        def inputs(i: int) -> tuple[Tensor, ...]:
            parameters = (_random(N, setting=setting, dtype=torch.float32) for _ in range(2))
            return (_random(M, N, setting=setting), *parameters)

        def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return nnF.layer_norm(x, (N,), weight.to(x.dtype), bias.to(x.dtype))

        providers: dict[str, Provider | Absent] = {peers.OURS: F.layer_norm, peers.EAGER: eager}
        if compile:
            providers[peers.COMPILE] = peers.compiled(eager, setting.device)
        providers[peers.LIGER] = peers.provider(peers.LIGER, setting.device, _liger_layer_norm)
        return Work(inputs=inputs, providers=providers, reference=eager)

    return _case("LayerNorm", {"M": M, "N": N}, passes, setting, cost, make)


def _liger_layer_norm() -> Provider:
    """https://github.com/linkedin/Liger-Kernel#model-kernels"""
    from liger_kernel.transformers.functional import liger_layer_norm

    return lambda x, weight, bias: liger_layer_norm(x, weight.to(x.dtype), bias.to(x.dtype), 1e-5)


def residual_layer_norm(M: int, N: int, dropout: float, passes: str, setting: Setting, *, compile: bool = True) -> Case:
    size = setting.dtype.itemsize
    cost = (
        costs.residual_layer_norm(M, N, size, dropout=dropout > 0),
        costs.residual_layer_norm_backward(M, N, size, stream=False, dropout=dropout > 0),
    )

    def make(setting: Setting) -> Work:
        def inputs(i: int) -> tuple[Tensor, ...]:
            rows = (_random(M, N, setting=setting) for _ in range(2))
            return (*rows, *(_random(N, setting=setting, dtype=torch.float32) for _ in range(2)))

        def eager(p: float, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return nnF.layer_norm(residual + nnF.dropout(x, p), (N,), weight.to(x.dtype), bias.to(x.dtype))

        def ours(p: float, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.residual_layer_norm(x, residual, weight, bias, dropout_p=p)[0]

        def functions(p: float) -> Mapping[str, Provider | Absent]:
            result: dict[str, Provider | Absent] = {peers.OURS: partial(ours, p), peers.EAGER: partial(eager, p)}
            if compile:
                result[peers.COMPILE] = peers.compiled(partial(eager, p), setting.device)
            result[peers.FLASH_ATTN] = peers.provider(
                peers.FLASH_ATTN, setting.device, lambda: _flash_attn_layer_norm(p)
            )
            return result

        return Work(
            inputs=inputs,
            providers=functions(dropout),
            reference=partial(eager, 0.0),
            without_dropout=functions(0.0) if dropout else None,
        )

    shape = {"M": M, "N": N, "dropout": dropout}
    return _case("residual + dropout + LayerNorm", shape, passes, setting, cost, make)


def _flash_attn_layer_norm(p: float) -> Provider:
    """https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/ops/triton/layer_norm.py"""
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    return lambda x, residual, weight, bias: layer_norm_fn(x, weight, bias, residual=residual, dropout_p=p, eps=1e-5)


def feed_forward(
    M: int,
    N: int,
    hidden: int,
    dropout: float,
    passes: str,
    setting: Setting,
    *,
    compile: bool = True,
    activation: str = "relu",
) -> Case:
    kinked = activation == "relu"
    size = setting.dtype.itemsize
    cost = (
        costs.linear(M, N, hidden, size) + costs.linear(M, hidden, N, size),
        costs.linear_backward(M, N, hidden, size, bias=False) + costs.linear_backward(M, hidden, N, size, bias=True),
    )

    def make(setting: Setting) -> Work:
        def inputs(i: int) -> tuple[Tensor, ...]:
            return (
                _random(M, N, setting=setting),
                _random(hidden, N, setting=setting, scale=N**-0.5),
                _random(hidden, setting=setting, scale=0.1),
                _random(N, hidden, setting=setting, scale=hidden**-0.5),
                _random(N, setting=setting, scale=0.1),
            )

        def eager(p: float, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
            return nnF.linear(nnF.dropout(ACTIVATIONS[activation](nnF.linear(x, w1, b1)), p), w2, b2)

        def functions(p: float) -> Mapping[str, Provider | Absent]:
            result: dict[str, Provider | Absent] = {
                peers.OURS: partial(F.feed_forward, dropout_p=p, activation=activation),
                peers.EAGER: partial(eager, p),
            }
            if compile:
                result[peers.COMPILE] = peers.compiled(partial(eager, p), setting.device)
            return result

        return Work(
            inputs=inputs,
            providers=functions(dropout),
            reference=partial(eager, 0.0),
            without_dropout=functions(0.0) if dropout else None,
            error=numerics.kinked_error if kinked else numerics.relative_error,
            measure=numerics.KINKED_MEASURE if kinked else "max |x - float64| / max |float64|",
        )

    shape = {"M": M, "N": N, "F": hidden, "dropout": dropout}
    name = "feed-forward" if kinked else f"feed-forward {activation}"
    return _case(name, shape, passes, setting, cost, make)


def cross_entropy(M: int, V: int, passes: str, setting: Setting, *, compile: bool = True) -> Case:
    """Label smoothing 0.1, as the paper trains."""
    size = setting.dtype.itemsize
    # two passes apart: the logits are read in each, the gradient is written in the second
    cost = Cost(0, size * M * V + 8 * M, 1), Cost(0, 2 * size * M * V + 8 * M, 1)

    def make(setting: Setting) -> Work:
        def inputs(i: int) -> tuple[Tensor, ...]:
            return _random(M, V, setting=setting), torch.randint(V, (M,), device=setting.device)

        def ours(logits: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(logits, target, label_smoothing=0.1)[0]

        def eager(logits: Tensor, target: Tensor) -> Tensor:
            wide = logits if logits.dtype == torch.float64 else logits.float()  # as under autocast
            return nnF.cross_entropy(wide, target, label_smoothing=0.1)

        providers: dict[str, Provider | Absent] = {peers.OURS: ours, peers.EAGER: eager}
        if compile:
            providers[peers.COMPILE] = peers.compiled(eager, setting.device)
        providers[peers.LIGER] = peers.provider(peers.LIGER, setting.device, lambda: _liger_cross_entropy(passes))
        return Work(inputs=inputs, providers=providers, reference=eager, overwrites=frozenset({peers.LIGER}))

    return _case("cross entropy", {"M": M, "V": V}, passes, setting, cost, make)


def _liger_cross_entropy(passes: str) -> Provider:
    """https://github.com/linkedin/Liger-Kernel#model-kernels: leaves the gradient in the logits' memory"""
    if passes == "backward":
        return peers.refusing(NotImplementedError("its forward computes the gradient: see forward+backward"))
    from liger_kernel.transformers import LigerCrossEntropyLoss

    return LigerCrossEntropyLoss(label_smoothing=0.1)


def linear_cross_entropy(M: int, N: int, V: int, setting: Setting, *, compile: bool = True) -> Case:
    """Logits, label-smoothed loss and both gradients, in one run: ours and Liger's compute gradients in the forward."""
    size = setting.dtype.itemsize
    forward = costs.linear(M, N, V, size) + costs.cross_entropy(M, V, size)
    cost = forward, costs.linear_backward(M, N, V, size, bias=False)

    def make(setting: Setting) -> Work:
        def inputs(i: int) -> tuple[Tensor, ...]:
            target = torch.randint(V, (M,), device=setting.device)
            return _random(M, N, setting=setting), _random(V, N, setting=setting, scale=N**-0.5), target

        def ours(low_memory: bool, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return F.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, low_memory=low_memory)[0]

        def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            logits = nnF.linear(hidden, weight)
            wide = logits if logits.dtype == torch.float64 else logits.float()  # as under autocast
            return nnF.cross_entropy(wide, target, label_smoothing=0.1, reduction="sum")

        providers: dict[str, Provider | Absent] = {
            peers.OURS: partial(ours, False),
            f"{peers.OURS}, low memory": partial(ours, True),
            peers.EAGER: eager,
        }
        if compile:
            providers[peers.COMPILE] = peers.compiled(eager, setting.device)
        providers[peers.LIGER] = peers.provider(peers.LIGER, setting.device, _liger_linear_cross_entropy)
        return Work(inputs=inputs, providers=providers, reference=eager)

    shape = {"M": M, "N": N, "V": V}
    return _case("linear + cross entropy", shape, "forward+backward", setting, cost, make)


def _liger_linear_cross_entropy() -> Provider:
    """https://github.com/linkedin/Liger-Kernel#model-kernels"""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1, reduction="sum")
    return lambda hidden, weight, target: loss(weight, hidden, target)


def embedding(
    B: int, L: int, N: int, V: int, dropout: float, passes: str, setting: Setting, *, compile: bool = True
) -> Case:
    """Scale, position and dropout with the gather."""
    size = setting.dtype.itemsize
    cost = (
        costs.embedding(B * L, N, size, dropout=dropout > 0),
        costs.embedding_backward(B * L, N, V, size, dropout=dropout > 0),
    )

    def make(setting: Setting) -> Work:
        positions = torch.randn(L, N, device=setting.device).to(setting.dtype)

        def inputs(i: int) -> tuple[Tensor, ...]:
            return torch.randint(1, V, (B, L), device=setting.device), _random(V, N, setting=setting)

        def eager(p: float, tokens: Tensor, weight: Tensor) -> Tensor:
            x = nnF.embedding(tokens, weight, padding_idx=0) * N**0.5 + positions.to(weight.dtype)
            return nnF.dropout(x, p)

        def ours(p: float, tokens: Tensor, weight: Tensor) -> Tensor:
            return F.embed(tokens, weight, positions, scale=N**0.5, pad_id=0, dropout_p=p)

        def functions(p: float) -> Mapping[str, Provider | Absent]:
            result: dict[str, Provider | Absent] = {peers.OURS: partial(ours, p), peers.EAGER: partial(eager, p)}
            if compile:
                result[peers.COMPILE] = peers.compiled(partial(eager, p), setting.device)
            return result

        return Work(
            inputs=inputs,
            providers=functions(dropout),
            reference=partial(eager, 0.0),
            without_dropout=functions(0.0) if dropout else None,
        )

    shape = {"B": B, "L": L, "N": N, "V": V, "dropout": dropout}
    return _case("embedding", shape, passes, setting, cost, make)
