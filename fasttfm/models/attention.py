"""Multi-head attention on packed projections (Vaswani et al. 2017, section 3.2.2).

Self-attention projects queries, keys and values by one matrix product; cross-attention projects keys and values by one
and queries by another. The attention kernels read the products' outputs in place, and write gradients in that layout.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.cpu.linear import linear
from fasttfm.functional.dropout import NO_DROPOUT, Dropout
from fasttfm.models.cache import AttentionCache
from fasttfm.models.packing import Packing
from fasttfm.models.plain import apply_linear

Lengths = Tensor | Packing | None
"""Tokens before padding in each row, (B,); a Packing for packed sequences; None: no padding."""


class Projected(NamedTuple):
    """Queries, keys and values."""

    joint: Tensor
    """(..., 3, H, D); or (..., 2, H, D), keys and values only."""
    query: Tensor | None = None
    """(..., H, D), if joint has none."""


def project(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """x (..., d) times weight (parts * d', d), as (..., parts, H, D)."""
    return linear(x, weight, bias).unflatten(-1, (-1, heads, weight.shape[1] // heads))


def projected(y: Tensor, memory: Tensor | None, weight: Tensor, bias: Tensor | None, heads: int) -> Projected:
    """Project y (..., d) by in_proj_weight (3 * d, d) and in_proj_bias (3 * d,); keys and values come from memory
    (..., d) if given."""
    if memory is None:
        return Projected(project(y, weight, bias, heads))
    sizes = [weight.shape[1], 2 * weight.shape[1]]
    biases = (None, None) if bias is None else bias.split(sizes)
    query, keys_values = zip(weight.split(sizes), biases)  # one split: autograd adds gradients of slices at full size
    return Projected(project(memory, *keys_values, heads), project(y, *query, heads).squeeze(-3))


def attend(
    heads: Projected, lengths: Lengths = None, memory_lengths: Lengths = None, *, mask: Tensor | None = None,
    causal: bool = False, dropout: Dropout = NO_DROPOUT,
) -> Tensor:  # fmt: skip
    """Concatenated heads (B, L, d) of attention on projections (B, ., ., H, D), packed (1, T, ., H, D).

    lengths: of queries; memory_lengths: of keys; mask: as in F.attention().
    """
    joint, query = heads
    if not isinstance(lengths, Packing):
        assert not isinstance(memory_lengths, Packing)
        return F.packed_qkv_attention(
            joint, query, key_lengths=memory_lengths, mask=mask, causal=causal, **dropout.options()
        )
    assert isinstance(memory_lengths, Packing)
    joint, query = joint[0], None if query is None else query[0]
    covered = len(joint if query is None else query) == lengths.tokens and len(joint) == memory_lengths.tokens
    sequences = lengths.starts, memory_lengths.starts, lengths.longest, memory_lengths.longest
    options = {"covered": covered, "causal": causal, **dropout.options()}
    return F.varlen_packed_qkv_attention(joint, query, *sequences, **options)[None]


class Attention(nn.Module):
    """Multi-head attention with torch.nn's parameters: one matrix for the three input projections."""

    stands_for = "attention"
    batch_first = True

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(
        self, y: Tensor, memory: Tensor | None = None, *, lengths: Lengths = None, memory_lengths: Lengths = None,
        causal: bool = False, dropout: Dropout = NO_DROPOUT,
        cache: AttentionCache | None = None,
    ) -> Tensor:  # fmt: skip
        """Concat(head_1 .. head_H) W^O, (B, L, d), for y (B, L, d) attending to itself or to memory (B, S, d).

        lengths, memory_lengths: of y and memory. cache: y (R, L, d) holds the new positions, which attend to all cached
        ones and causally to each other; R rows may share the memory of B sentences, not read once cached.
        """
        if cache is not None:
            joined = self._cached(y, memory, memory_lengths, cache)
        else:
            keys = lengths if memory is None else memory_lengths
            joined = attend(self._project(y, memory), lengths, keys, causal=causal, dropout=dropout)
        return apply_linear(self.out_proj, joined)

    def weights(
        self, y: Tensor, memory: Tensor | None = None, *, lengths: Tensor | None = None,
        memory_lengths: Tensor | None = None, causal: bool = False, **_: Any,
    ) -> Tensor:  # fmt: skip
        """Attention weights softmax(Q K^T / sqrt(D)), (B, H, L, S), without dropout; arguments of forward()."""
        joint, query = self._project(y, memory)
        if query is None:
            query, joint, memory_lengths = joint[:, :, 0], joint[:, :, 1:], lengths
        key = joint[:, :, 0].transpose(1, 2)
        return F.attention_weights(query.transpose(1, 2), key, key_lengths=memory_lengths, causal=causal)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Project memory (B, S, d) to keys and values (B, H, S, D)."""
        width, bias = memory.shape[-1], self.in_proj_bias
        joint = project(memory, self.in_proj_weight[width:], None if bias is None else bias[width:], self.num_heads)
        keys, values = joint.transpose(1, 3).unbind(2)
        return keys, values

    def _project(self, y: Tensor, memory: Tensor | None = None) -> Projected:
        return projected(y, memory, self.in_proj_weight, self.in_proj_bias, self.num_heads)

    def _cached(self, y: Tensor, memory: Tensor | None, memory_lengths: Lengths, cache: Any) -> Tensor:
        """Concatenated heads for the new positions y (R, L, d) over all cached keys, including their own."""
        assert not isinstance(memory_lengths, Packing)
        if cache.grows:
            query, keys, values = self._project(y).joint.transpose(1, 3).unbind(2)  # (R, H, L, D)
            cache.update(keys, values)
            return cache.attend(query)
        if not cache.complete:
            assert memory is not None
            cache.update(*(x.contiguous() for x in self.keys_values(memory)))
        queries = y.reshape(cache.rows or 0, -1, y.shape[-1])  # rows of a sentence are queries over one memory
        width, bias = y.shape[-1], self.in_proj_bias
        query = project(queries, self.in_proj_weight[:width], None if bias is None else bias[:width], self.num_heads)
        return cache.attend(query.squeeze(-3).transpose(1, 2), memory_lengths).view(y.shape)  # (B, L * R / B, d)
