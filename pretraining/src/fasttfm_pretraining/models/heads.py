"""Pre-trained bodies with task heads, for fine-tuning.

    answers      scores of start and end = hidden W, (R, S, 2), softmax over the tokens of a row      4.2
    classes      dropout(pooled) W, (B, labels)                                                       4.1
    choices      the same with one score a row, softmax over the rows of an example                   4.4

The body is a models.bert.Bert: BERT's, ALBERT's, or ELECTRA's discriminator. Sections are of Devlin et al. 2019.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.models.attention import Lengths
from fasttfm.models.model import Model, reset_parameters
from fasttfm.models.packing import Packing
from fasttfm.models.plain import apply_linear
from fasttfm_pretraining.config.bert import BertClassifierConfig, BertConfig
from fasttfm_pretraining.models.bert import Bert


def choice_loss(scores: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Cross entropy over each row of scores, and that without smoothing and gradient; 0-d float32 sums.

    scores (B, C), -inf for excluded entries, which smoothing skips; labels (B,) int64.
    """
    log_probabilities = torch.log_softmax(scores.float(), dim=-1)
    right = log_probabilities.gather(1, labels[:, None]).squeeze(1)  # (B,)
    nll = -right.sum()
    if not label_smoothing:
        return nll, nll.detach()
    possible = scores > -torch.inf
    mean = log_probabilities.masked_fill(~possible, 0).sum(dim=-1) / possible.sum(dim=-1)
    return (1 - label_smoothing) * nll - label_smoothing * mean.sum(), nll.detach()


def hidden_states(body: Bert, batch: Any, packed: bool) -> tuple[Tensor, Lengths]:
    """Hidden states of a TaskBatch, (R, S, d), or packed (1, T, d), and their lengths or packing."""
    if not packed:
        lengths = None if batch.source_tokens == batch.tokens.numel() else batch.lengths
        return body(batch.tokens, batch.segments, lengths), lengths
    packing = Packing.from_lengths(batch.lengths, batch.tokens.shape[1], batch.source_tokens)
    tokens, segments = packing.pack_tokens(batch.tokens), packing.pack_tokens(batch.segments)
    return body(tokens, segments, packing), packing


class TaskModel(Model):
    """Base of a body with a task head; forward() returns the scores of a data.task_batches.TaskBatch."""

    def batch_loss(self, batch: Any, *, label_smoothing: float = 0.0, packed: bool = False) -> tuple[Tensor, Tensor]:
        """loss_of() the scores of a batch. packed: the layers see no padding."""
        return self.loss_of(self(batch, packed), batch.labels, label_smoothing)

    def loss_of(self, scores: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """Cross entropy of what forward() gave, summed over examples, and that without smoothing; 0-d."""
        return choice_loss(scores, labels, label_smoothing)


class Answerer(TaskModel):
    """A body with two scores per token: start and end of the answer."""

    def __init__(self, config: BertConfig) -> None:
        """config: without pooler, which no score reads. Raises ValueError for one with it."""
        super().__init__()
        if config.pooler:
            raise ValueError("pooler: answers are not read from it: give pooler false")
        self.config = config
        self.body = Bert(config)
        self.span = nn.Linear(config.d_model, 2)
        reset_parameters(self.span, config.init_std)

    def forward(self, batch: Any, packed: bool = False) -> Tensor:
        """The scores of a data.task_batches.TaskBatch, (2, R, S) float32: starts and ends, -inf at padding."""
        hidden, lengths = hidden_states(self.body, batch, packed)
        if isinstance(lengths, Packing):
            hidden = lengths.unpack(hidden[0])
        scores = apply_linear(self.span, hidden).float()  # (R, S, 2)
        padding = torch.arange(batch.tokens.shape[1], device=scores.device) >= batch.lengths[:, None]  # (R, S)
        return scores.masked_fill(padding[..., None], -torch.inf).permute(2, 0, 1)

    def loss_of(self, scores: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """Mean cross entropy of start and end, summed over rows, and that without smoothing; 0-d.

        labels (R, 2): the first and the last token of the answer.
        """
        first = choice_loss(scores[0], labels[:, 0], label_smoothing)
        last = choice_loss(scores[1], labels[:, 1], label_smoothing)
        return (first[0] + last[0]) / 2, (first[1] + last[1]) / 2


class Classifier(TaskModel):
    """A body with a score per class, or per choice of an example."""

    def __init__(self, config: BertClassifierConfig) -> None:
        """Raises ValueError for a config without pooler."""
        super().__init__()
        if not config.pooler:
            raise ValueError("pooler: a classifier reads the pooled vector: give pooler true")
        self.config = config
        self.body = Bert(config)
        self.classifier = nn.Linear(config.d_model, config.labels)
        reset_parameters(self.classifier, config.init_std)

    def forward(self, batch: Any, packed: bool = False) -> Tensor:
        """The scores of a data.task_batches.TaskBatch, (B, labels), or (B, C) of C choices, float32."""
        hidden, lengths = hidden_states(self.body, batch, packed)
        pooled = nn.functional.dropout(self.body.pooled(hidden, lengths), self.config.dropout, self.training)  # (R, d)
        scores = apply_linear(self.classifier, pooled).float()
        return scores.view(len(batch.labels), -1)
