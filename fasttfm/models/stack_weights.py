"""Casts for a whole stack, one launch each: weights to the dtype of products, gradients to that of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

_ALIGNED = 8
"""Half-precision elements in 16 bytes, the widest load of a kernel."""
_CROSS_ATTENTION = (4, 5)
"""Index of cross-attention's in_proj_weight and in_proj_bias among the weights of a decoder layer."""

MemoryWeights = tuple[Tensor, Tensor | None] | None
"""Weight (layers * 2 d, d) and bias that project the memory to the keys and values of all layers."""


class StackWeights:
    """Weights and biases of a stack's matrix products."""

    def __init__(self, weights: list[list[Any]], *, is_decoder: bool) -> None:
        """weights: per layer, four per sub-layer, each may be None."""
        self._weights = weights
        sources = {id(p): p for p in chain.from_iterable(weights) if p is not None}
        self._sources, places = [*sources.values()], {key: place for place, key in enumerate(sources)}
        self._places = [[None if p is None else places[id(p)] for p in each] for each in weights]
        self._dtype = self._sources[0].dtype
        self._total = sum(p.numel() for p in self._sources)
        self._is_even = all(p.numel() % _ALIGNED == 0 for p in self._sources)
        cross = _CROSS_ATTENTION if is_decoder else ()
        over = [place for i in cross for each in self._places if (place := each[i]) is not None]
        joins = self._is_even and len(weights) > 1 and len(set(over)) == len(over) and len(over) % len(weights) == 0
        self.over_memory = over if joins else []
        """Index of each cross-attention's weight, then bias, in _sources; empty if they cannot be joined."""

    def in_dtype(self, dtype: torch.dtype, *, joined: bool) -> tuple[list[list[Any]], MemoryWeights]:
        """The weights of each layer and, if joined, the memory's: the parameters, or copies made by one launch.

        If both, the copies of cross-attention's weights hold only the rows that project queries.
        """
        copied, sources = dtype is not self._dtype, self._sources
        if not (copied or joined):
            return self._weights, None
        with torch.no_grad():
            if joined:
                parameters, sources = sources, [*sources] if copied else []
                for place in self.over_memory:
                    rows = len(parameters[place]) // 3
                    query, keys_values = torch.split_with_sizes(parameters[place], (rows, 2 * rows))
                    sources.append(keys_values)
                    if copied:
                        sources[place] = query
            if self._is_even:
                total = self._total if copied else sum([each.numel() for each in sources])
                memory = sources[0].new_empty(total, dtype=dtype)
                copies = _unflatten_dense_tensors(memory, sources)
            else:
                copies = [torch.empty_like(p, dtype=dtype) for p in sources]
            torch._foreach_copy_(copies, sources)
        memory_weights = None
        if joined:
            width, layers = self._sources[self.over_memory[0]].shape[1], len(self._weights)
            rows, has_bias = 2 * width * layers, len(self.over_memory) > layers
            joint = memory[-rows * (width + has_bias) :]
            memory_weights = joint[: rows * width].view(rows, width), joint[rows * width :] if has_bias else None
        if not copied:
            return self._weights, memory_weights
        return [[None if place is None else copies[place] for place in each] for each in self._places], memory_weights


def in_parameter_dtype(gradients: list[Any], parameters: Sequence[Any]) -> list[Any]:
    """Cast gradients to the dtype of their parameters and concatenate pairs, by one launch."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for place, (gradient, parameter) in enumerate(zip(gradients, parameters)):
        if type(gradient) is tuple:
            gradients[place] = whole = torch.empty_like(parameter)
            targets += torch.split_with_sizes(whole, [len(rows) for rows in gradient])
            sources += gradient
        elif gradient is not None and gradient.dtype is not parameter.dtype:
            gradients[place] = whole = torch.empty_like(parameter)
            targets += [whole]
            sources += [gradient]
    if targets:
        torch._foreach_copy_(targets, sources)
    return gradients
