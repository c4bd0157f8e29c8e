"""The layers of the encoder and the decoder (Vaswani et al. 2017, section 3.1), and stacks of them.

Parameters carry the names that torch.nn.TransformerEncoderLayer and TransformerDecoderLayer give them, so state dicts
travel both ways. A layer takes x (B, L, d) and returns (B, L, d). Its stack hands it the residual stream itself, so
that one layer's last addition and the next one's norm are one pass, unless the layer has hooks or is wrapped, sharded
or derived: then it is called with the tensor.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fasttfm.blocks.attention import Attention, Lengths, attend
from fasttfm.blocks.cache import DecoderCache, LayerCache
from fasttfm.blocks.dropout import Site
from fasttfm.blocks.feed_forward import feed_forward
from fasttfm.blocks.forward_pass import ALONE, Pass
from fasttfm.blocks.inspect import LAYER, plain_width, untouched
from fasttfm.blocks.merging import Weights
from fasttfm.blocks.residual import Output, Residual
from fasttfm.config.model import TransformerConfig
from fasttfm.functional import backends
from fasttfm.functional.activations import ACTIVATIONS
from fasttfm.functional.backends import kernel_route
from fasttfm.functional.subclasses import ordinary

SITES_PER_LAYER = 8
"""Numbers reserved for the dropouts of a layer."""


class _Layer(nn.Module):
    """Base of encoder and decoder layers: attentions, then a feed-forward network, each with a norm."""

    def __init__(self, config: TransformerConfig, *attentions: str) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.activation = ACTIVATIONS[config.activation]
        self.dropout_p = config.dropout
        self.attention_dropout_p = config.attention_dropout
        self.relu_dropout_p = config.relu_dropout
        self.linear1 = nn.Linear(config.d_model, config.d_ff)
        self.linear2 = nn.Linear(config.d_ff, config.d_model)
        for name in attentions:
            setattr(self, name, Attention(config.d_model, config.heads))
        for number in range(1, len(attentions) + 2):
            setattr(self, f"norm{number}", nn.LayerNorm(config.d_model, config.layer_norm_eps))

    def network(self, stream: Residual, now: Pass) -> Callable[[Tensor], Output]:
        """max(0, y W1 + b1) W2 + b2 of y (B, L, d), or with GELU or SiLU in place of max, to be joined to stream."""
        return partial(
            feed_forward, linear1=self.linear1, activation=self.activation, linear2=self.linear2,
            dropout=now.dropout(Site.HIDDEN, self.relu_dropout_p), leave_bias=not stream.ends_bare, now=now,
        )  # fmt: skip


class EncoderLayer(_Layer):
    """Self-attention, then feed-forward; with causal, each position sees those up to itself, as in a language model."""

    stands_for = "layer"

    def __init__(self, config: TransformerConfig, *, causal: bool = False) -> None:
        super().__init__(config, "self_attn")
        self.causal = causal

    def forward(
        self, x: Tensor | Residual, lengths: Lengths = None, *, now: Pass = ALONE, cache: LayerCache | None = None
    ) -> Any:
        """x (B, S, d) to the same; lengths: of the rows; cache: x is the new positions after those that it keeps."""
        drop, site = now.dropout, Site
        stream = Residual.of(x, self.norm_first)
        attention = partial(
            attend, self.self_attn, lengths=lengths, causal=self.causal, cache=None if cache is None else cache.target,
            dropout=drop(site.SELF_ATTENTION_WEIGHTS, self.attention_dropout_p), now=now,
        )  # fmt: skip
        return stream.through(
            (attention, self.norm1, drop(site.SELF_ATTENTION, self.dropout_p)),  # (B, S, d)
            (self.network(stream, now), self.norm2, drop(site.FEED_FORWARD, self.dropout_p)),  # inside (B, S, d_ff)
        ).like(x)


class DecoderLayer(_Layer):
    """Masked self-attention, attention over the encoder's output, feed-forward."""

    stands_for = "layer"

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, "self_attn", "multihead_attn")

    def forward(
        self,
        x: Tensor | Residual,
        memory: Tensor | None,
        lengths: Lengths = None,
        memory_lengths: Lengths = None,
        *,
        now: Pass = ALONE,
        cache: LayerCache | None = None,
    ) -> Any:
        """x (B, L, d) to the same; memory (B, S, d), not read once the cache is complete.

        lengths, memory_lengths: of the rows of both; cache: x is the new positions after those that it keeps.
        """
        drop, site, p = now.dropout, Site, self.attention_dropout_p
        self_cache, memory_cache = (None, None) if cache is None else cache
        stream = Residual.of(x, self.norm_first)
        own = partial(
            attend, self.self_attn, lengths=lengths, causal=True, cache=self_cache,
            dropout=drop(site.SELF_ATTENTION_WEIGHTS, p), now=now,
        )  # fmt: skip
        cross = partial(
            attend, self.multihead_attn, memory=memory, lengths=lengths, memory_lengths=memory_lengths,
            cache=memory_cache, dropout=drop(site.CROSS_ATTENTION_WEIGHTS, p), now=now,
        )  # fmt: skip
        return stream.through(
            (own, self.norm1, drop(site.SELF_ATTENTION, self.dropout_p)),  # (B, L, d)
            (cross, self.norm2, drop(site.CROSS_ATTENTION, self.dropout_p)),  # (B, L, d)
            (self.network(stream, now), self.norm3, drop(site.FEED_FORWARD, self.dropout_p)),  # inside (B, L, d_ff)
        ).like(x)


class Stack(nn.Module):
    """Layers, one after the other, and for pre-norm the norm after the last of them."""

    stands_for = "stack"

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

    def forward(
        self,
        x: Tensor,
        *inputs: Any,
        seed: Tensor | None = None,
        weights: Weights | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """x (B, L, d) to the same; inputs: what the layers take besides.

        seed (1,) int64 of all dropouts, or None; weights: what is read in the place of parameters.
        """
        stream: Any = x
        choice = backends.current if kernel_route(backends.current, x) == "triton" else "torch"
        is_plain = ordinary(x)  # and what a layer hands on, unless it is more than its class
        for number, layer in enumerate(self.layers):
            is_plain = is_plain and plain_width(layer) == x.shape[-1]
            now = Pass(seed, self.first_site + SITES_PER_LAYER * number, is_plain, choice, weights)
            options: dict[str, Any] = {"now": now}
            if cache is not None:
                options["cache"] = cache.layer(number)
            ours = is_plain or untouched(layer, LAYER)
            if ours:
                ends_bare = layer.norm_first and self.norm is None and number == len(self.layers) - 1
                stream = Residual.of(stream, layer.norm_first)._replace(ends_bare=ends_bare, now=now)
            elif isinstance(stream, Residual):
                stream = stream.value()
            if self.checkpoint_activations and cache is None and torch.is_grad_enabled():
                # our dropouts are drawn from the seed; those of another layer from torch's generator
                stream = checkpoint(layer, stream, *inputs, use_reentrant=False, preserve_rng_state=not ours, **options)
            else:
                stream = layer(stream, *inputs, **options)
        if isinstance(stream, Residual):
            return stream._replace(now=Pass(choice=choice, weights=weights)).value(self.norm)
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
