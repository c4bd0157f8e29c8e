"""Shapes of the encoder-only models: BERT, and as variations of it ALBERT, ELECTRA, classifiers and students."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fasttfm.config.checks import Amount, Count, Layers, Positive, Range, check_fields
from fasttfm.config.model import TransformerConfig
from fasttfm_pretraining.config.shared import shared_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class BertConfig:
    """A post-norm encoder with learned positions (Devlin et al. 2019). Wrong values raise ValueError on construction.

    The defaults are bert-base.
    """

    vocab_size: Count
    """Number of tokens."""
    d_model: int = 768
    """Width of the residual stream, a multiple of heads."""
    heads: int = 12
    """Attention heads, of d_model / heads channels each."""
    d_ff: int = 3072
    """Width of the feed-forward network's hidden layer."""
    layers: Layers = 12
    """Number of layers; a shared layer counts as often as it is used."""
    embedding_size: Count | None = None
    """Width of the embeddings; a linear map follows where it is not d_model (ALBERT, ELECTRA). None: d_model."""
    share: Literal["none", "attention", "ffn", "all"] = "none"
    """What the layers share: nothing, the attention, the feed-forward network (each with its norm), or both (Lan et al.
    2020, section 3.1)."""
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    """Activation of the feed-forward network and the head; gelu is exact, gelu_tanh its approximation (ALBERT v2)."""
    dropout: float = 0.1
    """Dropout rate of the embeddings, of every sub-layer's output and of the pooled vector before a classifier."""
    attention_dropout: float = 0.1
    """Dropout rate of the attention weights."""
    layer_norm_eps: float = 1e-12
    """Epsilon that LayerNorm adds to the variance."""
    max_length: Count = 512
    """Longest sequence in tokens; each position has a learned vector."""
    segments: Count = 2
    """Number of segment types, such as 2 for sentence A and sentence B."""
    pooler: bool = True
    """Add a linear layer with tanh on the first token's hidden state, from which classifiers read the sequence."""
    sentence_head: bool = True
    """Add two logits on the pooled vector for next-sentence prediction or sentence order. Needs pooler."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights; biases start at 0."""
    pad_id: int = 0
    """Token that pads short sequences: it is never attended to and carries no loss."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.sentence_head and not self.pooler:
            raise ValueError("sentence_head needs pooler: it reads the pooled vector")
        self.layer_config()  # which refuses what a layer cannot be

    @property
    def embedding_width(self) -> int:
        """Effective width of the embeddings."""
        return self.d_model if self.embedding_size is None else self.embedding_size

    def layer_config(self) -> TransformerConfig:
        """Configuration of one layer, for models.layers."""
        return TransformerConfig(**shared_fields(self, TransformerConfig))


@dataclass(frozen=True, kw_only=True, slots=True)
class AlbertConfig(BertConfig):
    """BERT with narrow embeddings, shared layers and the order of two segments to predict (Lan et al. 2020).

    Word embeddings of width E < d and a linear map to d have V E + E d parameters in the place of V d. The models are
    Bert and BertPretraining; data.masked_rows makes the pairs. The defaults are albert-base (version 2).
    """

    embedding_size: int | None = 128
    share: Literal["none", "attention", "ffn", "all"] = "all"
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu_tanh"
    dropout: float = 0.0
    """Dropout rate of the embeddings and of every sub-layer's output; ALBERT v2 trains without."""
    attention_dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ElectraConfig(BertConfig):
    """A discriminator, and the generator that makes its input (Clark et al. 2020). The defaults are electra-small."""

    d_model: int = 256
    """Width of the discriminator's residual stream, a multiple of heads."""
    heads: int = 4
    """The discriminator's attention heads."""
    d_ff: int = 1024
    """Width of the hidden layer of the discriminator's feed-forward network."""
    embedding_size: int | None = 128
    """Width of the embeddings that generator and discriminator share. None: d_model."""
    pooler: bool = False
    """ELECTRA has none."""
    sentence_head: bool = False
    """ELECTRA has none."""
    generator_size: Annotated[float, Range(0, 1, above=True)] = 0.25
    """The generator's width, heads and d_ff as a share of the discriminator's; it is as deep."""
    discriminator_weight: Amount = 50.0
    """Weight of the discriminator's loss; the generator's has weight 1."""

    def __post_init__(self) -> None:
        BertConfig.__post_init__(self)
        if self.share != "none":
            raise ValueError(f"share {self.share}: ELECTRA's layers are not shared")
        if self.pooler:
            raise ValueError("pooler: ELECTRA has none")
        self.generator()

    def discriminator(self) -> BertConfig:
        """The discriminator alone."""
        return self._part(self.d_model, self.heads, self.d_ff)

    def generator(self) -> BertConfig:
        """The generator alone."""
        heads = max(1, round(self.heads * self.generator_size))
        width = round(self.d_model * self.generator_size)
        if width % heads:
            raise ValueError(
                f"generator_size {self.generator_size} makes a generator of width {width}, which is not a multiple of "
                f"its {heads} heads: choose another"
            )
        return self._part(width, heads, max(1, round(self.d_ff * self.generator_size)))

    def _part(self, d_model: int, heads: int, d_ff: int) -> BertConfig:
        changed = {"d_model": d_model, "heads": heads, "d_ff": d_ff, "embedding_size": self.embedding_width}
        return BertConfig(**{**shared_fields(self, BertConfig), **changed})


@dataclass(frozen=True, kw_only=True, slots=True)
class BertClassifierConfig(BertConfig):
    """A BERT, ALBERT or ELECTRA discriminator with a linear layer on its pooled vector."""

    labels: Count = 2
    """Number of classes; 1 for choices, which get one score each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentConfig(BertConfig):
    """A BERT that learns from another one (Sanh et al. 2019; Jiao et al. 2020). Fields that are not given are the
    teacher's, layers half of its."""

    pooler: bool = False
    """A student has none."""
    sentence_head: bool = False
    """A student has none."""
    temperature: Positive = 2.0
    """Divisor of both models' logits for the soft targets."""
    soft_weight: Amount = 5.0
    """Weight of the divergence from the teacher's probabilities at masked tokens, times the square of temperature."""
    mlm_weight: Amount = 2.0
    """Weight of the cross entropy of masked tokens."""
    cosine_weight: Amount = 1.0
    """Weight of 1 - cos between the last hidden states; student and teacher must have the same width."""
    embedding_weight: Amount = 0.0
    """Weight of the squared difference of the embeddings, through a learned map."""
    hidden_weight: Amount = 0.0
    """Weight of the squared difference of each layer's output from its teacher's layer, through a learned map."""
    attention_weight: Amount = 0.0
    """Weight of the squared difference of each layer's attention scores; both models must have as many heads."""

    def __post_init__(self) -> None:
        BertConfig.__post_init__(self)
        if self.pooler or self.sentence_head:
            raise ValueError("pooler and sentence_head: a student has none")
        if not any(getattr(self, name) for name in _WEIGHTS):
            raise ValueError("soft_weight 0, as all other weights: a student must learn something")


_WEIGHTS = ("soft_weight", "mlm_weight", "cosine_weight", "embedding_weight", "hidden_weight", "attention_weight")
"""Names of the loss weights of a student."""
