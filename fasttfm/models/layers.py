"""The layers of the encoder and the decoder (Vaswani et al. 2017, section 3.1), and stacks of them.

Parameters carry the names that torch.nn.TransformerEncoderLayer and TransformerDecoderLayer give them, so state dicts
travel both ways. A layer takes x (B, L, d) and returns (B, L, d). Its stack hands it the residual stream itself, so
that one layer's last addition and the next one's norm are one pass, unless the layer has hooks or is wrapped, sharded
or derived: then it is called with the tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fasttfm.blocks.attention import Attention, Lengths, attend
from fasttfm.blocks.cache import DecoderCache, LayerCache
from fasttfm.blocks.dropout import NO_DROPOUTS, DecoderSite, Dropouts, EncoderSite
from fasttfm.blocks.feed_forward import feed_forward
from fasttfm.blocks.inspect import LAYER, untouched
from fasttfm.blocks.residual import Output, Residual
from fasttfm.config.model import TransformerConfig
from fasttfm.functional.activations import ACTIVATIONS
from fasttfm.functional.dropout import Dropout

SITES_PER_LAYER = 8
"""Numbers reserved for the dropouts of a layer."""


class _Layer(nn.Module):
    """Base of encoder and decoder layers."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.activation = ACTIVATIONS[config.activation]
        self.dropout_p = config.dropout
        self.attention_dropout_p = config.attention_dropout
        self.relu_dropout_p = config.relu_dropout
        self.linear1 = nn.Linear(config.d_model, config.d_ff)
        self.linear2 = nn.Linear(config.d_ff, config.d_model)

    def feed_forward(self, y: Tensor, dropout: Dropout, stream: Residual) -> Output:
        """max(0, y W1 + b1) W2 + b2, or with GELU or SiLU in the place of max, to be joined to the stream."""
        leave_bias = not stream.ends_bare
        return feed_forward(y, self.linear1, self.activation, dropout, self.linear2, leave_bias=leave_bias)


class EncoderLayer(_Layer):
    """Self-attention, then feed-forward; with causal, each position sees those up to itself, as in a language model."""

    stands_for = "layer"

    def __init__(self, config: TransformerConfig, *, causal: bool = False) -> None:
        super().__init__(config)
        self.causal = causal
        self.self_attn = Attention(config.d_model, config.heads)
        self.norm1 = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.norm2 = nn.LayerNorm(config.d_model, config.layer_norm_eps)

    def forward(
        self,
        x: Tensor | Residual,
        lengths: Lengths = None,
        *,
        dropouts: Dropouts = NO_DROPOUTS,
        cache: LayerCache | None = None,
    ) -> Any:
        """x (B, S, d) to the same; lengths: of the rows; cache: x is the new positions after those that it keeps."""
        drop, site = dropouts, EncoderSite
        weights_dropout = drop(site.ATTENTION_WEIGHTS, self.attention_dropout_p)
        self_cache = None if cache is None else cache.target
        stream = Residual.of(x, self.norm_first)

        y, stream = stream.branch(self.norm1)  # (B, S, d)
        z = attend(
            self.self_attn, y, lengths=lengths, causal=self.causal, dropout=weights_dropout, cache=self_cache
        )  # (B, S, d)
        stream = stream.join(z, self.norm1, drop(site.ATTENTION, self.dropout_p))

        y, stream = stream.branch(self.norm2)  # (B, S, d)
        z = self.feed_forward(y, drop(site.HIDDEN, self.relu_dropout_p), stream)  # (B, S, d), inside (B, S, d_ff)
        return stream.join(z, self.norm2, drop(site.FEED_FORWARD, self.dropout_p)).like(x)


