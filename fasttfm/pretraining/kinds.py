"""The kinds of model of this room: the sections of their configuration, their command, and where their body is."""

from __future__ import annotations

from typing import NamedTuple

from fasttfm.config.training import TrainingConfig
from fasttfm.pretraining.config.bert import AlbertConfig, BertClassifierConfig, BertConfig, ElectraConfig, StudentConfig
from fasttfm.pretraining.config.data import DocumentsConfig, MaskingConfig, TaskConfig
from fasttfm.pretraining.config.gpt import GPTClassifierConfig, GPTConfig
from fasttfm.pretraining.config.llama import LlamaConfig
from fasttfm.pretraining.config.task_student import TaskStudentConfig


class Kind(NamedTuple):
    """A kind of model: the sections of its configuration, its command, and where its body is."""

    model: type
    """The section `model` of its configuration."""
    data: type
    """The section `data`."""
    command: str
    """The command that takes such a model, as it stands after `fasttfm`."""
    body: str | None = "body."
    """The prefix of the weights that fine-tuning starts from; None where a kind cannot be fine-tuned."""

    @property
    def sections(self) -> dict[str, type]:
        """Section -> dataclass."""
        return {"model": self.model, "data": self.data, "training": TrainingConfig}


KINDS = {
    "gpt": Kind(GPTConfig, DocumentsConfig, "lm", body=""),
    "llama": Kind(LlamaConfig, DocumentsConfig, "lm", body=None),
    "bert": Kind(BertConfig, MaskingConfig, "mlm"),
    "albert": Kind(AlbertConfig, MaskingConfig, "mlm"),
    "electra": Kind(ElectraConfig, MaskingConfig, "mlm", body="discriminator."),
    "student": Kind(StudentConfig, MaskingConfig, "distill bert (its folder student is a BERT)"),
    "task-student": Kind(
        TaskStudentConfig, TaskConfig, "distill task (its folder student is a fine-tuned model)", body="student.body."
    ),
    "squad": Kind(BertConfig, TaskConfig, "finetune predict"),
    "choices": Kind(BertClassifierConfig, TaskConfig, "finetune predict"),
    "classify": Kind(BertClassifierConfig, TaskConfig, "finetune predict"),
    "gpt-choices": Kind(GPTClassifierConfig, TaskConfig, "finetune predict"),
    "gpt-classify": Kind(GPTClassifierConfig, TaskConfig, "finetune predict"),
}
"""Kind of model -> what it is made of."""


def kinds_of(command: str) -> tuple[str, ...]:
    """The kinds that a command trains and takes."""
    return tuple(name for name, kind in KINDS.items() if kind.command == command)
