"""A call of attention: what it is given, seen as heads, and where its outputs and gradients lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.functional.attention import routes
from fasttfm.functional.attention.arguments import Options, Sequences
from fasttfm.functional.attention.layout import by_head
from fasttfm.functional.operator import Mask, Size, Whole


class Call(NamedTuple):
    query: Tensor
    """Queries, or queries, keys and values."""
    key: Tensor | None
    """Keys, or keys and values."""
    value: Tensor | None
    query_bias: Tensor | None
    """What was added to query, and takes its gradient from here, (N,)."""
    key_bias: Tensor | None
    key_lengths: Whole | None
    cu_seqlens_q: Whole | None
    """(B + 1,): where each sequence begins among the queries, and the end of the last."""
    cu_seqlens_k: Whole | None
    mask: Mask | None
    offsets: Whole | None
    slopes: Tensor | None
    sinks: Tensor | None
    seed: Whole | None
    max_seqlen_q: Size
    """No sequence has more queries; 0 where these are not packed."""
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
    """Whether packed sequences reach to the last row."""
    route: str

    @property
    def options(self) -> Options:
        """All but the heads and where they are."""
        return Options(
            self.key_lengths, self.mask, self.causal, self.causal_offset, self.dropout_p, self.scale, self.seed,
            self.site, self.offsets, self.window, self.softcap, self.slopes, self.past, self.sinks,
        )  # fmt: skip

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
        """Queries, keys and values, as views."""
        if self.key is None:
            return self.query.unbind(-3)  # type: ignore[return-value]
        return self.query, *(self.key.unbind(-3) if self.value is None else (self.key, self.value))  # type: ignore[return-value]

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, ., D), as views; each row of packed ones shows all sequences."""
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


class Saved(NamedTuple):
    call: Call
    output: Tensor | None
    """None where the weights are saved and there are no sinks."""
    saved: Tensor
    """The weights before dropout or the log-sum-exp, (B, H, L) or (H, Tq), as routes.saves_weights() says."""
    kept: Tensor | None
    """What routes.forward() gives beside: weights padded, the log-sum-exp."""


def is_empty(call: Call) -> bool:
    """Return whether there is nothing to attend."""
    return not (call.query.numel() and (call.key is None or call.key.numel()))


def key_count(call: Call) -> Size:
    if call.key is None:
        return call.query.shape[1]
    return call.key.shape[1 if call.value is None else 2]


def has_elements(shape: Sequence[Size]) -> bool:
    """Return whether a tensor of this shape has elements."""
    return all(size > 0 for size in shape)


def output_layout(call: Call) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """Shape and strides of the output: heads beside one another in a token's row, positions first where the queries
    have them first."""
    query, _, value = call.apart
    heads, width = query.shape[1 if call.value is not None and not call.packed else -2], value.shape[-1]
    row = heads * width
    if call.packed:
        rows = query.shape[0]
        return ((rows, row), (row, 1)) if call.value is None else ((rows, heads, width), (row, width, 1))
    if call.value is not None:
        batch, _, length, _ = query.shape
        return (batch, heads, length, width), (length * row, width, row, 1)
    batch, length = query.shape[:2]
    first = routes.writes_where_told(call.route) and query.stride(0) < query.stride(1)
    return (batch, length, row), (row, batch * row, 1) if first else (length * row, row, 1)


def gradient_memory(call: Call) -> Callable[[Call], tuple[Any, ...]]:
    """A function of such calls to memory for the gradients of query, key and value: of projections laid out as they
    are, where the numbers of a head's row are neighbours, as attention writes them."""
    if call.value is not None and not call.packed:
        q, k, v = (_heads_last(x) for x in (call.query, call.key, call.value))  # type: ignore[arg-type]
        return lambda call: (
            call.query.new_empty_strided(*q), call.query.new_empty_strided(*k), call.query.new_empty_strided(*v)
        )  # fmt: skip
    reached = call.covered and not is_empty(call)
    make = torch.empty_like if not call.packed or reached else torch.zeros_like  # zero where no sequence reaches
    kept = [call.value is None and x is not None and x.stride(-1) == 1 for x in call[:3]]
    formats = [torch.preserve_format if each else torch.contiguous_format for each in kept]
    count = sum(x is not None for x in call[:3])

    def memory(call: Call) -> tuple[Any, ...]:
        query = make(call.query, memory_format=formats[0])
        if count == 1:
            return query, None, None
        key = make(call.key, memory_format=formats[1])  # type: ignore[arg-type]
        return query, key, None if count == 2 else make(call.value, memory_format=formats[2])  # type: ignore[arg-type]

    return memory


def _heads_last(x: Tensor) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """Shape of x (B, H, L, D), and the strides of (B, L, H, D)."""
    batch, heads, length, width = x.shape
    return (batch, heads, length, width), (length * heads * width, width, heads * width, 1)


def sinks_gradient(
    call: Call, grad: Tensor, output: Tensor | None, saved: Tensor, kept: Tensor | None
) -> Tensor | None:
    """The gradient of the sinks (H,), if there are any, from that of the output and what the forward pass gave: a sink
    takes its weight, at most 1, from all others of a row."""
    sinks = call.sinks
    if sinks is None or output is None:
        return None
    if call.packed:
        grad, output = grad.transpose(0, 1), output.transpose(0, 1)
    lse = kept if routes.saves_weights(call.route) else saved
    assert lse is not None
    weight = torch.exp2((sinks.float()[:, None] * math.log2(math.e) - lse).clamp(max=0.0))
    gradient = -weight * (grad.float() * output.float()).sum(-1)
    return gradient.sum(-1).view(-1, sinks.shape[0]).sum(0).to(sinks.dtype)
