"""Gradients of the biases of attention's projections, which a kernel sums while it has the others in registers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Biases = tuple[Tensor | None, Tensor | None]
"""Of the joint projection and of the query's."""


class BiasSums(NamedTuple):
    """Memory for what each batch row adds to the gradients of the biases."""

    joint: Tensor
    """(B, 3, H, D) or (B, 2, Hk, D) float32."""
    query: Tensor | None
    """(B, H, D) float32, where queries have a projection of their own."""

    @classmethod
    def of(cls, joint: Tensor, query: Tensor | None, batch: int) -> BiasSums:
        """joint (..., 3, H, D), or (..., 2, Hk, D) with query (..., H, D)."""
        parts, heads, size = joint.shape[-3:]
        return cls(
            joint.new_empty(batch, parts, heads, size, dtype=torch.float32),
            None if query is None else joint.new_empty(batch, *query.shape[-2:], dtype=torch.float32),
        )

    def of_heads(self) -> tuple[Tensor, ...]:
        """Return the sums for queries, keys and values (B, H, D)."""
        parts = self.joint.unbind(1)
        return parts if self.query is None else (self.query, *parts)


def bias_gradients(biases: Biases, gradients: Biases, sums: BiasSums | None, batch: int) -> tuple[Tensor, Tensor]:
    """The gradients of both biases, from the gradients (B, L, ..., H, D) of what they were added to, or from their sums
    over L where a kernel made them; empty where there is no bias. batch: parts that are wanted of a bias given as
    (batch, N)."""
    assert gradients[0] is not None
    empty = gradients[0].new_empty(0)
    if biases[0] is None:
        return empty, gradients[0].new_empty(0)
    joint, query = (
        empty if bias is None or d is None else _bias_gradient(bias, d, parts, batch)
        for bias, d, parts in zip(biases, gradients, sums or (None, None))
    )
    return joint, query


def _bias_gradient(bias: Tensor, d: Tensor, parts: Tensor | None, batch: int) -> Tensor:
    if parts is None:
        parts = d.sum(1, dtype=torch.promote_types(d.dtype, torch.float32))
    parts = parts.flatten(1)
    if bias.dim() == 1:
        return parts.sum(0).to(bias.dtype)
    return parts if parts.shape[0] == batch else torch.nn.functional.pad(parts, (0, 0, 0, batch - parts.shape[0]))
