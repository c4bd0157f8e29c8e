"""How heads lie in memory: one after the other in a token's row, so that joining them copies nothing."""

from __future__ import annotations

from torch import Tensor

from fasttfm.functional.operator import Size


def heads_last(x: Tensor) -> Tensor:
    """x (B, H, L, D), its memory (B, L, H, D); a copy only where it lies otherwise."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def empty_heads_last(like: Tensor, width: Size) -> Tensor:
    """An empty (B, H, L, width) that lies so; like (B, H, L, ...)."""
    batch, heads, length = like.shape[:3]
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """(B, H, L, D) to (B, L, H * D)."""
    return x.transpose(1, 2).flatten(2)


def by_head(x: Tensor, query: Tensor) -> Tensor:
    """x (B, L, H * D) as (B, H, L, D), for query (B, H, L, D)."""
    return x.unflatten(2, query.shape[1::2]).transpose(1, 2)


def write(gradients: tuple[Tensor, Tensor, Tensor], out: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    """The gradients of query, key and value, (B, H, L, D), heads last or in the memory that they have to be in."""
    if out is None:
        return tuple(heads_last(d) for d in gradients)
    for memory, d in zip(out, gradients):
        memory.copy_(d.view(memory.shape))
    return out
