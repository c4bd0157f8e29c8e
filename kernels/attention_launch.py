"""The host side that all attention kernels share: what is passed on, and how a tensor's strides get there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from fasttfm.kernels.launch import chip, interpreted, product_kind
from fasttfm.kernels.philox import dropout_arguments

MAX_WIDTH = 256
"""Largest head size of queries, keys and values."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of scores and how it is computed."""

    rows: int
    """Queries."""
    columns: int
    """Keys."""
    warps: int
    stages: int


class Packed(NamedTuple):
    """Sequences one after the other on both sides."""

    query_starts: torch.Tensor
    """(B + 1,) int32 or int64: where each begins among the queries, and the end of the last."""
    key_starts: torch.Tensor
    """Likewise among the keys."""
    max_query: int
    """No sequence has more queries."""
    max_key: int
    """No sequence has more keys."""


@dataclass(slots=True)
class Call:
    """One call of attention, as its kernels take it."""

    chip: object
    kind: str
    """fp32, tf32, fp16 or bf16."""
    planes: int
    """Batch times heads."""
    queries: int
    keys: int
    arguments: tuple
    """From key_lengths to S, which follow the tensors in every attention kernel."""
    mask_strides: tuple
    constants: dict

    @property
    def width(self) -> int:
        """The larger of both head sizes, as a block."""
        return max(self.constants["BLOCK_D"], self.constants["BLOCK_DV"])


def block(width: int) -> int:
    """The power of two that a head of this size is computed in; tl.dot needs 16."""
    return max(16, triton.next_power_of_2(width))


def unit(x: torch.Tensor) -> torch.Tensor:
    """x with neighbouring elements in its last dimension, copied where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def by_head(x: torch.Tensor, batch: int) -> torch.Tensor:
    """A packed (T, H, D) seen as (B, H, T, D): every sequence reads the same memory, from its own start on."""
    return x.transpose(0, 1).unsqueeze(0).expand(batch, -1, -1, -1)


def strides(*tensors: torch.Tensor) -> list[int]:
    """Those of batch, head and row, one tensor after the other."""
    return [s for x in tensors for s in x.stride()[:3]]


def like_heads(x: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """An empty (B, H, L, width) whose memory is (B, L, H, width); x (B, H, L, ...)."""
    batch, heads, length = x.shape[:3]
    return x.new_empty(batch, length, heads, x.shape[3] if width is None else width).transpose(1, 2)


def mask_arguments(mask, shape):
    """The mask as kernels take it, its kind (none, bool, add), and its strides once broadcast to (B, H, L, S)."""
    if mask is None:
        return None, "none", (0, 0, 0, 0)
    mask = mask.expand(shape)
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8), "bool", mask.stride()
    return mask, "add", mask.stride()


def prepare(
    query,
    key,
    value,
    *,
    key_lengths=None,
    mask=None,
    causal=False,
    causal_offset=0,
    dropout_p=0.0,
    scale=1.0,
    seed=None,
    stream=0,
    packed=None,
) -> Call:
    """Arguments as fasttfm.functional.attention's; query, key, value (B, H, ., .), through by_head() when packed."""
    batch, heads, queries, width = query.shape
    keys, value_width = value.shape[2:]
    here = chip(query.device)
    kind = product_kind(query.dtype, here)
    mask, mask_kind, mask_strides = mask_arguments(mask, (batch, heads, queries, keys))
    query_starts = key_starts = None
    if packed is not None:
        query_starts, key_starts, queries, keys = packed
    seed, threshold, keep_scale = dropout_arguments(dropout_p, seed)
    return Call(
        chip=here,
        kind=kind,
        planes=batch * heads,
        queries=queries,
        keys=keys,
        arguments=(
            key_lengths, query_starts, key_starts, mask, seed, stream, threshold, keep_scale, scale, causal_offset,
            heads, queries, keys,
        ),
        mask_strides=mask_strides,
        constants={
            "D": width,
            "DV": value_width,
            "BLOCK_D": block(width),
            "BLOCK_DV": block(value_width),
            "CAUSAL": causal,
            "MASK": mask_kind,
            "PRECISION": "tf32" if kind == "tf32" else "ieee",
            "UPCAST": interpreted() and kind == "bf16",
        },
    )  # fmt: skip
