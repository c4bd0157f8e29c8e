"""Encoder and decoder layers (Vaswani et al. 2017, section 3.1): x (B, L, d) in, (B, L, d) out.

State dicts are interchangeable with torch.nn.TransformerEncoderLayer and TransformerDecoderLayer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.cpu import step_passes
from fasttfm.cpu.linear import batch_invariant, frozen, linear
from fasttfm.functional.dropout import Dropout
from fasttfm.functional.feed_forward import ACTIVATIONS
from fasttfm.models.attention import Attention, Lengths
from fasttfm.models.cache import LayerCache
from fasttfm.models.plain import apply_linear, fused_activation, norms_of, opens
from fasttfm.models.residual import NO_SEED, OUTPUT_SITES, WEIGHT_SITES, LayerSeed, Site, SubLayer, through

if TYPE_CHECKING:
    from fasttfm.config.model import TransformerConfig


def feed_forward(
    x: Tensor, linear1: Any, activation: Callable[[Tensor], Tensor], dropout: Dropout | nn.Module, linear2: Any
) -> Tensor:
    """linear2(dropout(activation(linear1(x)))), x (..., N), hidden (..., F) (Vaswani et al. 2017, equation 2).

    One operator for ReLU, GELU and SiLU. A linear layer or dropout that is not plain is called as a module.
    """
    opened = opens(linear1, x)
    fused = fused_activation(activation) if opened else None
    if fused and isinstance(dropout, Dropout) and opens(linear2) and not frozen(x):
        return F.feed_forward(
            x, linear1.weight, linear1.bias, linear2.weight, linear2.bias, activation=fused, **dropout.options()
        )
    relu_fused = fused == "relu" and frozen(x)
    hidden = linear(x, linear1.weight, linear1.bias, relu=relu_fused) if opened else linear1(x)
    if fused and not relu_fused and batch_invariant(x) and step_passes.takes(hidden):
        loops = step_passes.loops()  # torch computes the last elements of a tensor in another way, with other bits
        loops.activate(step_passes.team(), step_passes.array(hidden), loops.ACTIVATIONS[fused])
    elif not relu_fused:
        hidden = activation(hidden)
    if not isinstance(dropout, Dropout):
        hidden = dropout(hidden)
    elif dropout.dropout_p:
        hidden = nn.functional.dropout(hidden, dropout.dropout_p)
    return apply_linear(linear2, hidden)


class Layer(nn.Module):
    """Base of all layers, including those of fasttfm.nn: attentions and a feed-forward network, each with a norm."""

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
    """Whether self-attention is causal by default."""

    def dropouts(self) -> list[Any]:
        """Probabilities or modules: attention weights (one per attention), hidden units, output of each sub-layer."""
        raise NotImplementedError

    def with_network(self, attentions: Sequence[Callable[[Tensor], Tensor]], seed: LayerSeed) -> list[SubLayer]:
        """All sub-layers: the given attentions, then the feed-forward network."""
        hidden, *outputs = self.dropouts()[len(attentions) :]
        network = partial(
            feed_forward, linear1=self.linear1, activation=self.activation, linear2=self.linear2,
            dropout=seed.dropout(Site.HIDDEN, hidden),
        )  # fmt: skip
        sites = (*OUTPUT_SITES[: len(attentions)], Site.FEED_FORWARD)
        functions: list[Any] = [*attentions, network]
        return [*map(SubLayer, functions, norms_of(self), map(seed.dropout, sites, outputs))]


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
        """See Layer; 0 in eval mode, as of a part that is frozen."""
        count = len(norms_of(self))
        rates = [*[self.attention_dropout_p] * (count - 1), self.relu_dropout_p, *[self.dropout_p] * count]
        return rates if self.training else [0.0] * len(rates)


class EncoderLayer(_PaperLayer):
    """Self-attention, then feed-forward; causal: a position attends to itself and earlier ones, as in GPT."""

    stands_for = "layer"

    def __init__(self, config: TransformerConfig, *, causal: bool = False) -> None:
        super().__init__(config, "self_attn")
        self.causal = causal

    def sublayers(
        self, lengths: Lengths = None, *, seed: LayerSeed = NO_SEED, cache: LayerCache | None = None
    ) -> list[SubLayer]:
        """See forward()."""
        dropout = seed.dropout(Site.SELF_ATTENTION_WEIGHTS, self.dropouts()[0])
        self_cache = None if cache is None else cache.target
        own = partial(self.self_attn, lengths=lengths, causal=self.causal, cache=self_cache, dropout=dropout)
        return self.with_network([own], seed)

    def forward(
        self, x: Tensor, lengths: Lengths = None, *, seed: LayerSeed = NO_SEED, cache: LayerCache | None = None
    ) -> Tensor:
        """The output (B, S, d) for x (B, S, d); lengths: of the rows; cache: x holds only the new positions."""
        return through(x, self.sublayers(lengths, seed=seed, cache=cache), self.norm_first)


class DecoderLayer(_PaperLayer):
    """Causal self-attention, cross-attention over the memory (the encoder's output), feed-forward."""

    stands_for = "layer"
    causal = True

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, "self_attn", "multihead_attn")

    def sublayers(
        self, memory: Tensor | None, lengths: Lengths = None, memory_lengths: Lengths = None, *,
        seed: LayerSeed = NO_SEED, cache: LayerCache | None = None,
    ) -> list[SubLayer]:  # fmt: skip
        """See forward()."""
        self_cache, memory_cache = (None, None) if cache is None else cache
        own_dropout, cross_dropout = map(seed.dropout, WEIGHT_SITES, self.dropouts())
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
        """The output (B, L, d) for x (B, L, d); memory (B, S, d), not read once cached.

        lengths, memory_lengths: of the rows of x and memory; cache: x holds only the new positions.
        """
        return through(x, self.sublayers(memory, lengths, memory_lengths, seed=seed, cache=cache), self.norm_first)
