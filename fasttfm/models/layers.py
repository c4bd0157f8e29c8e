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
from fasttfm.functional.linear import frozen, linear
from fasttfm.models.config import TransformerConfig

STREAMS_PER_LAYER = 8  # numbers reserved per layer for the dropout places in it


@dataclass(frozen=True, slots=True)
class Dropout:
    """The dropout of one forward pass: its seed, None at inference."""

    seed: Tensor | None

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

    def _split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, L, parts * d) to parts times (B, H, L, D): views, no copy."""
        batch, length, _ = x.shape
        return x.view(batch, length, parts, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def project_all(self, y: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of y (B, L, d), one product."""
        return self._split(linear(y, self.in_proj_weight, self.in_proj_bias), 3)

    def project_query(self, y: Tensor) -> Tensor:
        """Queries (B, H, L, D) of y (B, L, d)."""
        width = y.shape[-1]
        return self._split(linear(y, self.in_proj_weight[:width], self.in_proj_bias[:width]), 1)[0]

    def project_memory(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Keys and values (B, H, S, D) of the encoder's output (B, S, d)."""
        width = memory.shape[-1]
        return self._split(linear(memory, self.in_proj_weight[width:], self.in_proj_bias[width:]), 2)

    def join(self, heads: Tensor) -> Tensor:
        """Concat(head_1 .. head_H) W^O: (B, H, L, D) to (B, L, d)."""
        return linear(heads.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout: Dropout,
        *,
        key_lengths: Tensor | None = None,
        causal: bool = False,
        weights: list[Tensor] | None = None,
    ) -> Tensor:
        """The sub-layer's output (B, L, d); appends the weights (B, H, L, S) to `weights` where a list is given."""
        if weights is not None:
            weights.append(F.attention_weights(query, key, key_lengths=key_lengths, causal=causal))
        return self.join(
            F.attention(
                query,
                key,
                value,
                key_lengths=key_lengths,
                causal=causal,
                dropout_p=dropout.p(self.dropout_p),
                seed=dropout.seed,
                stream=self.stream,
            )
        )


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

    def _feed_forward(self, y: Tensor, dropout: Dropout) -> Tensor:
        p = dropout.p(self.relu_dropout_p)
        if self.activation == "relu" and frozen(y):  # the ReLU rides in the product, and nothing is kept for a gradient
            hidden = linear(y, self.linear1.weight, self.linear1.bias, relu=True)
            return linear(hidden, self.linear2.weight, self.linear2.bias)
        if self.activation == "relu":
            return F.feed_forward(
                y,
                self.linear1.weight,
                self.linear1.bias,
                self.linear2.weight,
                self.linear2.bias,
                dropout_p=p,
                seed=dropout.seed,
                stream=self.first_stream + 1,
            )
        hidden = nn.functional.gelu(self.linear1(y))
        return self.linear2(nn.functional.dropout(hidden, p))

    def _add(
        self, output: Tensor, stream: Tensor, norm: nn.LayerNorm | None, dropout: Dropout, place: int
    ) -> tuple[Tensor, Tensor]:
        """Joins a sub-layer's output to the stream and normalises: (y, stream) for what comes next."""
        p, seed, number = dropout.p(self.dropout_p), dropout.seed, self.first_stream + 2 + place
        if norm is None:  # the end of a pre-norm stack without a final norm
            stream = F.residual_add(output, stream, dropout_p=p, seed=seed, stream=number)
            return stream, stream
        y, stream = F.residual_layer_norm(
            output, stream, norm.weight, norm.bias, norm.eps, dropout_p=p, seed=seed, stream=number
        )
        return (y, stream) if self.norm_first else (y, y)


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
        lengths: Tensor | None,
        dropout: Dropout,
        weights: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """y, stream (B, S, d); following: the norm after this layer (pre-norm only). Returns the next (y, stream)."""
        norms = (self.norm2, following) if self.norm_first else (self.norm1, self.norm2)
        query, key, value = self.self_attn.project_all(y)
        output = self.self_attn.attend(query, key, value, dropout, key_lengths=lengths, weights=weights)
        y, stream = self._add(output, stream, norms[0], dropout, 0)
        return self._add(self._feed_forward(y, dropout), stream, norms[1], dropout, 1)


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
        lengths: Tensor | None,
        memory: Tensor,
        memory_lengths: Tensor | None,
        dropout: Dropout,
        weights: tuple[list[Tensor], list[Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """y, stream (B, L, d), memory (B, S, d). Returns the next (y, stream)."""
        norms = self._norms(following)
        own, cross = weights if weights is not None else (None, None)
        query, key, value = self.self_attn.project_all(y)
        output = self.self_attn.attend(query, key, value, dropout, key_lengths=lengths, causal=True, weights=own)
        y, stream = self._add(output, stream, norms[0], dropout, 0)
        query = self.multihead_attn.project_query(y)
        key, value = self.multihead_attn.project_memory(memory)
        output = self.multihead_attn.attend(query, key, value, dropout, key_lengths=memory_lengths, weights=cross)
        y, stream = self._add(output, stream, norms[1], dropout, 1)
        return self._add(self._feed_forward(y, dropout), stream, norms[2], dropout, 2)

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
    ) -> tuple[Tensor, Tensor]:
        """One token for each of R rows, reading and extending the caches in place.

        y, stream (R, 1, d); self_keys, self_values (R, H, capacity, D), filled up to position; cross_keys, cross_values
        (B, H, S, D), shared by the R / B rows of a sentence, which attend as if they were its queries.
        """
        norms = self._norms(following)
        none = Dropout(None)
        query, key, value = self.self_attn.project_all(y)
        self_keys[:, :, position] = key[:, :, 0]
        self_values[:, :, position] = value[:, :, 0]
        seen = position + 1
        output = self.self_attn.attend(query, self_keys[:, :, :seen], self_values[:, :, :seen], none)
        y, stream = self._add(output, stream, norms[0], none, 0)
        rows, _, width = y.shape
        query = self.multihead_attn.project_query(y.view(cross_keys.shape[0], -1, width))  # (B, H, R / B, D)
        output = self.multihead_attn.attend(query, cross_keys, cross_values, none, key_lengths=memory_lengths)
        y, stream = self._add(output.view(rows, 1, width), stream, norms[1], none, 1)
        return self._add(self._feed_forward(y, none), stream, norms[2], none, 2)
