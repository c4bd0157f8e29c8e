"""A student of a fine-tuned BERT on task data: TinyBERT's second stage (Jiao et al. 2020, section 3.2).

layers        embeddings, hidden states and attention scores, as models.student.Student     first
prediction    T^2 KL(softmax(z_teacher / T) || softmax(z_student / T)) of the task's scores  then
"""

from typing import Any

import torch
from torch import Tensor

from fasttfm_pretraining.config.shared import shared_fields
from fasttfm_pretraining.config.task_student import TaskStudentConfig
from fasttfm_pretraining.models.bert import Bert
from fasttfm_pretraining.models.distillation import soft_target_loss, watch
from fasttfm_pretraining.models.heads import Answerer, Classifier, TaskModel
from fasttfm_pretraining.models.student import add_maps, layer_losses

_NEVER = -1e9
"""Score of excluded entries; unlike -inf, its difference from itself is 0."""


class TaskStudent(TaskModel):
    """A model with the teacher's kind of head and learned maps to the teacher's widths."""

    def __init__(self, config: TaskStudentConfig, teacher: Answerer | Classifier) -> None:
        """teacher: frozen and set to eval mode."""
        super().__init__()
        self.config = config
        self._teacher = [teacher.eval().requires_grad_(False)]  # in a list, or it would be saved and trained
        kind: Any = type(teacher)
        shape = type(teacher.config)
        self.student = kind(shape(**shared_fields(config, shape)))
        add_maps(self, config, teacher.config.d_model)

    @property
    def body(self) -> Bert:
        """The student's body."""
        return self.student.body

    def forward(self, batch: Any, packed: bool = False) -> Tensor:
        """The student's scores, as in models.heads."""
        return self.student(batch, packed)

    def loss_of(self, scores: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """Cross entropy of the labels, for validation."""
        return self.student.loss_of(scores, labels, label_smoothing)

    def batch_loss(self, batch: Any, *, label_smoothing: float = 0.0, packed: bool = False) -> tuple[Tensor, Tensor]:
        """Weighted loss of a data.task_batches.TaskBatch, and the loss of its labels; 0-d sums over examples.

        If only layers are learned, the second is the layer loss: the head is untrained. Labels and label_smoothing do
        not affect the first; packed is ignored: attention losses use padded rows.
        """
        config, teacher = self.config, self._teacher[0].to(batch.tokens.device)
        stacks = [model.body.encoder.layers if config.learns_layers else () for model in (self, teacher)]
        attends = bool(config.attention_weight)
        with watch(stacks[0], scores=attends) as mine:
            scores = self(batch)
        with torch.no_grad(), watch(stacks[1], scores=attends) as taught:
            wanted = teacher(batch)
        real = (torch.arange(batch.tokens.shape[1], device=scores.device) < batch.lengths[:, None]).flatten()
        layers = batch.target_tokens * layer_losses(self, teacher.config.layers, mine, taught, real, batch.lengths)
        loss = layers + config.soft_weight * prediction_loss(scores, wanted, config.temperature)
        if not config.soft_weight:
            return loss, layers.detach()
        return loss, self.loss_of(scores, batch.labels)[1]


def prediction_loss(scores: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """soft_target_loss() of a task's scores, summed over examples, 0-d; of answers the mean of starts and ends.

    scores, teacher (B, C), or (2, R, S) of answers: -inf in both for excluded entries.
    """
    mine, theirs = (each.masked_fill(each == -torch.inf, _NEVER).flatten(0, -2) for each in (scores, teacher))
    return soft_target_loss(mine, theirs, temperature) / (len(scores) if scores.dim() == 3 else 1)
