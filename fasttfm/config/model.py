"""Architecture of a Transformer: the `model:` section of a configuration."""

from dataclasses import dataclass
from typing import Literal

from fasttfm.config.checks import Count, Layers, Positive, Rate, Whole, Width, check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig:
    """An encoder-decoder Transformer (Vaswani et al. 2017). Invalid values raise ValueError on construction."""

    vocab_size: Count
    """Number of target tokens, and of source tokens unless source_vocab_size is given."""
    source_vocab_size: Count | None = None
    """Number of source tokens for separate vocabularies; not possible with share_embeddings=all."""
    d_model: Width = 512
    """Width of the residual stream, a multiple of heads."""
    heads: Count = 8
    """Attention heads, of d_model / heads channels each."""
    d_ff: Width = 2048
    """Width of the feed-forward network's hidden layer."""
    encoder_layers: Layers = 6
    """Number of encoder layers."""
    decoder_layers: Layers = 6
    """Number of decoder layers."""
    norm_first: bool = False
    """False: LayerNorm(x + Sublayer(x)), as in the paper. True: x + Sublayer(LayerNorm(x)), as in tensor2tensor."""
    final_norm: bool = False
    """Add a LayerNorm to the output of the encoder and of the decoder; usual with norm_first."""
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    """Activation of the feed-forward network; gelu uses the error function, gelu_tanh GPT-2's approximation by tanh."""
    dropout: Rate = 0.1
    """Dropout rate of every sub-layer's output before it is added to the residual (section 5.4)."""
    embedding_dropout: Rate | None = None
    """Dropout rate of embedding + position. None: the value of dropout, as in the paper."""
    attention_dropout: Rate = 0.0
    """Dropout rate of the attention weights after the softmax (tensor2tensor)."""
    relu_dropout: Rate = 0.0
    """Dropout rate after the feed-forward network's activation (tensor2tensor)."""
    layer_norm_eps: Positive = 1e-5
    """Epsilon that LayerNorm adds to the variance; tensor2tensor uses 1e-6."""
    positional_encoding: Literal["paper", "tensor2tensor", "learned"] = "paper"
    """paper: sine and cosine alternate channel by channel. tensor2tensor: first half sines, second half cosines.
    learned: a table of max_length vectors for each side."""
    first_position: Whole = 0
    """Index of the first position of a sequence in the sinusoids; 2 in fairseq and M2M-100."""
    init: Literal["xavier", "torch"] = "xavier"
    """xavier: Glorot uniform matrices and normal(0, d_model^-0.5) embeddings. torch: the defaults of torch.nn."""
    share_embeddings: Literal["all", "decoder", "none"] = "all"
    """all: one table for source, target and output (the paper). decoder: target and output share one. none: three
    tables."""
    output_bias: bool = False
    """Add a bias to the logits, as Marian does."""
    max_length: Count = 1024
    """Initial positions in the table; longer input extends it, but is an error with learned positions."""
    pad_id: int = 0
    """Padding token: its embedding is zero, it is never attended to and has no loss."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.d_model % self.heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of heads {self.heads}")
        if self.d_model % 2:
            raise ValueError(f"d_model {self.d_model} is odd: the positional encoding needs pairs of channels")
        if self.share_embeddings == "all" and self.source_vocab_size not in (None, self.vocab_size):
            raise ValueError(
                f"source_vocab_size {self.source_vocab_size} differs from vocab_size {self.vocab_size}, but "
                "share_embeddings all needs one vocabulary: choose share_embeddings decoder or none"
            )
        if self.final_norm and not self.norm_first:
            raise ValueError("final_norm needs norm_first: a post-norm stack already ends in a LayerNorm")
        if self.positional_encoding == "learned" and self.first_position:
            raise ValueError(f"first_position {self.first_position} needs sinusoids: learned positions start at 0")
        least = min(self.vocab_size, self.source_vocab_size or self.vocab_size)
        if not 0 <= self.pad_id < least:
            raise ValueError(f"pad_id {self.pad_id} is outside the vocabulary of {least}")

    @property
    def embedding_dropout_p(self) -> float:
        """The effective dropout rate of embedding + position."""
        return self.dropout if self.embedding_dropout is None else self.embedding_dropout

    @property
    def positions(self) -> int | None:
        """Longest sequence with learned positions, special tokens included; None with sinusoids."""
        return self.max_length if self.positional_encoding == "learned" else None
