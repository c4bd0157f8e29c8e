"""The layers of the encoder and the decoder (Vaswani et al. 2017, section 3.1), and stacks of them.

Parameters carry the names that torch.nn.TransformerEncoderLayer and TransformerDecoderLayer give them, so state dicts
travel both ways. A layer takes x (B, L, d) and returns (B, L, d). A stack of layers that are no more than their classes
computes their sub-layers one after the other; a wrapped, hooked, sharded or derived layer is called and not opened.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fasttfm.config.model import TransformerConfig
from fasttfm.functional.activations import ACTIVATIONS
from fasttfm.models.attention import Attention, Lengths
from fasttfm.models.cache import DecoderCache, LayerCache
from fasttfm.models.dropout import NO_SEED, SITES_PER_LAYER, LayerSeed, Site
from fasttfm.models.feed_forward import feed_forward
from fasttfm.models.layer_plan import AttentionSettings, Batch, Settings
from fasttfm.models.plain import LAYER, NORM, attentions_of, fused_activation, norms_behind, plain_width, untouched
from fasttfm.models.prepared import PreparedStack, may_run, parameters_of, prepare
from fasttfm.models.residual import SubLayer, normalise, through


class _Layer(nn.Module):
    """Base of encoder and decoder layers: attentions, then a feed-forward network, each with a norm."""

    self_attn: Any
    multihead_attn: Any
    norm1: Any
    norm2: Any
    norm3: Any

    def __init__(self, config: TransformerConfig, *attentions: str, causal: bool) -> None:
        super().__init__()
        self.causal = causal
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

    def network(self, norm: nn.LayerNorm, seed: LayerSeed) -> SubLayer:
        """max(0, y W1 + b1) W2 + b2 of y (B, L, d), or with GELU or SiLU in place of max; inside (B, L, d_ff)."""
        inside = seed.dropout(Site.HIDDEN, self.relu_dropout_p)
        network = partial(
            feed_forward, linear1=self.linear1, activation=self.activation, dropout=inside, linear2=self.linear2
        )
        return SubLayer(network, norm, seed.dropout(Site.FEED_FORWARD, self.dropout_p))


class EncoderLayer(_Layer):
    """Self-attention, then feed-forward; with causal, each position sees those up to itself, as in a language model."""

    stands_for = "layer"

    def __init__(self, config: TransformerConfig, *, causal: bool = False) -> None:
        super().__init__(config, "self_attn", causal=causal)

    def sublayers(
        self, lengths: Lengths = None, *, seed: LayerSeed = NO_SEED, cache: LayerCache | None = None
    ) -> list[SubLayer]:
        """See forward()."""
        own = partial(
            self.self_attn, lengths=lengths, causal=self.causal, cache=None if cache is None else cache.target,
            dropout=seed.dropout(Site.SELF_ATTENTION_WEIGHTS, self.attention_dropout_p),
        )  # fmt: skip
        attention = SubLayer(own, self.norm1, seed.dropout(Site.SELF_ATTENTION, self.dropout_p))
        return [attention, self.network(self.norm2, seed)]

    def forward(
        self, x: Tensor, lengths: Lengths = None, *, seed: LayerSeed = NO_SEED, cache: LayerCache | None = None
    ) -> Tensor:
        """x (B, S, d) to the same; lengths: of the rows; cache: x is the new positions after those that it keeps."""
        return through(x, self.sublayers(lengths, seed=seed, cache=cache), self.norm_first)


class DecoderLayer(_Layer):
    """Masked self-attention, attention over the encoder's output, feed-forward."""

    stands_for = "layer"

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, "self_attn", "multihead_attn", causal=True)

    def sublayers(
        self, memory: Tensor | None, lengths: Lengths = None, memory_lengths: Lengths = None, *,
        seed: LayerSeed = NO_SEED, cache: LayerCache | None = None,
    ) -> list[SubLayer]:  # fmt: skip
        """See forward()."""
        p, (self_cache, memory_cache) = self.attention_dropout_p, (None, None) if cache is None else cache
        own = partial(
            self.self_attn, lengths=lengths, causal=self.causal, cache=self_cache,
            dropout=seed.dropout(Site.SELF_ATTENTION_WEIGHTS, p),
        )  # fmt: skip
        cross = partial(
            self.multihead_attn, memory=memory, lengths=lengths, memory_lengths=memory_lengths, cache=memory_cache,
            dropout=seed.dropout(Site.CROSS_ATTENTION_WEIGHTS, p),
        )  # fmt: skip
        return [
            SubLayer(own, self.norm1, seed.dropout(Site.SELF_ATTENTION, self.dropout_p)),
            SubLayer(cross, self.norm2, seed.dropout(Site.CROSS_ATTENTION, self.dropout_p)),
            self.network(self.norm3, seed),
        ]

    def forward(
        self, x: Tensor, memory: Tensor | None, lengths: Lengths = None, memory_lengths: Lengths = None, *,
        seed: LayerSeed = NO_SEED, cache: LayerCache | None = None,
    ) -> Tensor:  # fmt: skip
        """x (B, L, d) to the same; memory (B, S, d), not read once the cache is complete.

        lengths, memory_lengths: of the rows of both; cache: x is the new positions after those that it keeps.
        """
        return through(x, self.sublayers(memory, lengths, memory_lengths, seed=seed, cache=cache), self.norm_first)