class DecoderLayer(_Layer):
    """Masked self-attention, attention over the encoder's output, feed-forward."""

    stands_for = "layer"

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.self_attn = Attention(config.d_model, config.heads)
        self.multihead_attn = Attention(config.d_model, config.heads)
        self.norm1 = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.norm2 = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.norm3 = nn.LayerNorm(config.d_model, config.layer_norm_eps)

    def forward(
        self,
        x: Tensor | Residual,
        memory: Tensor | None,
        lengths: Lengths = None,
        memory_lengths: Lengths = None,
        *,
        dropouts: Dropouts = NO_DROPOUTS,
        cache: LayerCache | None = None,
    ) -> Any:
        """x (B, L, d) to the same; memory (B, S, d), not read once the cache is complete.

        lengths, memory_lengths: of the rows of both; cache: x is the new positions after those that it keeps.
        """
        drop, site = dropouts, DecoderSite
        self_dropout = drop(site.SELF_ATTENTION_WEIGHTS, self.attention_dropout_p)
        cross_dropout = drop(site.CROSS_ATTENTION_WEIGHTS, self.attention_dropout_p)
        self_cache, memory_cache = (None, None) if cache is None else cache
        stream = Residual.of(x, self.norm_first)

        y, stream = stream.branch(self.norm1)  # (B, L, d)
        z = attend(self.self_attn, y, lengths=lengths, causal=True, dropout=self_dropout, cache=self_cache)  # (B, L, d)
        stream = stream.join(z, self.norm1, drop(site.SELF_ATTENTION, self.dropout_p))

        y, stream = stream.branch(self.norm2)  # (B, L, d)
        z = attend(
            self.multihead_attn, y, memory, lengths=lengths, memory_lengths=memory_lengths, dropout=cross_dropout,
            cache=memory_cache,
        )  # (B, L, d)  # fmt: skip
        stream = stream.join(z, self.norm2, drop(site.CROSS_ATTENTION, self.dropout_p))

        y, stream = stream.branch(self.norm3)  # (B, L, d)
        z = self.feed_forward(y, drop(site.HIDDEN, self.relu_dropout_p), stream)  # (B, L, d), inside (B, L, d_ff)
        return stream.join(z, self.norm3, drop(site.FEED_FORWARD, self.dropout_p)).like(x)


class Stack(nn.Module):
    """Layers, one after the other, and for pre-norm the norm after the last of them."""

    def __init__(
        self, layers: list[Any], norm: nn.LayerNorm | nn.RMSNorm | None = None, *, first_site: int = SITES_PER_LAYER
    ) -> None:
        """layers: of this module, or with their forward's signature; one may occur several times and is then shared.

        first_site: of the dropouts of the first layer; a model's own come before it.
        """
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)
        self.norm = norm
        self.first_site = first_site
        self.checkpoint_activations = False
        """Whether a layer keeps nothing but what it is given and is computed again in the backward pass."""

    @property
    def sites(self) -> int:
        """Return the first of the sites that come after."""
        return self.first_site + SITES_PER_LAYER * len(self.layers)

    def forward(self, x: Tensor, *inputs: Any, seed: Tensor | None = None, cache: DecoderCache | None = None) -> Tensor:
        """x (B, L, d) to the same; inputs: what the layers take besides. seed (1,) int64 of all dropouts, or None."""
        stream: Any = x
        for number, layer in enumerate(self.layers):
            options: dict[str, Any] = {"dropouts": Dropouts(seed, self.first_site + SITES_PER_LAYER * number)}
            if cache is not None:
                options["cache"] = cache.layer(number)
            if untouched(layer, LAYER):
                last = number == len(self.layers) - 1
                ends_bare = layer.norm_first and last and self.norm is None
                stream = Residual.of(stream, layer.norm_first)._replace(ends_bare=ends_bare)
            elif isinstance(stream, Residual):
                stream = stream.value()
            if self.checkpoint_activations and cache is None and torch.is_grad_enabled():
                # our dropouts are drawn from the seed; those of another layer from torch's generator
                others = not untouched(layer, LAYER)
                stream = checkpoint(layer, stream, *inputs, use_reentrant=False, preserve_rng_state=others, **options)
            else:
                stream = layer(stream, *inputs, **options)
        if isinstance(stream, Residual):
            return stream.value(self.norm)
        return stream if self.norm is None else self.norm(stream)


@torch.no_grad()
def reset_parameters(model: nn.Module, std: float) -> None:
    """Draws fresh weights: normal(0, std) matrices, biases 0, norms 1."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, Attention):
            nn.init.normal_(module.in_proj_weight, std=std)
            nn.init.zeros_(module.in_proj_bias)
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
