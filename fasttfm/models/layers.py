"""The layers of the encoder and the decoder, on fasttfm's fused operators.

Parameters carry the names that torch.nn.TransformerEncoderLayer and TransformerDecoderLayer give them, so state dicts
travel both ways. Data flows as a pair (y, stream): the next sub-layer reads y, and its output is added to stream.

    pre-norm    stream' = stream + dropout(sublayer(y)),   y' = LayerNorm(stream')    the next sub-layer's norm
    post-norm   y' = LayerNorm(stream + dropout(sublayer(y))),   stream' = y'    its own norm, as in the paper

Both are one call of residual_layer_norm, which is why a pre-norm layer is told the norm that follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.functional.attention_step import cached_attention
from fasttfm.functional.linear import frozen, linear
from fasttfm.models.config import TransformerConfig
from fasttfm.models.packing import Sequences
from fasttfm.models.parameters import Parameters, Projection

Lengths = Tensor | Sequences | None
"""Tokens before padding in each row (B,); sentences one after the other in a single row; None: no padding."""

STREAMS_PER_LAYER = 8  # numbers reserved per layer for the dropout places in it


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass through the model has in common."""

    seed: Tensor | None
    """Of dropout; None at inference."""
    parameters: Parameters
    """How it reads the parameters."""

    def p(self, probability: float) -> float:
        """The probability in force."""
        return 0.0 if self.seed is None else probability