class Stack(nn.Module):
    """Layers, one after the other, and for pre-norm the norm after the last of them."""

    stands_for = "stack"
    _prepared: PreparedStack | None = None

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

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_prepared"}

    @property
    def sites(self) -> int:
        """Return the first of the sites that come after."""
        return self.first_site + SITES_PER_LAYER * len(self.layers)

    def forward(self, x: Tensor, *inputs: Any, seed: Tensor | None = None, cache: DecoderCache | None = None) -> Tensor:
        """x (B, L, d) to the same; inputs: what the layers take besides. seed (1,) int64 of all dropouts, or None."""
        layers, norm, again = [*self.layers], self.norm, self.checkpoint_activations and torch.is_grad_enabled()
        decodes = bool(layers) and isinstance(layers[0], DecoderLayer)
        lengths = [*inputs[decodes:], None, None][:2]
        if cache is None and may_run() and (prepared := self._prepare(layers, norm)) is not None:
            memory = inputs[0] if decodes and inputs else None
            if len(inputs) <= 1 + 2 * decodes and decodes == (memory is not None):  # else the layers look at them
                batch = Batch(seed, lengths[0], memory, lengths[1])
                if (dtype := prepared.dtype_of_products(x, batch)) is not None:
                    return prepared.run(x, batch, dtype, first_site=self.first_site, checkpointed=again)
        if isinstance(cache, DecoderCache) and layers and lengths[0] is seed is None:
            y = cache.step(x, None, layers, norm, lengths[1], lambda: all(map(plain_width, layers)))
            if y is not None:
                return y
        given: list[dict[str, Any]] = [
            {"seed": LayerSeed(seed, self.first_site + SITES_PER_LAYER * number)} for number in range(len(layers))
        ]
        if cache is not None:
            given = [{**each, "cache": cache.layer(number)} for number, each in enumerate(given)]
        ours = [untouched(layer, LAYER) for layer in layers]
        if all(ours) and not again and layers and len({layer.norm_first for layer in layers}) == 1:
            sublayers = [part for layer, each in zip(layers, given) for part in layer.sublayers(*inputs, **each)]
            pre_norm = layers[0].norm_first
            x = through(x, sublayers, pre_norm, norm if pre_norm else None)
            return x if pre_norm or norm is None else normalise(x, norm)
        for layer, plain, each in zip(layers, ours, given):
            if again and cache is None:
                # our dropouts are drawn from the seed; those of another layer from torch's generator
                x = checkpoint(layer, x, *inputs, use_reentrant=False, preserve_rng_state=not plain, **each)
            else:
                x = layer(x, *inputs, **each)
        return x if norm is None else normalise(x, norm)

    def _prepare(self, layers: list[Any], norm: Any) -> PreparedStack | None:
        prepared = self._prepared
        if prepared is None or not prepared.holds(layers, norm):
            self._prepared = prepared = _prepared(layers, norm)
        return prepared


def _prepared(layers: list[Any], norm: Any) -> PreparedStack | None:
    """Prepare the layers; None where one of them, or the norm, is more than its class."""
    if not layers or not all(plain_width(layer) and fused_activation(layer.activation) for layer in layers):
        return None
    orders = {layer.norm_first for layer in layers}
    if len(orders) > 1 or not (norm is None or (orders == {True} and untouched(norm, NORM))):
        return None
    norms = [norms_behind(layer, after) for layer, after in zip(layers, [*(each.norm1 for each in layers[1:]), norm])]
    settings = [_settings(*each, is_last=n == len(layers) - 1) for n, each in enumerate(zip(layers, norms))]
    return prepare(layers, norm, settings, [parameters_of(*each) for each in zip(layers, norms)])


def _settings(layer: Any, norms: list[Any], *, is_last: bool) -> Settings:
    p, causal = layer.attention_dropout_p, (layer.causal, False)
    attentions = tuple(AttentionSettings(each.heads, c, p) for each, c in zip(attentions_of(layer), causal))
    return Settings(
        layer.norm_first, fused_activation(layer.activation) or "", attentions, layer.relu_dropout_p,
        (layer.dropout_p,) * len(norms), tuple(None if norm is None else norm.eps for norm in norms), is_last,
    )  # fmt: skip


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
