"""The sections of a run that fine-tunes a pre-trained model: the model with its head, and how examples become rows."""

from __future__ import annotations

from dataclasses import dataclass

from fasttfm.config.bert import BertConfig
from fasttfm.config.checks import require_finite, require_rows, require_whole
from fasttfm.config.gpt import GPTConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """How examples become rows and batches."""

    max_tokens: int = 4096
    """Tokens of a batch, padding included."""
    row_length: int = 256
    """Most tokens of a row, markers included; at most the model's max_length. Longer pairs lose their ends, longer
    contexts of questions are cut into windows."""
    doc_stride: int = 128
    """Tokens from the beginning of a context's window to the beginning of the next."""
    max_answer: int = 30
    """Most tokens of a predicted answer."""

    def __post_init__(self) -> None:
        require_whole(self, 1, "doc_stride", "max_answer")
        require_rows(self, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class BertClassifierConfig(BertConfig):
    """A BERT, ALBERT or ELECTRA discriminator with a linear layer on its pooled vector."""

    labels: int = 2
    """Classes; 1 for choices, each of which gets one score."""

    def __post_init__(self) -> None:
        BertConfig.__post_init__(self)
        require_whole(self, 1, "labels")


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTClassifierConfig(GPTConfig):
    """A GPT with a linear layer on the hidden state of the last token, as GPT-1 is fine-tuned."""

    labels: int = 2
    """Classes; 1 for choices, each of which gets one score."""
    lm_weight: float = 0.5
    """What the loss of predicting the text counts beside the task's (Radford et al. 2018, section 3.2)."""

    def __post_init__(self) -> None:
        GPTConfig.__post_init__(self)
        require_whole(self, 1, "labels")
        require_finite(self, "lm_weight")
