"""Layouts of heads: adjacent within a token's row, so that joining them is a view; packed and padded sequences."""

import torch
from torch import Tensor

from fasttfm.functional.operator import Size


def heads_last(x: Tensor) -> Tensor:
    """x (B, H, L, D) in memory order (B, L, H, D), copied if needed."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def empty_heads_last(like: Tensor, width: Size) -> Tensor:
    """An empty (B, H, L, width) in memory order (B, L, H, width); like (B, H, L, ...)."""
    batch, heads, length = like.shape[:3]
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def matrices(x: Tensor, heads: Size | None = None) -> Tensor:
    """(B, H, L, D) to (B * H, L, D), a batch of matrices; a view if strides allow.

    heads: the number of key heads, if query heads share them: to (B * heads, H / heads * L, D), one product per key
    head.
    """
    if heads is None or heads == x.shape[1]:
        return x.flatten(0, 1)
    return grouped(x, heads).flatten(0, 1)


def grouped(x: Tensor, heads: Size) -> Tensor:
    """(B, H, L, D) to (B, heads, H / heads * L, D): rows of the query heads that share a key head are concatenated."""
    return x.reshape(x.shape[0], heads, (x.shape[1] // heads if heads else 1) * x.shape[2], x.shape[3])


def by_head(x: Tensor, batch: int) -> Tensor:
    """A packed (T, H, D) as (B, H, T, D), the same memory for every sequence; copied unless the last stride is 1."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.transpose(0, 1).unsqueeze(0).expand(batch, -1, -1, -1)


def padded(x: Tensor, cu_seqlens: Tensor, length: int) -> Tensor:
    """(T, H, D) to (B, H, length, D). Padding repeats a sequence's last row: rows outside it may hold NaN."""
    if not x.shape[0]:
        return x.new_zeros(cu_seqlens.shape[0] - 1, x.shape[1], length, x.shape[2])
    index = cu_seqlens[:-1, None] + torch.arange(length, device=x.device)
    return x[torch.minimum(index, cu_seqlens[1:, None] - 1).clamp_(min=0)].transpose(1, 2)


def packed_again(x: Tensor, cu_seqlens: Tensor, rows: int) -> Tensor:
    """The inverse of padded(): (B, H, length, D) to (rows, H, D), a view; zero past the last sequence."""
    position = torch.arange(x.shape[2], device=x.device)
    index = cu_seqlens[:-1, None] + position
    index = torch.where(position < cu_seqlens.diff()[:, None], index, rows)  # padding goes to an extra row
    x = x.transpose(1, 2).flatten(0, 1)
    return x.new_zeros(rows + 1, *x.shape[1:]).index_copy_(0, index.flatten(), x)[:rows]
