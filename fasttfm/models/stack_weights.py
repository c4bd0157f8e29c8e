"""Weights of a stack's products in their dtype, and gradients in that of the parameters: each by one launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

_ALIGNED = 8
"""Numbers of half precision in 16 bytes, which kernels load at once."""
_OVER_MEMORY = (4, 5)
"""Places of in_proj_weight and in_proj_bias of the attention over the memory among a decoder layer's weights."""

OfMemory = tuple[Tensor, Tensor | None] | None
"""Weight (layers * 2 d, d) and bias of the keys and values of all layers over the memory."""


class StackWeights:
    """Weights and biases of the products of a stack's layers."""

    def __init__(self, weights: list[list[Any]], *, decodes: bool) -> None:
        """weights: of each layer, four a sub-layer, None among them; decodes: whether the second is over a memory."""
        self._weights = weights
        sources = {id(p): p for p in chain.from_iterable(weights) if p is not None}
        self._sources, places = [*sources.values()], {key: place for place, key in enumerate(sources)}
        self._places = [[None if p is None else places[id(p)] for p in each] for each in weights]
        self._dtype = self._sources[0].dtype
        self._total = sum(p.numel() for p in self._sources)
        self._is_even = all(p.numel() % _ALIGNED == 0 for p in self._sources)
        over = [place for i in _OVER_MEMORY for each in self._places if decodes and (place := each[i]) is not None]
        joins = self._is_even and len(weights) > 1 and len(set(over)) == len(over) and len(over) % len(weights) == 0
        self.over_memory = over if joins else []
        """Places of the weights, then of the biases, of attention over the memory; empty: no product joins them."""

    def in_dtype(self, dtype: torch.dtype, *, joined: bool) -> tuple[list[list[Any]], OfMemory]:
        """Weights of each layer, and where joined those over the memory: parameters, or copies made in one launch.

        Of a layer's own attention over the memory a joined copy has the rows that project queries alone.
        """
        copied, sources = dtype is not self._dtype, self._sources
        if not (copied or joined):
            return self._weights, None
        with torch.no_grad():
            if joined:
                sources, given = [*sources] if copied else [], sources
                for place in self.over_memory:
                    rows = len(given[place]) // 3
                    query, keys_values = torch.split_with_sizes(given[place], (rows, 2 * rows))
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
        of_memory = None
        if joined:
            width, layers = self._sources[self.over_memory[0]].shape[1], len(self._weights)
            rows, has_bias = 2 * width * layers, len(self.over_memory) > layers
            joint = memory[-rows * (width + has_bias) :]
            of_memory = joint[: rows * width].view(rows, width), joint[rows * width :] if has_bias else None
        if not copied:
            return self._weights, of_memory
        return [[None if place is None else copies[place] for place in each] for each in self._places], of_memory


def as_parameters(gradients: list[Any], parameters: Sequence[Any]) -> list[Any]:
    """Gradients in the dtype of their parameters, and pairs as one, in one launch, where autograd takes one each."""
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
