"""GPT with the head of a task, as GPT-1 is fine-tuned (Radford et al. 2018, sections 3.2 and 3.3).

    start text extract, or start first delimiter second extract
    score = dropout(hidden state of extract) W              (B, labels), or one for each of C choices
    loss = cross entropy of the scores + 0.5 * mean loss of predicting the text's tokens

The three markers are new tokens at the end of the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.models.model import reset_parameters, token_loss
from fasttfm.models.plain import apply_linear
from fasttfm_pretraining.config.gpt import GPTClassifierConfig
from fasttfm_pretraining.models.gpt import GPT
from fasttfm_pretraining.models.heads import TaskModel
from fasttfm_pretraining.models.language_model import IGNORED

MARKERS = 3
"""start, delimiter and extract."""


class GPTClassifier(TaskModel):
    """A GPT with a score per class, or per choice of an example."""

    def __init__(self, config: GPTClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.body = GPT(config)
        self.classifier = nn.Linear(config.d_model, config.labels)
        reset_parameters(self.classifier, 0.02)

    def forward(self, batch: Any, packed: bool = False, *, with_text: bool = False) -> Any:
        """The scores of a data.task_batches.TaskBatch, (B, labels), or (B, C) of C choices, float32.

        with_text: (scores, mean loss of predicting the text's tokens). batch_loss() calls the model with it, so that
        wrappers such as FSDP take part. packed has no meaning: no token sees the padding, on the right.
        """
        lengths = None if batch.source_tokens == batch.tokens.numel() else batch.lengths
        hidden = self.body.hidden(batch.tokens, lengths)  # (R, S, d)
        last = hidden[torch.arange(len(hidden), device=hidden.device), batch.lengths - 1]  # (R, d)
        last = nn.functional.dropout(last, self.config.dropout, self.training)
        scores = apply_linear(self.classifier, last).float().view(len(batch.labels), -1)
        if not with_text:
            return scores
        text, _ = token_loss(hidden, self.body.output, next_tokens(batch), label_smoothing=0.0, pad_id=IGNORED)
        return scores, text / (batch.source_tokens - len(batch.tokens))

    def batch_loss(self, batch: Any, *, label_smoothing: float = 0.0, packed: bool = False) -> tuple[Tensor, Tensor]:
        """The loss above summed over examples, and the task's alone without smoothing and gradient; 0-d."""
        if not self.config.lm_weight:
            return super().batch_loss(batch, label_smoothing=label_smoothing)
        scores, text = self(batch, with_text=True)
        loss, nll = self.loss_of(scores, batch.labels, label_smoothing)
        return loss + self.config.lm_weight * len(batch.labels) * text, nll


def next_tokens(batch: Any) -> Tensor:
    """Next token of each position, (R, S) int64; IGNORED after the last and at padding."""
    targets = torch.full_like(batch.tokens, IGNORED)
    targets[:, :-1] = batch.tokens[:, 1:]
    positions = torch.arange(batch.tokens.shape[1], device=targets.device)
    return targets.masked_fill(positions >= batch.lengths[:, None] - 1, IGNORED)
