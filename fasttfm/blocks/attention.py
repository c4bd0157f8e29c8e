"""Multi-head attention (Vaswani et al. 2017, section 3.2.2) on projections as their products wrote them.

Self-attention projects queries, keys and values by one product, attention over a memory its keys and values by one and
its queries by another, and the kernels of attention read, and write the gradients of, what these products wrote.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.blocks.cache import AttentionCache
from fasttfm.blocks.forward_pass import ALONE, Pass
from fasttfm.blocks.inspect import ATTENTION, untouched
from fasttfm.blocks.merging import Projection
from fasttfm.blocks.packing import Packing
from fasttfm.blocks.residual import Output, last_product
from fasttfm.cpu.linear import linear
from fasttfm.cpu.step_cache import AncestorAttention, MemoryAttention
from fasttfm.functional.dropout import NO_DROPOUT, Dropout
from fasttfm.functional.merging import attention_bias_parts
from fasttfm.functional.operator import casts
from fasttfm.functional.subclasses import ordinary

Lengths = Tensor | Packing | None
"""Tokens before padding in each row, (B,); the packing of sequences that lie in a single row; None: no padding."""


class Projected(NamedTuple):
    """Queries, keys and values."""

    joint: Tensor
    """(..., 3, H, D); or (..., 2, H, D), keys and values alone."""
    query: Tensor | None = None
    """(..., H, D), where joint has none."""
    biases: tuple[Tensor, Tensor | None] | None = None
    """What takes the gradients of the biases of joint and of query, where attention sums them."""


def project(x: Tensor, projection: Projection, heads: int) -> Tensor:
    """x (..., d) times a weight (parts * d', d): (..., parts, H, D)."""
    return linear(x, projection.weight, projection.bias).unflatten(-1, (-1, heads, projection.weight.shape[1] // heads))


def projections(weight: Tensor, bias: Tensor | None, *, split: bool, sums: bool) -> list[Projection]:
    """The projections that in_proj_weight (3 * d, d) and in_proj_bias hold: one to queries, keys and values; or, split,
    one to queries and one to keys and values. sums: attention sums the gradient of the bias.
    """
    weights, biases = (weight,), (bias,)
    if split:  # once for both parts, or autograd would add two gradients of the whole
        sizes = [weight.shape[1], 2 * weight.shape[1]]
        weights = weight.split(sizes)
        biases = (None, None) if bias is None else bias.split(sizes)  # type: ignore[assignment]
    if not sums:
        return list(map(Projection, weights, biases))
    return [Projection(w, None if b is None else b.detach(), b) for w, b in zip(weights, biases)]


def sums_bias(bias: Tensor | None, rows: int, keys: int, head_size: int, x: Tensor) -> bool:
    """Return whether attention of that many rows over keys sums the gradient of the bias of x's projection."""
    if bias is None or not bias.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    dtype = torch.get_autocast_dtype(x.device.type) if casts(x) else x.dtype
    return attention_bias_parts(rows, keys, head_size, dtype, x.device) is not None


def dense(
    projected: Projected,
    *,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: Dropout,
) -> Tensor:
    """The joined heads (B, L, d) of attention on projected (B, ., ., H, D)."""
    return F.joint_attention(
        projected.joint,
        projected.query,
        biases=projected.biases,
        key_lengths=key_lengths,
        mask=mask,
        causal=causal,
        **dropout.options(),
    )


def packed(
    projected: Projected, packing: Packing, key_packing: Packing, *, causal: bool = False, dropout: Dropout
) -> Tensor:
    """The joined heads (T, d) of attention on projected (T, ., H, D)."""
    rows = projected.joint.shape[0] if projected.query is None else projected.query.shape[0]
    return F.joint_varlen_attention(
        projected.joint,
        projected.query,
        packing.starts,
        key_packing.starts,
        packing.longest,
        key_packing.longest,
        biases=projected.biases,
        covered=rows == packing.tokens and projected.joint.shape[0] == key_packing.tokens,
        causal=causal,
        **dropout.options(),
    )


def attend(attention: Any, y: Tensor, *inputs: Any, now: Pass = ALONE, **options: Any) -> Output:
    """attention(y, ...) as a sub-layer's output; the arguments are those of Attention.forward()."""
    if now.plain or (untouched(attention, ATTENTION) and attention.takes(y)):
        heads = attention.joined_heads(y, *inputs, now=now, **options)
        return last_product(heads, attention.out_proj, now=now)
    return Output(attention(y, *inputs, **options))


class Attention(nn.Module):
    """Multi-head attention with one matrix for the three input projections; parameters as in torch.nn."""

    stands_for = "attention"

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def takes(self, y: Tensor) -> bool:
        """Return whether the input and the parameters are tensors that the operators take."""
        return ordinary(y, self.in_proj_weight, self.in_proj_bias)

    def forward(self, y: Tensor, memory: Tensor | None = None, **options: Any) -> Tensor:
        """(B, L, d): joined_heads() times W^O, whose arguments these are."""
        return last_product(self.joined_heads(y, memory, **options), self.out_proj, leave_bias=False).value

    def joined_heads(
        self,
        y: Tensor,
        memory: Tensor | None = None,
        *,
        lengths: Lengths = None,
        memory_lengths: Lengths = None,
        causal: bool = False,
        dropout: Dropout = NO_DROPOUT,
        now: Pass = ALONE,
        cache: AttentionCache | AncestorAttention | MemoryAttention | None = None,
    ) -> Tensor:
        """Concat(head_1 .. head_H), (B, L, d), of y (B, L, d) over itself, or over a memory (B, S, d).

        cache: y (R, L, d) is the new positions, which also see all that it keeps, and one another causally; R rows may
        share the memory of B sentences, and once the cache is complete memory is not read.
        """
        if cache is not None:
            return self._cached(y, memory, memory_lengths, cache)
        if memory is None:
            projected, memory_lengths = self._project(y, lengths, now), lengths
        else:
            projected = self._project_memory(y, memory, lengths, memory_lengths, now)
        if isinstance(lengths, Packing):
            assert isinstance(memory_lengths, Packing)
            query = None if projected.query is None else projected.query.flatten(0, 1)
            rows = Projected(projected.joint.flatten(0, 1), query, projected.biases)
            return packed(rows, lengths, memory_lengths, causal=causal, dropout=dropout)[None]
        assert not isinstance(memory_lengths, Packing)
        return dense(projected, key_lengths=memory_lengths, causal=causal, dropout=dropout)

    def weights(
        self, y: Tensor, memory: Tensor | None = None, *, lengths: Tensor | None = None,
        memory_lengths: Tensor | None = None, causal: bool = False, **_: Any,
    ) -> Tensor:  # fmt: skip
        """softmax(Q K^T / sqrt(D)), (B, H, L, S), of the same arguments, without dropout."""
        if memory is None:
            query, key, _unused = self._project(y, lengths).joint.transpose(1, 3).unbind(2)
            return F.attention_weights(query, key, key_lengths=lengths, causal=causal)
        projected = self._project_memory(y, memory, lengths, memory_lengths)
        assert projected.query is not None
        key = projected.joint[:, :, 0].transpose(1, 2)
        return F.attention_weights(projected.query.transpose(1, 2), key, key_lengths=memory_lengths, causal=causal)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, S, D) of a memory (B, S, d)."""
        to_memory = projections(self.in_proj_weight, self.in_proj_bias, split=True, sums=False)[1]
        keys, values = project(memory, to_memory, self.heads).transpose(1, 3).unbind(2)
        return keys, values

    def _sums(self, x: Tensor, lengths: Lengths, keys: Tensor, key_lengths: Lengths) -> bool:
        rows = lengths.batch if isinstance(lengths, Packing) else x.shape[0]
        longest = key_lengths.longest if isinstance(key_lengths, Packing) else keys.shape[1]
        return sums_bias(self.in_proj_bias, rows, longest, x.shape[-1] // self.heads, x)

    def _project(self, y: Tensor, lengths: Lengths, now: Pass = ALONE) -> Projected:
        """Queries, keys and values (B, L, 3, H, D) of y (B, L, d)."""
        if now.weights is not None:
            projection = now.weights.self_projection(self)
        else:
            sums = now.choice != "torch" and self._sums(y, lengths, y, lengths)
            (projection,) = projections(self.in_proj_weight, self.in_proj_bias, split=False, sums=sums)
        bias_sums = projection.bias_sums
        return Projected(project(y, projection, self.heads), None, None if bias_sums is None else (bias_sums, None))

    def _project_memory(
        self, y: Tensor, memory: Tensor, lengths: Lengths, memory_lengths: Lengths, now: Pass = ALONE
    ) -> Projected:
        """Keys and values (B, S, 2, H, D) of a memory (B, S, d), queries (B, L, H, D) of y (B, L, d)."""
        if now.weights is not None:
            to_query = now.weights.query_projection(self)
            joint, memory_sums = now.weights.memory_product(self, memory)
        else:
            sums = now.choice != "torch" and self._sums(y, lengths, memory, memory_lengths)
            to_query, to_memory = projections(self.in_proj_weight, self.in_proj_bias, split=True, sums=sums)
            joint, memory_sums = project(memory, to_memory, self.heads), to_memory.bias_sums
        query = project(y, to_query, self.heads).squeeze(-3)
        return Projected(joint, query, None if memory_sums is None else (memory_sums, to_query.bias_sums))

    def _cached(self, y: Tensor, memory: Tensor | None, memory_lengths: Lengths, cache: Any) -> Tensor:
        """Attention of the new positions y (R, L, d) over all that the cache keeps, theirs included; shapes as
        joined_heads()'s."""
        assert not isinstance(memory_lengths, Packing)
        if isinstance(cache, AncestorAttention | MemoryAttention):
            part = slice(None) if cache.grows else slice(0, y.shape[-1])
            bias = None if self.in_proj_bias is None else self.in_proj_bias[part]
            return cache.attend(linear(y.flatten(0, 1), self.in_proj_weight[part], bias)).view(y.shape)
        if cache.grows:
            query, keys, values = self._project(y, None).joint.transpose(1, 3).unbind(2)  # (R, H, L, D)
            cache.update(keys, values)
            return cache.attend(query)
        if not cache.complete:
            assert memory is not None
            cache.update(*(x.contiguous() for x in self.keys_values(memory)))
        to_query = projections(self.in_proj_weight, self.in_proj_bias, split=True, sums=False)[0]
        queries = y.reshape(cache.rows or 0, -1, y.shape[-1])  # the rows of a sentence are queries to its memory
        query = project(queries, to_query, self.heads).squeeze(-3).transpose(1, 2)  # (B, H, L * R / B, D)
        return cache.attend(query, memory_lengths).view(y.shape)
