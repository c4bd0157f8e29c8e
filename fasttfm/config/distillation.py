"""A student of a BERT: its shape, and what it learns from its teacher."""

from __future__ import annotations

from dataclasses import dataclass

from fasttfm.config.bert import BertConfig
from fasttfm.config.checks import require_finite, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentConfig(BertConfig):
    """A BERT that learns from another one (Sanh et al. 2019; Jiao et al. 2020). Fields that are not given are the
    teacher's, layers half of its."""

    pooler: bool = False
    """A student has none."""
    sentence_head: bool = False
    """A student has none."""
    temperature: float = 2.0
    """What both models' logits are divided by for the soft targets."""
    soft_weight: float = 5.0
    """Of the divergence from the teacher's probabilities at the hidden tokens, times the square of temperature."""
    mlm_weight: float = 2.0
    """Of the hidden tokens' cross entropy."""
    cosine_weight: float = 1.0
    """Of 1 - cos between the last hidden states; needs the teacher's width."""
    embedding_weight: float = 0.0
    """Of the squared difference of the embeddings, through a learned map."""
    hidden_weight: float = 0.0
    """Of the squared difference of each layer's output from that of the teacher's layer, through a learned map."""
    attention_weight: float = 0.0
    """Of the squared difference of each layer's attention scores; needs the teacher's number of heads."""

    def __post_init__(self) -> None:
        BertConfig.__post_init__(self)
        if self.pooler or self.sentence_head:
            raise ValueError("pooler and sentence_head: a student has none")
        require_positive(self, "temperature")
        require_finite(self, *WEIGHTS)
        if not any(getattr(self, name) for name in WEIGHTS):
            raise ValueError("soft_weight 0, as all other weights: a student must learn something")


WEIGHTS = ("soft_weight", "mlm_weight", "cosine_weight", "embedding_weight", "hidden_weight", "attention_weight")
"""The fields that say what counts how much."""
