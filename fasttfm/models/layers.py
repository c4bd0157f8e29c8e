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

    def _heads(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The projection of x (B, L, d) by weight (parts * d, d), one product: (B, L, parts, H, D)."""
        projected = linear(x, weight, bias)
        return projected.view(*x.shape[:2], -1, self.heads, x.shape[2] // self.heads)

    def project_all(self, y: Tensor) -> Tensor:
        """Queries, keys and values (B, L, 3, H, D) of y (B, L, d)."""
        return self._heads(y, self.in_proj_weight, self.in_proj_bias)

    def project_apart(self, y: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (B, L, H, D) of y (B, L, d), keys and values (B, S, 2, H, D) of the encoder's output (B, S, d)."""
        sizes = [y.shape[-1], 2 * y.shape[-1]]
        weights, biases = self.in_proj_weight.split(sizes), self.in_proj_bias.split(sizes)
        return self._heads(y, weights[0], biases[0])[:, :, 0], self._heads(memory, weights[1], biases[1])

    def project_query(self, y: Tensor) -> Tensor:
        """Queries (B, H, L, D) of y (B, L, d)."""
        width = y.shape[-1]
        return self._heads(y, self.in_proj_weight[:width], self.in_proj_bias[:width])[:, :, 0].transpose(1, 2)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Keys and values (B, H, S, D) of the encoder's output (B, S, d)."""
        width = memory.shape[-1]
        joint = self._heads(memory, self.in_proj_weight[width:], self.in_proj_bias[width:])
        return joint.permute(2, 0, 3, 1, 4).unbind(0)

    def attend(
        self,
        joint: Tensor,
        query: Tensor | None,
        dropout: Dropout,
        *,
        key_lengths: Tensor | None = None,
        causal: bool = False,
        weights: list[Tensor] | None = None,
    ) -> Tensor:
        """The joined heads (B, L, d) of joint (B, L, 3, H, D), or of query (B, L, H, D) and joint (B, S, 2, H, D).

        Appends the weights (B, H, L, S) to `weights` where a list is given.
        """
        if weights is not None:
            parts = joint.permute(2, 0, 3, 1, 4)
            first = parts[0] if query is None else query.transpose(1, 2)
            weights.append(F.attention_weights(first, parts[-2], key_lengths=key_lengths, causal=causal))
        return F.joint_attention(
            joint,
            query,
            key_lengths=key_lengths,
            causal=causal,
            dropout_p=dropout.p(self.dropout_p),
            seed=dropout.seed,
            stream=self.stream,
        )

    def step(self, query: Tensor, keys: Tensor, values: Tensor, key_lengths: Tensor | None = None) -> Tensor:
        """The joined heads (B, L, d) of query (B, H, L, D) over cached keys and values (B, H, S, D), at inference."""
        return F.attention(query, keys, values, key_lengths=key_lengths).transpose(1, 2).flatten(2)


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
        dropout: Dropout,
        place: int,
    ) -> tuple[Tensor, Tensor]:
        """Concat(head_1 .. head_H) W^O, heads (B, L, d), joined to the stream."""
        late = _late(projection.bias, heads, norm)
        output = linear(heads, projection.weight, projection.bias if late is None else None)
        return self._add(output, late, stream, norm, dropout, place)

    def _fed_forward(
        self, y: Tensor, stream: Tensor, norm: nn.LayerNorm | None, dropout: Dropout, place: int
    ) -> tuple[Tensor, Tensor]:
        """The feed-forward sub-layer, joined to the stream."""
        p = dropout.p(self.relu_dropout_p)
        late = _late(self.linear2.bias, y, norm)
        weight, bias = self.linear2.weight, self.linear2.bias if late is None else None
        if self.activation == "relu" and frozen(y):  # the ReLU rides in the product, and nothing is kept for a gradient
            hidden = linear(y, self.linear1.weight, self.linear1.bias, relu=True)
            output = linear(hidden, weight, bias)
        elif self.activation == "relu":
            output = F.feed_forward(
                y,
                self.linear1.weight,
                self.linear1.bias,
                weight,
                bias,
                dropout_p=p,
                seed=dropout.seed,
                stream=self.first_stream + 1,
            )
        else:
            hidden = nn.functional.gelu(linear(y, self.linear1.weight, self.linear1.bias))
            output = linear(nn.functional.dropout(hidden, p), weight, bias)
        return self._add(output, late, stream, norm, dropout, place)

    def _add(
        self,
        output: Tensor,
        bias: Tensor | None,
        stream: Tensor,
        norm: nn.LayerNorm | None,
        dropout: Dropout,
        place: int,
    ) -> tuple[Tensor, Tensor]:
        """Joins a sub-layer's output, and the bias it left out, to the stream and normalises: the next (y, stream)."""
        p, seed, number = dropout.p(self.dropout_p), dropout.seed, self.first_stream + 2 + place
        if norm is None:  # the end of a pre-norm stack without a final norm
            stream = F.residual_add(output, stream, dropout_p=p, seed=seed, stream=number)
            return stream, stream
        return F.residual_layer_norm(
            output,
            stream,
            norm.weight,
            norm.bias,
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
        lengths: Tensor | None,
        dropout: Dropout,
        weights: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """y, stream (B, S, d); following: the norm after this layer (pre-norm only). Returns the next (y, stream)."""
        norms = (self.norm2, following) if self.norm_first else (self.norm1, self.norm2)
        joint = self.self_attn.project_all(y)
        heads = self.self_attn.attend(joint, None, dropout, key_lengths=lengths, weights=weights)
        y, stream = self._attended(heads, self.self_attn.out_proj, stream, norms[0], dropout, 0)
        return self._fed_forward(y, stream, norms[1], dropout, 1)


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
        joint = self.self_attn.project_all(y)
        heads = self.self_attn.attend(joint, None, dropout, key_lengths=lengths, causal=True, weights=own)
        y, stream = self._attended(heads, self.self_attn.out_proj, stream, norms[0], dropout, 0)
        query, joint = self.multihead_attn.project_apart(y, memory)
        heads = self.multihead_attn.attend(joint, query, dropout, key_lengths=memory_lengths, weights=cross)
        y, stream = self._attended(heads, self.multihead_attn.out_proj, stream, norms[1], dropout, 1)
        return self._fed_forward(y, stream, norms[2], dropout, 2)

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
        query, key, value = self.self_attn.project_all(y).transpose(1, 3).unbind(2)  # (R, H, 1, D)
        self_keys[:, :, position] = key[:, :, 0]
        self_values[:, :, position] = value[:, :, 0]
        seen = position + 1
        heads = self.self_attn.step(query, self_keys[:, :, :seen], self_values[:, :, :seen])
        y, stream = self._attended(heads, self.self_attn.out_proj, stream, norms[0], none, 0)
        rows, _, width = y.shape
        query = self.multihead_attn.project_query(y.view(cross_keys.shape[0], -1, width))  # (B, H, R / B, D)
        heads = self.multihead_attn.step(query, cross_keys, cross_values, memory_lengths).view(rows, 1, width)
        y, stream = self._attended(heads, self.multihead_attn.out_proj, stream, norms[1], none, 1)
        return self._fed_forward(y, stream, norms[2], none, 2)
