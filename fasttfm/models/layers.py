"""The layers of the encoder and the decoder (Vaswani et al. 2017, section 3.1).

Parameters carry the names that torch.nn.TransformerEncoderLayer and TransformerDecoderLayer give them, so state dicts
travel both ways. A layer takes x (B, L, d) and returns (B, L, d).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.cpu.linear import frozen, linear
from fasttfm.functional.activations import ACTIVATIONS
from fasttfm.functional.dropout import Dropout
from fasttfm.models.attention import Attention, Lengths
from fasttfm.models.cache import LayerCache
from fasttfm.models.plain import apply_linear, fused_activation, norms_of, opens
from fasttfm.models.residual import NO_SEED, OUTPUT_SITES, WEIGHT_SITES, LayerSeed, Site, SubLayer, through

if TYPE_CHECKING:
    from fasttfm.config.model import TransformerConfig


def feed_forward(
    x: Tensor, linear1: Any, activation: Callable[[Tensor], Tensor], dropout: Dropout | nn.Module, linear2: Any
) -> Tensor:
    """linear2(dropout(activation(linear1(x)))), x (..., N), inside (..., F): the position-wise feed-forward network
    (Vaswani et al. 2017, equation 2); one operator where the activation is ReLU or GELU.

    A linear layer or a dropout that is more than its class is called.
    """
    opened = opens(linear1, x)
    fused = fused_activation(activation) if opened else None
    if fused and isinstance(dropout, Dropout) and opens(linear2) and not frozen(x):
        return F.feed_forward(
            x, linear1.weight, linear1.bias, linear2.weight, linear2.bias, activation=fused, **dropout.options()
        )
    rides = fused == "relu" and frozen(x)  # the ReLU in the product
    hidden = linear(x, linear1.weight, linear1.bias, relu=rides) if opened else linear1(x)
    hidden = hidden if rides else activation(hidden)
    if not isinstance(dropout, Dropout):
        hidden = dropout(hidden)
    elif dropout.dropout_p:
        hidden = nn.functional.dropout(hidden, dropout.dropout_p)
    return apply_linear(linear2, hidden)


class Layer(nn.Module):
    """Base of all layers, fasttfm.nn's too: attentions, then a feed-forward network, each with a norm."""

    self_attn: Any
    multihead_attn: Any
    norm1: Any
    norm2: Any
    norm3: Any
    linear1: Any
    linear2: Any
    activation: Any
    norm_first: bool
    causal = False
    """Whether self-attention sees no later position, unless a call says it."""

    def dropouts(self) -> list[Any]:
        """Probabilities, or modules: of each attention's weights, inside the network, of each sub-layer's output."""
        raise NotImplementedError

    def with_network(self, attentions: Sequence[Callable[[Tensor], Tensor]], seed: LayerSeed) -> list[SubLayer]:
        """The sub-layers: these attentions, then the feed-forward network."""
        hidden, *outputs = self.dropouts()[len(attentions) :]
        network = partial(
            feed_forward, linear1=self.linear1, activation=self.activation, linear2=self.linear2,
            dropout=seed.dropout(Site.HIDDEN, hidden),
        )  # fmt: skip
        sites = (*OUTPUT_SITES[: len(attentions)], Site.FEED_FORWARD)
        computed: list[Any] = [*attentions, network]
        given = zip(computed, norms_of(self), map(seed.dropout, sites, outputs))
        return [SubLayer(*each) for each in given]


class _PaperLayer(Layer):
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

    def dropouts(self) -> list[Any]:
        """See Layer."""
        count = len(norms_of(self))
        return [*[self.attention_dropout_p] * (count - 1), self.relu_dropout_p, *[self.dropout_p] * count]


class EncoderLayer(_PaperLayer):
    """Self-attention, then feed-forward; with causal, each position sees those up to itself, as in a language model."""

    stands_for = "layer"

    def __init__(self, config: TransformerConfig, *, causal: bool = False) -> None:
        super().__init__(config, "self_attn")
        self.causal = causal

    def sublayers(
        self, lengths: Lengths = None, *, seed: LayerSeed = NO_SEED, cache: LayerCache | None = None
    ) -> list[SubLayer]:
        """See forward()."""
        dropout = seed.dropout(Site.SELF_ATTENTION_WEIGHTS, self.attention_dropout_p)
        kept = None if cache is None else cache.target
        own = partial(self.self_attn, lengths=lengths, causal=self.causal, cache=kept, dropout=dropout)
        return self.with_network([own], seed)

    def forward(
        self, x: Tensor, lengths: Lengths = None, *, seed: LayerSeed = NO_SEED, cache: LayerCache | None = None
    ) -> Tensor:
        """x (B, S, d) to the same; lengths: of the rows; cache: x is the new positions after those that it keeps."""
        return through(x, self.sublayers(lengths, seed=seed, cache=cache), self.norm_first)


class DecoderLayer(_PaperLayer):
    """Masked self-attention, attention over the encoder's output, feed-forward."""

    stands_for = "layer"
    causal = True

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, "self_attn", "multihead_attn")

    def sublayers(
        self, memory: Tensor | None, lengths: Lengths = None, memory_lengths: Lengths = None, *,
        seed: LayerSeed = NO_SEED, cache: LayerCache | None = None,
    ) -> list[SubLayer]:  # fmt: skip
        """See forward()."""
        p, (self_cache, memory_cache) = self.attention_dropout_p, (None, None) if cache is None else cache
        own_dropout, cross_dropout = (seed.dropout(site, p) for site in WEIGHT_SITES)
        own = partial(self.self_attn, lengths=lengths, causal=self.causal, cache=self_cache, dropout=own_dropout)
        cross = partial(
            self.multihead_attn, memory=memory, lengths=lengths, memory_lengths=memory_lengths, cache=memory_cache,
            dropout=cross_dropout,
        )  # fmt: skip
        return self.with_network([own, cross], seed)

    def forward(
        self, x: Tensor, memory: Tensor | None, lengths: Lengths = None, memory_lengths: Lengths = None, *,
        seed: LayerSeed = NO_SEED, cache: LayerCache | None = None,
    ) -> Tensor:  # fmt: skip
        """x (B, L, d) to the same; memory (B, S, d), not read once the cache is complete.

        lengths, memory_lengths: of the rows of both; cache: x is the new positions after those that it keeps.
        """
        return through(x, self.sublayers(memory, lengths, memory_lengths, seed=seed, cache=cache), self.norm_first)
