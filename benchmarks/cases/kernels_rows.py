"""Operators except attention: LayerNorm, residual + dropout + LayerNorm, feed-forward, losses, embedding.

M rows, N width, F hidden width, V vocabulary. Weights of norms are float32 with half-precision rows, as under autocast.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as nnF
from torch import Tensor

from benchmarks.cases.operators import operator
from benchmarks.measure import numerics
from benchmarks.measure import providers as peers
from benchmarks.measure.case import Case, Setting
from benchmarks.measure.providers import Provider
from fasttfm import functional as F
from fasttfm.functional.feed_forward import ACTIVATIONS
from fasttfm.kernels.proof import costs
from fasttfm.kernels.proof.costs import Cost


def _random(setting: Setting, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=setting.device) * scale).to(dtype or setting.dtype).requires_grad_()


def layer_norm(M: int, N: int, passes: str, setting: Setting) -> Case:
    size = setting.dtype.itemsize
    # backward reads x and dy and writes dx, like a residual norm whose residual is its only input
    cost = costs.layer_norm(M, N, size), costs.residual_layer_norm_backward(M, N, size, dropout=False)

    def inputs(i: int) -> tuple[Tensor, ...]:
        weight, bias = (_random(setting, N, dtype=torch.float32) for _ in range(2))
        return _random(setting, M, N), weight, bias

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return nnF.layer_norm(x, (N,), weight.to(x.dtype), bias.to(x.dtype))

    ours, others = {peers.OURS: F.layer_norm}, {peers.LIGER: _liger_layer_norm}
    shape = {"M": M, "N": N}
    return operator("LayerNorm", shape, passes, setting, cost, inputs, ours, eager, others)


def _liger_layer_norm() -> Provider:
    """https://github.com/linkedin/Liger-Kernel#model-kernels"""
    from liger_kernel.transformers.functional import liger_layer_norm

    return lambda x, weight, bias: liger_layer_norm(x, weight.to(x.dtype), bias.to(x.dtype), 1e-5)


def residual_layer_norm(M: int, N: int, dropout: float, passes: str, setting: Setting) -> Case:
    size = setting.dtype.itemsize
    cost = (
        costs.residual_layer_norm(M, N, size),
        costs.residual_layer_norm_backward(M, N, size, dropout=dropout > 0),
    )

    def inputs(i: int) -> tuple[Tensor, ...]:
        rows = (_random(setting, M, N) for _ in range(2))
        return (*rows, *(_random(setting, N, dtype=torch.float32) for _ in range(2)))

    def eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, dropout_p: float = 0.0) -> Tensor:
        return nnF.layer_norm(residual + nnF.dropout(x, dropout_p), (N,), weight.to(x.dtype), bias.to(x.dtype))

    def ours(*x: Any, dropout_p: float = 0.0) -> Tensor:
        return F.residual_layer_norm(*x, dropout_p=dropout_p)[0]

    name, shape = "residual + dropout + LayerNorm", {"M": M, "N": N, "dropout": dropout}
    others, level = {peers.FLASH_ATTN: _flash_attn_layer_norm}, "quick" if dropout else "standard"
    return operator(name, shape, passes, setting, cost, inputs, {peers.OURS: ours}, eager, others, least_level=level)


def _flash_attn_layer_norm(dropout_p: float = 0.0) -> Provider:
    """https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/ops/triton/layer_norm.py"""
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    function = partial(layer_norm_fn, dropout_p=dropout_p, eps=1e-5)
    return lambda x, residual, weight, bias: function(x, weight, bias, residual=residual)


def feed_forward(M: int, N: int, dropout: float, passes: str, setting: Setting, activation: str = "relu") -> Case:
    """Feed-forward with hidden width 4 * N."""
    hidden = 4 * N
    size = setting.dtype.itemsize
    cost = (
        costs.linear(M, N, hidden, size) + costs.linear(M, hidden, N, size),
        costs.linear_backward(M, N, hidden, size, bias=False) + costs.linear_backward(M, hidden, N, size, bias=True),
    )

    def inputs(i: int) -> tuple[Tensor, ...]:
        return (
            _random(setting, M, N),
            _random(setting, hidden, N, scale=N**-0.5),
            _random(setting, hidden, scale=0.1),
            _random(setting, N, hidden, scale=hidden**-0.5),
            _random(setting, N, scale=0.1),
        )

    def eager(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dropout_p: float = 0.0) -> Tensor:
        return nnF.linear(nnF.dropout(ACTIVATIONS[activation](nnF.linear(x, w1, b1)), dropout_p), w2, b2)

    name = f"feed-forward {activation}"
    measure: dict[str, Any] = {}
    if activation == "relu":
        name, measure = "feed-forward", {"error": numerics.kinked_error, "measure": numerics.KINKED_MEASURE}
    shape = {"M": M, "N": N, "F": hidden, "dropout": dropout}
    ours = {peers.OURS: partial(F.feed_forward, activation=activation)}
    return operator(name, shape, passes, setting, cost, inputs, ours, eager, **measure)