class Attention(nn.Module):
    """Multi-head attention (section 3.2.2) with one matrix for the three input projections."""

    def __init__(self, config: TransformerConfig, *, first_stream: int) -> None:
        super().__init__()
        width = config.d_model
        self.heads = config.heads
        self.dropout_p = config.attention_dropout
        self.stream = first_stream
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def _heads(self, x: Tensor, projection: Projection) -> Tensor:
        """The projection of x (B, L, d) by a weight (parts * d, d), one product: (B, L, parts, H, D)."""
        projected = linear(x, projection.weight, projection.bias)
        return projected.view(*x.shape[:2], -1, self.heads, x.shape[2] // self.heads)

    def project_memory(self, memory: Tensor, projection: Projection) -> Tensor:
        """Keys and values (B, S, 2 * layers, H, D) of the encoder's output (B, S, d)."""
        return self._heads(memory, projection)

    def attend(
        self,
        y: Tensor,
        at: Pass,
        *,
        lengths: Lengths = None,
        causal: bool = False,
        weights: list[Tensor] | None = None,
    ) -> Tensor:
        """The joined heads (B, L, d) of self-attention of y (B, L, d).

        Appends the weights (B, H, L, S) to `weights` where a list is given.
        """
        projection = at.parameters.joint(self)
        joint = self._heads(y, projection)
        biases = None if projection.bias_parts is None else (projection.bias_parts, None)
        return self._attend(joint, None, biases, at, lengths, lengths, causal, weights)

    def attend_memory(
        self,
        y: Tensor,
        memory: Tensor,
        at: Pass,
        *,
        lengths: Lengths = None,
        memory_lengths: Lengths = None,
        weights: list[Tensor] | None = None,
    ) -> Tensor:
        """As attend(), of y (B, L, d) over this layer's keys and values of the encoder's output (B, S, 2, H, D)."""
        projection = at.parameters.query(self)
        query = self._heads(y, projection).squeeze(2)
        memory_parts = at.parameters.memory_parts(self)
        biases = None if memory_parts is None else (memory_parts, projection.bias_parts)
        return self._attend(memory, query, biases, at, lengths, memory_lengths, False, weights)

    def _attend(
        self,
        joint: Tensor,
        query: Tensor | None,
        biases: tuple[Tensor, Tensor | None] | None,
        at: Pass,
        lengths: Lengths,
        key_lengths: Lengths,
        causal: bool,
        weights: list[Tensor] | None,
    ) -> Tensor:
        dropout_p = at.p(self.dropout_p)
        if isinstance(lengths, Sequences) and isinstance(key_lengths, Sequences):
            heads = F.joint_varlen_attention(
                joint.flatten(0, 1),
                None if query is None else query.flatten(0, 1),
                lengths.starts,
                key_lengths.starts,
                lengths.longest,
                key_lengths.longest,
                biases=biases,
                covered=True,
                causal=causal,
                dropout_p=dropout_p,
                seed=at.seed,
                stream=self.stream,
            )
            return heads[None]
        assert not isinstance(key_lengths, Sequences)
        if weights is not None:
            parts = joint.permute(2, 0, 3, 1, 4)
            first = parts[0] if query is None else query.transpose(1, 2)
            weights.append(F.attention_weights(first, parts[-2], key_lengths=key_lengths, causal=causal))
        return F.joint_attention(
            joint,
            query,
            biases=biases,
            key_lengths=key_lengths,
            causal=causal,
            dropout_p=dropout_p,
            seed=at.seed,
            stream=self.stream,
        )

    def project_all(self, y: Tensor, at: Pass) -> tuple[Tensor, ...]:
        """Queries, keys and values (B, H, L, D) of y (B, L, d)."""
        return self._heads(y, at.parameters.joint(self)).transpose(1, 3).unbind(2)

    def project_query(self, y: Tensor, at: Pass) -> Tensor:
        """Queries (B, H, L, D) of y (B, L, d)."""
        return self._heads(y, at.parameters.query(self)).squeeze(2).transpose(1, 2)

    def step(self, query: Tensor, keys: Tensor, values: Tensor, key_lengths: Tensor | None = None) -> Tensor:
        """The joined heads (B, L, d) of query (B, H, L, D) over cached keys and values (B, H, S, D), at inference."""
        return cached_attention(query, keys, values, key_lengths).transpose(1, 2).flatten(2)


class _Layer(nn.Module):
    """What encoder and decoder layers share: the feed-forward sub-layer and the way a sub-layer joins the stream."""

    def __init__(self, config: TransformerConfig, *, first_stream: int) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.activation = config.activation
        self.dropout_p = config.dropout
        self.relu_dropout_p = config.relu_dropout
        self.first_stream = first_stream
        self.linear1 = nn.Linear(config.d_model, config.d_ff)
        self.linear2 = nn.Linear(config.d_ff, config.d_model)

    def _attended(
        self,
        heads: Tensor,
        projection: nn.Linear,
        stream: Tensor,
        norm: nn.LayerNorm | None,
        at: Pass,
        place: int,
    ) -> tuple[Tensor, Tensor]:
        """Concat(head_1 .. head_H) W^O, heads (B, L, d), joined to the stream."""
        bias = at.parameters(projection.bias)
        late = _late(bias, heads, norm)
        output = linear(heads, at.parameters(projection.weight), bias if late is None else None)
        return self._add(output, late, stream, norm, at, place)

    def _fed_forward(
        self, y: Tensor, stream: Tensor, norm: nn.LayerNorm | None, at: Pass, place: int
    ) -> tuple[Tensor, Tensor]:
        """The feed-forward sub-layer, joined to the stream."""
        p, read = at.p(self.relu_dropout_p), at.parameters
        weight1, bias1 = read(self.linear1.weight), read(self.linear1.bias)
        weight2 = read(self.linear2.weight)
        late = _late(read(self.linear2.bias), y, norm)
        bias2 = read(self.linear2.bias) if late is None else None
        if self.activation == "relu" and frozen(y):  # the ReLU rides in the product, and nothing is kept for a gradient
            output = linear(linear(y, weight1, bias1, relu=True), weight2, bias2)
        elif self.activation == "relu":
            output = F.feed_forward(
                y,
                weight1,
                bias1,
                weight2,
                bias2,
                bias1_parts=read.parts_of(self.linear1.bias),
                dropout_p=p,
                seed=at.seed,
                stream=self.first_stream + 1,
            )
        else:
            hidden = nn.functional.gelu(linear(y, weight1, bias1))
            output = linear(nn.functional.dropout(hidden, p), weight2, bias2)
        return self._add(output, late, stream, norm, at, place)

    def _add(
        self,
        output: Tensor,
        bias: Tensor | None,
        stream: Tensor,
        norm: nn.LayerNorm | None,
        at: Pass,
        place: int,
    ) -> tuple[Tensor, Tensor]:
        """Joins a sub-layer's output, and the bias it left out, to the stream and normalises: the next (y, stream)."""
        p, seed, number = at.p(self.dropout_p), at.seed, self.first_stream + 2 + place
        if norm is None:  # the end of a pre-norm stack without a final norm
            stream = F.residual_add(output, stream, dropout_p=p, seed=seed, stream=number)
            return stream, stream
        return F.residual_layer_norm(
            output,
            stream,
            at.parameters(norm.weight),
            at.parameters(norm.bias),
            norm.eps,
            x_bias=bias,
            dropout_p=p,
            seed=seed,
            stream=number,
            post_norm=not self.norm_first,
        )


def _late(bias: Tensor, x: Tensor, norm: nn.LayerNorm | None) -> Tensor | None:
    """The bias of a sub-layer's last product over x, where the norm that follows adds it in passing."""
    return bias if norm is not None and F.adds_bias(x) else None


class EncoderLayer(_Layer):
    """Self-attention, then feed-forward (section 3.1)."""

    def __init__(self, config: TransformerConfig, *, first_stream: int) -> None:
        super().__init__(config, first_stream=first_stream)
        self.self_attn = Attention(config, first_stream=first_stream)
        self.norm1 = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.norm2 = nn.LayerNorm(config.d_model, config.layer_norm_eps)

    def forward(
        self,
        y: Tensor,
        stream: Tensor,
        following: nn.LayerNorm | None,
        lengths: Lengths,
        at: Pass,
        weights: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """y, stream (B, S, d); following: the norm after this layer (pre-norm only). Returns the next (y, stream)."""
        norms = (self.norm2, following) if self.norm_first else (self.norm1, self.norm2)
        heads = self.self_attn.attend(y, at, lengths=lengths, weights=weights)
        y, stream = self._attended(heads, self.self_attn.out_proj, stream, norms[0], at, 0)
        return self._fed_forward(y, stream, norms[1], at, 1)


class DecoderLayer(_Layer):
    """Masked self-attention, attention over the encoder's output, feed-forward (section 3.1)."""

    def __init__(self, config: TransformerConfig, *, first_stream: int) -> None:
        super().__init__(config, first_stream=first_stream)
        self.self_attn = Attention(config, first_stream=first_stream)
        self.multihead_attn = Attention(config, first_stream=first_stream + 5)
        self.norm1 = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.norm2 = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.norm3 = nn.LayerNorm(config.d_model, config.layer_norm_eps)

    def _norms(self, following: nn.LayerNorm | None) -> tuple[nn.LayerNorm | None, ...]:
        return (self.norm2, self.norm3, following) if self.norm_first else (self.norm1, self.norm2, self.norm3)

    def forward(
        self,
        y: Tensor,
        stream: Tensor,
        following: nn.LayerNorm | None,
        lengths: Lengths,
        memory: Tensor,
        memory_lengths: Lengths,
        at: Pass,
        weights: tuple[list[Tensor], list[Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """y, stream (B, L, d), memory (B, S, 2, H, D) for this layer. Returns the next (y, stream)."""
        norms = self._norms(following)
        own, cross = weights if weights is not None else (None, None)
        heads = self.self_attn.attend(y, at, lengths=lengths, causal=True, weights=own)
        y, stream = self._attended(heads, self.self_attn.out_proj, stream, norms[0], at, 0)
        heads = self.multihead_attn.attend_memory(
            y, memory, at, lengths=lengths, memory_lengths=memory_lengths, weights=cross
        )
        y, stream = self._attended(heads, self.multihead_attn.out_proj, stream, norms[1], at, 1)
        return self._fed_forward(y, stream, norms[2], at, 2)

    def step(
        self,
        y: Tensor,
        stream: Tensor,
        following: nn.LayerNorm | None,
        self_keys: Tensor,
        self_values: Tensor,
        position: int,
        cross_keys: Tensor,
        cross_values: Tensor,
        memory_lengths: Tensor | None,
        at: Pass,
    ) -> tuple[Tensor, Tensor]:
        """One token for each of R rows, reading and extending the caches in place.

        y, stream (R, 1, d); self_keys, self_values (R, H, capacity, D), filled up to position; cross_keys, cross_values
        (B, H, S, D), shared by the R / B rows of a sentence, which attend as if they were its queries.
        """
        norms = self._norms(following)
        query, key, value = self.self_attn.project_all(y, at)
        self_keys[:, :, position] = key[:, :, 0]
        self_values[:, :, position] = value[:, :, 0]
        seen = position + 1
        heads = self.self_attn.step(query, self_keys[:, :, :seen], self_values[:, :, :seen])
        y, stream = self._attended(heads, self.self_attn.out_proj, stream, norms[0], at, 0)
        rows, _, width = y.shape
        query = self.multihead_attn.project_query(y.view(cross_keys.shape[0], -1, width), at)  # (B, H, R / B, D)
        heads = self.multihead_attn.step(query, cross_keys, cross_values, memory_lengths).view(rows, 1, width)
        y, stream = self._attended(heads, self.multihead_attn.out_proj, stream, norms[1], at, 1)
        return self._fed_forward(y, stream, norms[2], at, 2)
