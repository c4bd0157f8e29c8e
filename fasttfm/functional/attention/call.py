"""The arguments of an attention call, views of them as heads, and the layouts of heads, outputs and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.functional.operator import Mask, Size, Whole

Window = tuple[int | None, int | None]
"""Keys before and past the diagonal that a query may attend, None for no bound."""

LARGEST = 1e30
"""Largest magnitude of a scale, a soft cap and a slope; sinks are clamped to it. Times any distance it fits float32."""
KERNELS = ("short", "flash")
SAVING_WEIGHTS = ("explicit", "softmax")
"""Backends that save the weights (B, H, L, S) for the backward pass; others save their log-sum-exp, (B, H, L) or
(H, Tq)."""


class Options(NamedTuple):
    """All arguments but query, key and value, as the kernels name them.

    Query i sees keys up to i + causal_offset if causal, and from i + causal_offset - window on if window is not -1.
    """

    key_lengths: Whole | None
    mask: Mask | None
    causal: bool
    causal_offset: Size
    dropout_p: float
    scale: float
    seed: Whole | None
    site: int
    offsets: Whole | None = None
    """(B,), added to causal_offset per batch row."""
    window: Size = -1
    softcap: float = 0.0
    slopes: Tensor | None = None
    """ALiBi's, (B, H) or (1, H) float32; float64 if query is."""
    past: Size = 0
    """Keys past the diagonal that causal_offset includes; ALiBi's distances start at the diagonal."""
    sinks: Tensor | None = None
    """(H,)"""


class Sequences(NamedTuple):
    """Boundaries of packed sequences."""

    cu_seqlens_q: Whole
    """(B + 1,) int32 or int64: first query of each sequence, and the end of the last."""
    cu_seqlens_k: Whole
    """The same for keys."""
    max_seqlen_q: Size
    """Upper bound of the queries of a sequence."""
    max_seqlen_k: Size
    """Upper bound of the keys of a sequence."""


