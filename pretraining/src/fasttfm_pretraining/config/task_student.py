"""Shape and loss weights of a student of a fine-tuned BERT."""

from dataclasses import dataclass

from fasttfm.config.checks import Amount, Positive
from fasttfm_pretraining.config.bert import BertClassifierConfig

LAYER_WEIGHTS = ("embedding_weight", "hidden_weight", "attention_weight")
"""Names of the weights of the layer losses."""
LOSSES = ("temperature", "soft_weight", *LAYER_WEIGHTS)
"""Fields set by a recipe; the others are the student's shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskStudentConfig(BertClassifierConfig):
    """A BERT with the head of a task that learns from a fine-tuned one (Jiao et al. 2020, second stage)."""

    sentence_head: bool = False
    """A student has none."""
    temperature: Positive = 1.0
    """Divisor of both models' scores for the soft targets."""
    soft_weight: Amount = 1.0
    """Weight of the divergence from the teacher's probabilities of answers, times the square of temperature."""
    embedding_weight: Amount = 0.0
    """Weight of the squared difference of the embeddings, through a learned map."""
    hidden_weight: Amount = 0.0
    """Weight of the squared difference of each layer's output from its teacher's layer, through a learned map."""
    attention_weight: Amount = 0.0
    """Weight of the squared difference of each layer's attention scores; both models must have as many heads."""

    def __post_init__(self) -> None:
        BertClassifierConfig.__post_init__(self)
        if not self.soft_weight and not self.learns_layers:
            raise ValueError("soft_weight 0, as all other weights: a student must learn something")

    @property
    def learns_layers(self) -> bool:
        """Whether any layer loss has a weight."""
        return any(getattr(self, name) for name in LAYER_WEIGHTS)
