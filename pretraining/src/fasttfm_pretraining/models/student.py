"""A BERT student with DistilBERT's and TinyBERT's losses, from models.distillation.

The teacher is not a submodule, so it has no part in state dict, optimizer or gradients.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.models.model import reset_parameters
from fasttfm.store.weights import layer_map
from fasttfm_pretraining.config.bert import StudentConfig
from fasttfm_pretraining.models.bert import BertPretraining, Predictions, inputs
from fasttfm_pretraining.models.distillation import (
    Trace,
    attention_loss,
    cosine_loss,
    hidden_loss,
    soft_target_loss,
    watch,
)


class Student(BertPretraining):
    """A BERT with a masked-language-modelling head and learned maps to the teacher's widths."""

    config: StudentConfig

    def __init__(self, config: StudentConfig, teacher: BertPretraining) -> None:
        """teacher: frozen and set to eval mode."""
        super().__init__(config)
        self._teacher = [teacher.eval().requires_grad_(False)]  # in a list, or it would be saved and trained
        add_maps(self, config, teacher.config.d_model)

    def _losses(self, batch: Any, label_smoothing: float, packed: bool) -> tuple[Tensor, Tensor, Predictions]:
        """Weighted loss of a data.masking.MaskedBatch, the plain loss of its masked tokens, and their logits.

        Losses over all tokens are rescaled to the masked tokens. packed is ignored: attention losses use padded rows.
        """
        config, teacher = self.config, self._teacher[0].to(batch.tokens.device)
        tokens, segments, lengths, positions = inputs(batch, packed=False)
        with watch(self.body.encoder.layers, scores=bool(config.attention_weight)) as mine:
            hidden = self.body(tokens, segments, lengths)  # (B, L, d)
        with torch.no_grad(), watch(teacher.body.encoder.layers, scores=bool(config.attention_weight)) as taught:
            wanted = teacher.body(tokens, segments, lengths)  # (B, L, d of the teacher)
        masked = self.masked(hidden.flatten(0, 1)[positions], self.body.embeddings.word.weight)  # (M, V)
        loss, nll = F.cross_entropy(masked, batch.labels, label_smoothing=label_smoothing, reduction="sum")
        loss = config.mlm_weight * loss
        if config.soft_weight:
            with torch.no_grad():
                picked = wanted.flatten(0, 1)[positions]
                targets = teacher.masked(picked, teacher.body.embeddings.word.weight)
            loss = loss + config.soft_weight * soft_target_loss(masked, targets, config.temperature)
        real = (torch.arange(tokens.shape[1], device=tokens.device) < batch.lengths[:, None]).flatten()
        if config.cosine_weight:
            distance = cosine_loss(hidden.flatten(0, 1)[real], wanted.flatten(0, 1)[real]) / real.sum()
            loss = loss + config.cosine_weight * batch.target_tokens * distance
        layers = layer_losses(self, teacher.config.layers, mine, taught, real, batch.lengths)
        return loss + batch.target_tokens * layers, nll, Predictions(masked, None)

    @torch.no_grad()
    def copy_layers(self) -> bool:
        """Initialize from the teacher's embeddings, head and every k-th layer. Returns whether the widths are equal.

        Source: Sanh et al. 2019, section 3 ("taking one layer out of two").
        """
        teacher = self._teacher[0]
        body, other = self.body, teacher.body
        names = ("d_model", "d_ff", "heads", "embedding_width", "max_length", "segments", "share")
        if any(getattr(body.config, name) != getattr(other.config, name) for name in names):
            return False
        if len(set(map(id, other.encoder.layers))) < len(other.encoder.layers):
            return False  # shared layers have nothing to choose from
        body.embeddings.load_state_dict(other.embeddings.state_dict())
        if body.embedding_projection is not None and other.embedding_projection is not None:
            body.embedding_projection.load_state_dict(other.embedding_projection.state_dict())
        self.masked.load_state_dict(teacher.masked.state_dict())
        step = teacher.config.layers // self.config.layers
        for layer, source in zip(body.encoder.layers, other.encoder.layers[::step]):
            layer.load_state_dict(source.state_dict())
        return True


def add_maps(student: Any, config: Any, width: int) -> None:
    """Add hidden_map and embedding_map, from the student's width to the teacher's, if their losses have a weight."""
    for name in ("hidden", "embedding"):
        made = None
        if getattr(config, f"{name}_weight"):
            made = nn.Linear(config.d_model, width, bias=False)
            reset_parameters(made, config.d_model**-0.5)
        setattr(student, f"{name}_map", made)


def layer_losses(
    student: Any, teacher_layers: int, mine: Trace, taught: Trace, real: Tensor, lengths: Tensor
) -> Tensor:
    """Mean losses of embeddings, hidden states and attention over the real tokens, weighted by student.config; 0-d.

    mine, taught: traces of B rows of L tokens through student and teacher. real (B L,) bool, lengths (B,) int64.
    """
    config, tokens = student.config, real.sum()
    total = torch.zeros((), dtype=torch.float32, device=real.device)

    def differ(one: Tensor, other: Tensor, through: nn.Module | None) -> Tensor:
        return hidden_loss(one.flatten(0, 1)[real], other.flatten(0, 1)[real], through) / tokens

    if config.embedding_weight:
        total = total + config.embedding_weight * differ(mine.inputs[0], taught.inputs[0], student.embedding_map)
    for number, layer in enumerate(layer_map(teacher_layers, config.layers)):
        if config.hidden_weight:
            between = differ(mine.outputs[number], taught.outputs[layer], student.hidden_map)
            total = total + config.hidden_weight * between
        if config.attention_weight:
            between = attention_loss(mine.scores[number], taught.scores[layer], lengths)
            total = total + config.attention_weight * between
    return total
