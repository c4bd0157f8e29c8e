"""Base of whole models besides their layers: first weights, the loss, passes that are computed again or looked into."""

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
    """A module with stacks of layers somewhere in it."""

    def checkpoint_activations(self, enabled: bool = True) -> None:
        """Let layers keep only what they are given, and be computed again in the backward pass: less memory, the same
        gradients bit by bit; with kernels but for the order in which that of the memory is summed over the layers."""
        for module in self.modules():
            if isinstance(module, Stack):
                module.checkpoint_activations = enabled


@torch.no_grad()
def reset_parameters(model: nn.Module, std: float) -> None:
    """Draws fresh weights: normal(0, std) matrices, biases 0, norms 1."""
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

    Returns (label-smoothed loss, loss without smoothing and without gradient), each 0-d. The logits (B, L, V) never
    exist all at once where the operator can avoid it.
    """
    rows, wanted = hidden.flatten(0, 1), targets.flatten()
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "ignore_index": pad_id}
    if untouched(output, LINEAR) and output.bias is None and ordinary(rows, output.weight):
        return F.linear_cross_entropy(rows, output.weight, wanted, **options)
    return F.cross_entropy(output(rows), wanted, reduction="sum", **options)


@contextlib.contextmanager
def recorded_weights(attentions: Iterable[Attention]) -> Iterator[list[Tensor]]:
    """Inside, every call of these attentions appends its weights (B, H, L, S), without dropout, to the list."""
    weights: list[Tensor] = []

    def record(module: Any, inputs: Any, options: Any) -> None:
        weights.append(module.weights(*inputs, **options))

    with contextlib.ExitStack() as hooks:
        for attention in dict.fromkeys(attentions):  # a layer may be used several times
            hooks.callback(attention.register_forward_pre_hook(record, with_kwargs=True).remove)
        yield weights
