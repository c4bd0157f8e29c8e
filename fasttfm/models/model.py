"""Shared parts of whole models: initial weights, loss, activation checkpointing, recorded attention weights."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.functional.subclasses import ordinary
from fasttfm.models.attention import Attention
from fasttfm.models.plain import LINEAR, untouched
from fasttfm.models.stack import Stack


class Model(nn.Module):
    """Base of models with stacks of layers."""

    def checkpoint_activations(self, enabled: bool = True) -> None:
        """Save only the inputs of layers and recompute the rest in the backward pass.

        Gradients are bitwise equal; with kernels, except that the memory's is summed over the layers in another order.
        """
        for module in self.modules():
            if isinstance(module, Stack):
                module.checkpoint_activations = enabled


@torch.no_grad()
def reset_parameters(model: nn.Module, std: float) -> None:
    """Initialize weights: normal(0, std) matrices, biases 0, norms 1."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, Attention):
            nn.init.normal_(module.in_proj_weight, std=std)
            nn.init.zeros_(module.in_proj_bias)
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def token_loss(
    hidden: Tensor, output: Any, targets: Tensor, *, label_smoothing: float = 0.0, pad_id: int
) -> tuple[Tensor, Tensor]:
    """Cross entropy of output(hidden), summed over targets other than pad_id; hidden (B, L, d), targets (B, L).

    Returns (label-smoothed loss, loss without smoothing and without gradient), each 0-d. The logits (B, L, V) are
    materialized only where the operator cannot avoid it.
    """
    rows, targets = hidden.flatten(0, 1), targets.flatten()
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "ignore_index": pad_id}
    if untouched(output, LINEAR) and output.bias is None and ordinary(rows, output.weight):
        return F.linear_cross_entropy(rows, output.weight, targets, **options)
    return F.cross_entropy(output(rows), targets, reduction="sum", **options)


@contextlib.contextmanager
def recorded_weights(attentions: Iterable[Attention]) -> Iterator[list[Tensor]]:
    """Record the weights (B, H, L, S), without dropout, of each call of these attentions within the block."""
    weights: list[Tensor] = []

    def record(module: Any, inputs: Any, options: Any) -> None:
        weights.append(module.weights(*inputs, **options))

    with contextlib.ExitStack() as hooks:
        for attention in dict.fromkeys(attentions):  # layers may be shared
            hooks.callback(attention.register_forward_pre_hook(record, with_kwargs=True).remove)
        yield weights
