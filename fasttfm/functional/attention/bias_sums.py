"""Gradients of the biases of attention's projections, which a kernel sums while it has the others in registers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.functional.attention.call import Call


class BiasSums(NamedTuple):
    """Memory for what each batch row adds to the gradients of the biases."""

    query: Tensor
    """(B, 3, H, D), or where keys have a projection of their own (B, H, D), float32."""
    key: Tensor | None
    """(B, 2, Hk, D) float32."""

    def of_heads(self) -> tuple[Tensor, ...]:
        """Return the sums for queries, keys and values (B, H, D)."""
        return self.query.unbind(1) if self.key is None else (self.query, *self.key.unbind(1))


def memory(call: Call) -> BiasSums:
    """Memory for the sums of a call with biases."""
    query, key = call[:2]
    make, batch, of_query = query.new_empty, call.batch, query.shape[-3 if key is None else -2 :]
    of_key = None if key is None else make((batch, *key.shape[-3:]), dtype=torch.float32)
    return BiasSums(make((batch, *of_query), dtype=torch.float32), of_key)


def of_rows(call: Call, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The same from the gradients of query and key, as (B, ..., H, D) float32 at least; None where there is no bias."""
    sums: list[Tensor | None] = []
    for bias, d in zip(call[3:5], gradients):
        if bias is None or d is None:
            sums.append(None)
        else:
            d = d[None] if call.packed else d
            sums.append(d.sum(1, dtype=torch.promote_types(d.dtype, torch.float32)).contiguous())
    return sums
