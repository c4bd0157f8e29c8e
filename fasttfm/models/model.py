"""Base of whole models besides their layers: passes that are computed again, or looked into."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from fasttfm.models.attention import Attention
from fasttfm.models.layers import Stack


class Model(nn.Module):
    """A module with stacks of layers somewhere in it."""

    def checkpoint_activations(self, enabled: bool = True) -> None:
        """Let layers keep only what they are given, and be computed again in the backward pass: less memory, the same
        gradients bit by bit."""
        for module in self.modules():
            if isinstance(module, Stack):
                module.checkpoint_activations = enabled


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
