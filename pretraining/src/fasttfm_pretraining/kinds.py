"""Kinds of model and their commands: the target of fasttfm's entry point."""

from pathlib import Path
from typing import NamedTuple

from fasttfm.config.training import TrainingConfig
from fasttfm_pretraining.config.bert import AlbertConfig, BertClassifierConfig, BertConfig, ElectraConfig, StudentConfig
from fasttfm_pretraining.config.data import DocumentsConfig, MaskingConfig, TaskConfig
from fasttfm_pretraining.config.gpt import GPTClassifierConfig, GPTConfig
from fasttfm_pretraining.config.llama import LlamaConfig
from fasttfm_pretraining.config.task_student import TaskStudentConfig


class Kind(NamedTuple):
    """A kind of model: its configuration sections, command and body prefix."""

    model: type
    """The section `model` of its configuration."""
    data: type
    """The section `data`."""
    command: str
    """Name of its command, after `fasttfm`."""
    body: str | None = "body."
    """Prefix of the weights that fine-tuning starts from; None if it cannot be fine-tuned."""

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
    "student": Kind(StudentConfig, MaskingConfig, "mlm distill (its folder student is a BERT)"),
    "task-student": Kind(
        TaskStudentConfig,
        TaskConfig,
        "finetune distill (its folder student is a fine-tuned model)",
        body="student.body.",
    ),
    "squad": Kind(BertConfig, TaskConfig, "finetune predict"),
    "choices": Kind(BertClassifierConfig, TaskConfig, "finetune predict"),
    "classify": Kind(BertClassifierConfig, TaskConfig, "finetune predict"),
    "gpt-choices": Kind(GPTClassifierConfig, TaskConfig, "finetune predict"),
    "gpt-classify": Kind(GPTClassifierConfig, TaskConfig, "finetune predict"),
}
"""Kinds of model by name."""


COMMANDS = {name: f"fasttfm_pretraining.cli.{name}" for name in ("lm", "mlm", "finetune")}
"""Module of each command."""

LESS_MEMORY = {
    "finetune": "give a smaller --max-tokens (and a larger --update-freq), or a smaller --row-length",
    "lm": "give a smaller --max-tokens (and a larger --update-freq), or a smaller model",
    "mlm": "give a smaller --max-tokens (and a larger --update-freq), or a smaller model",
}
"""Advice to reduce memory, by command."""

PRESETS = Path(__file__).parent / "presets"
"""A folder of presets for each kind, and one for fine-tuning."""


def kinds_of(command: str) -> tuple[str, ...]:
    """Kinds that a command trains and loads."""
    return tuple(name for name, kind in KINDS.items() if kind.command == command)