class Call(NamedTuple):
    """A call of the operator; includes all fields of Options."""

    query: Tensor
    """Queries, or packed queries, keys and values."""
    key: Tensor | None
    """Keys, or packed keys and values."""
    value: Tensor | None
    key_lengths: Whole | None
    cu_seqlens_q: Whole | None
    """As in Sequences; None for a padded batch."""
    cu_seqlens_k: Whole | None
    mask: Mask | None
    offsets: Whole | None
    slopes: Tensor | None
    sinks: Tensor | None
    seed: Whole | None
    max_seqlen_q: Size
    max_seqlen_k: Size
    causal: bool
    causal_offset: Size
    window: Size
    softcap: float
    past: Size
    dropout_p: float
    scale: float
    site: int
    covered: bool
    """Whether packed sequences cover all rows."""
    only_weights: bool
    """Whether the output is the weights after dropout; value is then ignored."""
    backend: str

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def sequences(self) -> Sequences | None:
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return None
        return Sequences(self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k)

    @property
    def batch(self) -> Size:
        return self.query.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def apart(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of queries, keys and values."""
        if self.key is None:
            return self.query.unbind(-3)  # type: ignore[return-value]
        return self.query, *(self.key.unbind(-3) if self.value is None else (self.key, self.value))  # type: ignore[return-value]

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views (B, H, ., D) of queries, keys and values; each batch row of packed ones shows all sequences."""
        return tuple(self.by_head(x) for x in self.apart)  # type: ignore[return-value]

    def by_head(self, x: Tensor) -> Tensor:
        """One of self.apart as (B, H, ., D)."""
        if self.packed:
            return by_head(x, self.batch)
        return x if self.value is not None else x.transpose(1, 2)

    def output_by_head(self, x: Tensor, heads: Size) -> Tensor:
        """The output or its gradient as (B, H, L, Dv)."""
        if self.value is None:
            x = x.unflatten(-1, (heads, -1))
        return self.by_head(x)

    @property
    def sizes(self) -> tuple[Size, Size, Size, Size]:
        """(B, H, L, S); L and S of packed sequences are those of the longest."""
        query, key, _ = self.apart
        if self.packed:
            return self.batch, query.shape[1], self.max_seqlen_q, self.max_seqlen_k
        batch, heads, queries, _ = self.by_head(query).shape
        return batch, heads, queries, key.shape[2 if self.value is not None else 1]


class Saved(NamedTuple):
    call: Call
    output: Tensor | None
    """None if the weights are saved and there are no sinks."""
    saved: Tensor
    """The weights before dropout, or the log-sum-exp; see SAVING_WEIGHTS."""
    kept: Tensor | None
    """explicit: the weights after dropout; fused: the addend of the scores; blocks: the weights of short rows before
    dropout."""
    lse: Tensor | None
    """The log-sum-exp in addition to weights, if there are sinks."""


def is_plain(options: Options | Call) -> bool:
    """Return whether there are no offsets by batch row, window, soft cap, slopes or sinks."""
    without = options.offsets is options.slopes is options.sinks is None
    return without and options.window == -1 and options.softcap == 0.0


def is_empty(call: Call) -> bool:
    """Return whether there is nothing to attend."""
    return not (call.query.numel() and (call.key is None or call.key.numel()))


def output_layout(call: Call) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """Shape and strides of the output: heads adjacent within a token's row, sequence-first if the queries are."""
    query, _, value = call.apart
    heads, width = query.shape[1 if call.value is not None and not call.packed else -2], value.shape[-1]
    row = heads * width
    if call.packed:
        rows = query.shape[0]
        return ((rows, row), (row, 1)) if call.value is None else ((rows, heads, width), (row, width, 1))
    if call.only_weights:
        batch, heads, length, keys = call.sizes
        return (batch, heads, length, keys), (heads * length * keys, length * keys, keys, 1)
    if call.value is not None:
        return _strides_of_heads_last(query, width)
    batch, length = query.shape[:2]
    first = call.backend in (*KERNELS, "blocks") and query.stride(0) < query.stride(1)
    return (batch, length, row), (row, batch * row, 1) if first else (length * row, row, 1)


def _strides_of_heads_last(x: Tensor, width: Size) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """Shape (B, H, L, width), with the strides of (B, L, H, width), for x (B, H, L, .)."""
    batch, heads, length = x.shape[:3]
    return (batch, heads, length, width), (length * heads * width, width, heads * width, 1)


def gradient_memory(call: Call) -> Callable[..., tuple[Any, ...]]:
    """Return an allocator of the gradients of query, key and value: of a call, and a buffer for the key's or None.

    The gradient of a packed projection has its layout, if its last dimension has stride 1.
    """
    if call.value is not None and not call.packed:
        q, k, v = (_strides_of_heads_last(x, x.shape[3]) for x in call.apart)
        return lambda call, key: (
            call.query.new_empty_strided(*q), call.query.new_empty_strided(*k), call.query.new_empty_strided(*v)
        )  # fmt: skip
    reached = call.covered and not is_empty(call)
    make = torch.empty_like if not call.packed or reached else torch.zeros_like  # zero outside the sequences
    preserved = [call.value is None and x is not None and x.stride(-1) == 1 for x in call[:3]]
    formats = [torch.preserve_format if each else torch.contiguous_format for each in preserved]
    count = sum(x is not None for x in call[:3])

    def memory(call: Call, key: Tensor | None) -> tuple[Any, ...]:
        query = make(call.query, memory_format=formats[0])
        if count == 1:
            return query, None, None
        if key is None:
            key = make(call.key, memory_format=formats[1])  # type: ignore[arg-type]
        elif make is torch.zeros_like:
            key.zero_()
        return query, key, None if count == 2 else make(call.value, memory_format=formats[2])  # type: ignore[arg-type]

    return memory


def sinks_gradient(saved: Saved, grad: Tensor) -> Tensor | None:
    """The gradient of the sinks (H,), if there are any, from that of the output.

    A sink takes its weight, at most 1, from the other weights of its row.
    """
    call, output = saved.call, saved.output
    sinks, lse = call.sinks, saved.lse if call.backend in SAVING_WEIGHTS else saved.saved
    if sinks is None or output is None or lse is None:
        return None
    if call.packed:
        grad, output = grad.transpose(0, 1), output.transpose(0, 1)
    precise = lse.dtype
    weight = torch.exp2((sinks.to(precise)[:, None] * math.log2(math.e) - lse).clamp(max=0.0))
    gradient = -weight * (grad.to(precise) * output.to(precise)).sum(-1)
    return gradient.sum(-1).view(-1, sinks.shape[0]).sum(0).to(sinks.dtype)


# -------------------------------------------------------------------------------------------------- layouts of heads


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
