"""Shape of a GPT: one frozen dataclass; GPT-1, 2 and 3 are sizes and an order of the norms."""

import math
from dataclasses import dataclass
from typing import Literal

from fasttfm.config.checks import Amount, Count, Layers, check_fields
from fasttfm.config.model import TransformerConfig
from fasttfm_pretraining.config.shared import shared_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """A decoder-only language model (Radford et al. 2018, 2019; Brown et al. 2020). Wrong values raise ValueError."""

    vocab_size: int
    """Number of tokens."""
    d_model: int = 768
    """Width of the residual stream, a multiple of heads."""
    heads: int = 12
    """Attention heads, of d_model / heads channels each."""
    d_ff: int = 3072
    """Width of the feed-forward network's hidden layer; four times d_model in every GPT."""
    layers: Layers = 12
    """Number of layers."""
    norm_first: bool = True
    """True: x + Sublayer(LayerNorm(x)) and a norm after the last layer (GPT-2, GPT-3). False: LayerNorm(x +
    Sublayer(x)) (GPT-1)."""
    activation: Literal["gelu_tanh", "gelu", "relu"] = "gelu_tanh"
    """Activation of the feed-forward network; every GPT uses gelu_tanh, GELU by its tanh approximation."""
    dropout: float = 0.1
    """Dropout rate of embedding + position and of every sub-layer's output before it is added to the residual."""
    attention_dropout: float = 0.1
    """Dropout rate of the attention weights after the softmax."""
    layer_norm_eps: float = 1e-5
    """Epsilon that LayerNorm adds to the variance."""
    max_length: int = 1024
    """Longest sequence in tokens; each position has a learned vector."""

    def __post_init__(self) -> None:
        check_fields(self)
        self.layer_config()

    def layer_config(self) -> TransformerConfig:
        """Return the settings of the shared layers (models/layers.py); ValueError for what they refuse."""
        return TransformerConfig(
            encoder_layers=self.layers,
            decoder_layers=self.layers,
            final_norm=self.norm_first,
            **shared_fields(self, TransformerConfig),
        )

    @property
    def branch_std(self) -> float:
        """Standard deviation of the last matrix of every sub-layer at initialisation: GPT-2's 0.02 / sqrt(2 layers);
        GPT-1's is 0.02."""
        return 0.02 / math.sqrt(2 * self.layers) if self.norm_first else 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTClassifierConfig(GPTConfig):
    """A GPT with a linear layer on the hidden state of the last token, as GPT-1 is fine-tuned."""

    labels: Count = 2
    """Number of classes; 1 for choices, which get one score each."""
    lm_weight: Amount = 0.5
    """Weight of the language model's loss beside the task's, which has weight 1 (Radford et al. 2018, section 3.2)."""
