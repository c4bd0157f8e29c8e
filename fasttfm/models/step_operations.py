"""Parts of a decoder's step for one new position of each row: as PyTorch operations.

A method returns the call that computes one part from buffers into buffers; nothing in it depends on numbers in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as nnF

Call = Callable[[], object]


class Norm(NamedTuple):
    """LayerNorm's parameters, (d,)."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


class Past(Protocol):
    """Tables by which R rows find what they attend to, int64. Rows that lie side by side may share a slot: a position,
    or a sentence."""

    ancestors: Tensor
    """(R, T): where the keys and values of each earlier position of a row are stored: row * T + position."""
    position: Tensor
    """(slots,): the position of the new tokens."""
    sentence: Tensor
    """(slots,): where the keys and values of the memory are stored."""
    source_lengths: Tensor
    """(slots,): how many these are."""


class Operations(Protocol):
    """Parts of StepLayers besides matrix products."""

    past: Past

    def norm(self, x: Tensor, residual: Tensor | None, norm: Norm, y: Tensor, s: Tensor | None) -> Call:
        """y = LayerNorm(s), s = residual + x, all (R, d); s may be the residual. Without residual y = LayerNorm(x)."""

    def attend_to_ancestors(self, joint: Tensor, cache: Tensor, heads: int, out: Tensor) -> Call:
        """Self-attention (R, d) of the new tokens, whose queries, keys and values are joint (R, 3 d), over their
        rows' past in cache (R * T, 2 d), where their keys and values are stored."""

    def attend_to_memory(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Call:
        """Attention (R, d) of query (R, d) over each slot's sentence in keys and values (Q, H, sources, D)."""


class TorchOperations:
    """Plain PyTorch, on any device: the reference of the kernels."""

    def __init__(self, past: Past) -> None:
        self.past = past

    def norm(self, x: Tensor, residual: Tensor | None, norm: Norm, y: Tensor, s: Tensor | None) -> Call:
        """See Operations."""

        def call() -> None:
            total = x if residual is None else torch.add(residual, x, out=s)
            y.copy_(nnF.layer_norm(total, y.shape[1:], *norm))

        return call

    def attend_to_ancestors(self, joint: Tensor, cache: Tensor, heads: int, out: Tensor) -> Call:
        """See Operations."""
        past, (rows, width) = self.past, out.shape
        steps = past.ancestors.shape[1]

        def call() -> None:
            cache.index_copy_(0, remember_places(past), joint[:, width:])
            seen = cache.index_select(0, past.ancestors.view(-1)).view(rows, steps, 2, heads, -1)
            keys, values = seen.permute(2, 0, 3, 1, 4)
            there = torch.arange(steps, device=out.device) <= past.position[:, None, None]
            mask = there[:, None].expand(-1, rows // len(there), 1, steps).reshape(rows, 1, 1, steps)
            query = joint[:, :width].view(rows, heads, 1, -1)
            out.copy_(nnF.scaled_dot_product_attention(query, keys, values, mask).view(out.shape))

        return call

    def attend_to_memory(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Call:
        """See Operations."""
        past, (_, heads, sources, size) = self.past, keys.shape

        def call() -> None:
            queries = query.view(len(past.sentence), -1, heads, size).transpose(1, 2)
            own_keys, own_values = (each.index_select(0, past.sentence) for each in (keys, values))
            mask = torch.arange(sources, device=out.device) < past.source_lengths[:, None, None, None]
            heads_joined = nnF.scaled_dot_product_attention(queries, own_keys, own_values, mask)
            out.copy_(heads_joined.transpose(1, 2).reshape(out.shape))

        return call


def remember_places(past: Past) -> Tensor:
    """(R,): where the keys and values of the new tokens are stored, which becomes part of their rows' past."""
    rows, steps = past.ancestors.shape
    positions = past.position[:, None].expand(-1, rows // len(past.position)).reshape(-1)
    places = torch.arange(rows, device=positions.device) * steps + positions
    past.ancestors.scatter_(1, positions[:, None], places[:, None])
    return places