def cross_entropy(M: int, V: int, passes: str, setting: Setting) -> Case:
    """Cross entropy with label smoothing 0.1, as in the paper."""
    size = setting.dtype.itemsize
    # separate passes: both read the logits, the second writes the gradient
    cost = Cost(0, size * M * V + 8 * M), Cost(0, 2 * size * M * V + 8 * M)

    def inputs(i: int) -> tuple[Tensor, ...]:
        return _random(setting, M, V), torch.randint(V, (M,), device=setting.device)

    def ours(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, label_smoothing=0.1)[0]

    shape, written = {"M": M, "V": V}, frozenset({peers.LIGER})
    others = {peers.LIGER: partial(_liger_cross_entropy, passes)}
    case = partial(operator, "cross entropy", shape, passes, setting, cost, overwrites=written)
    return case(inputs, {peers.OURS: ours}, _eager_loss, others)


def _eager_loss(logits: Tensor, target: Tensor, reduction: str = "mean", smoothing: float = 0.1) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()  # as under autocast
    return nnF.cross_entropy(wide, target, label_smoothing=smoothing, reduction=reduction)


def _liger_cross_entropy(passes: str) -> Provider:
    """https://github.com/linkedin/Liger-Kernel#model-kernels: writes the gradient into the logits' memory"""
    if passes == "backward":
        return peers.refusing("its forward computes the gradient: see forward+backward")
    from liger_kernel.transformers import LigerCrossEntropyLoss

    return LigerCrossEntropyLoss(label_smoothing=0.1)


def linear_cross_entropy(M: int, N: int, V: int, smoothing: float, setting: Setting) -> Case:
    """Logits, loss and both gradients in one run: ours, Liger's and torch's compute gradients in the forward."""
    size = setting.dtype.itemsize
    forward = costs.linear(M, N, V, size) + costs.cross_entropy(M, V, size)
    cost = forward, costs.linear_backward(M, N, V, size, bias=False)

    def inputs(i: int) -> tuple[Tensor, ...]:
        target = torch.randint(V, (M,), device=setting.device)
        return _random(setting, M, N), _random(setting, V, N, scale=N**-0.5), target

    def ours(low_memory: bool, *x: Tensor) -> Tensor:
        return F.linear_cross_entropy(*x, label_smoothing=smoothing, low_memory=low_memory)[0]

    def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return _eager_loss(nnF.linear(hidden, weight), target, "sum", smoothing)

    name, shape = "linear + cross entropy" + ("" if smoothing else ", unsmoothed"), {"M": M, "N": N, "V": V}
    both = {peers.OURS: partial(ours, False), f"{peers.OURS}, low memory": partial(ours, True)}
    others: dict[str, Any] = {peers.LIGER: partial(_liger_linear_cross_entropy, smoothing)}
    if not smoothing:
        others[peers.TORCH_CHUNKED] = _torch_linear_cross_entropy
    return operator(name, shape, "forward+backward", setting, cost, inputs, both, eager, others)


def _torch_linear_cross_entropy() -> Provider:
    """https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.linear_cross_entropy.html, chunked, which
    excludes label smoothing"""
    return partial(nnF.linear_cross_entropy, reduction="sum", options=torch.nn.LinearCrossEntropyOptions())


def _liger_linear_cross_entropy(smoothing: float) -> Provider:
    """https://github.com/linkedin/Liger-Kernel#model-kernels"""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(label_smoothing=smoothing, reduction="sum")
    return lambda hidden, weight, target: loss(weight, hidden, target)


def embedding(B: int, L: int, N: int, V: int, dropout: float, passes: str, setting: Setting) -> Case:
    """Embedding lookup with scale, positions and dropout."""
    size = setting.dtype.itemsize
    cost = costs.embedding(B * L, N, size), costs.embedding_backward(B * L, N, V, size)

    def inputs(i: int) -> tuple[Tensor, ...]:
        positions = _random(setting, L, N).detach()
        return torch.randint(1, V, (B, L), device=setting.device), _random(setting, V, N), positions

    def eager(tokens: Tensor, weight: Tensor, positions: Tensor, dropout_p: float = 0.0) -> Tensor:
        return nnF.dropout(nnF.embedding(tokens, weight, padding_idx=0) * N**0.5 + positions, dropout_p)

    ours = {peers.OURS: partial(F.embed, scale=N**0.5, pad_id=0)}
    shape = {"B": B, "L": L, "N": N, "V": V, "dropout": dropout}
    return operator("embedding", shape, passes, setting, cost, inputs, ours, eager)
