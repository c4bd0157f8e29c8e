"""A student of a fine-tuned BERT, on the data of its task: TinyBERT's second stage (Jiao et al. 2020, section 3.2).

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
"""The score of what may not be chosen: unlike -inf it differs from itself by 0."""


class TaskStudent(TaskModel):
    """A model with the teacher's kind of head, and the maps by which their layers are compared."""

    def __init__(self, config: TaskStudentConfig, teacher: Answerer | Classifier) -> None:
        """teacher: is set to eval and keeps its weights."""
        super().__init__()
        self.config = config
        self._teacher = [teacher.eval().requires_grad_(False)]  # in a list, or it would be saved and trained
        kind: Any = type(teacher)
        shape = type(teacher.config)
        self.student = kind(shape(**shared_fields(config, shape)))
        add_maps(self, config, teacher.config.d_model)

    @property
    def body(self) -> Bert:
        """The student's, without its head."""
        return self.student.body

    def forward(self, batch: Any, packed: bool = False) -> Tensor:
        """The student's scores, as models.heads has them."""
        return self.student(batch, packed)

    def loss_of(self, scores: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """The cross entropy of the right answers, by which the student is validated."""
        return self.student.loss_of(scores, labels, label_smoothing)

    def batch_loss(self, batch: Any, *, label_smoothing: float = 0.0, packed: bool = False) -> tuple[Tensor, Tensor]:
        """The weighted losses of a data.task_batches.TaskBatch, and that of its labels, 0-d sums over examples.

        The second is that of the layers where nothing but them is learned: the head knows nothing then. Labels and
        label_smoothing have no part in the first, packed no meaning: attention is compared in padded rows.
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

    scores, teacher (B, C), or (2, R, S) of answers: -inf in both for what may not be chosen.
    """
    mine, theirs = (each.masked_fill(each == -torch.inf, _NEVER).flatten(0, -2) for each in (scores, teacher))
    return soft_target_loss(mine, theirs, temperature) / (len(scores) if scores.dim() == 3 else 1)
