"""Distillation of a fine-tuned BERT into a smaller one on its task's data: fasttfm finetune distill."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fasttfm.config import RunConfig, Values
from fasttfm.errors import UserError
from fasttfm.store.checkpoint import read_weights
from fasttfm.store.model_dir import DATA_FILE
from fasttfm.store.steps import resolve_checkpoint
from fasttfm.store.vocabulary import vocabulary_digest
from fasttfm.store.weights import layer_map
from fasttfm.system.files import read_plain_yaml
from fasttfm.training.validation import DividedValidator, Score, settings_of
from fasttfm.training.workers import Workers
from fasttfm_pretraining.config.shared import shared_fields
from fasttfm_pretraining.data.task_batches import Examples, evaluation_batches
from fasttfm_pretraining.data.text_tokenizer import load_text_tokenizer
from fasttfm_pretraining.kinds import KINDS
from fasttfm_pretraining.models.saved import read_run, write_run
from fasttfm_pretraining.models.task_student import TaskStudent
from fasttfm_pretraining.training.distillation import STUDENT, refuse_flags
from fasttfm_pretraining.training.finetuning import FineTuning, TaskFiles
from fasttfm_pretraining.training.task_prediction import FineTuned, threshold_of_training

KIND = "task-student"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerScore(Score):
    """Results of one validation when only layers are distilled: layer losses per example."""

    @property
    def rank(self) -> tuple[float, float]:
        """Higher is better."""
        return 0.0, -self.loss

    def record(self) -> dict[str, Any]:
        """The values of a log line by name."""
        return {"loss": self.loss, "nll": self.nll}

    def __str__(self) -> str:
        return f"held-out loss of the layers {self.loss:.4f}"


class LayerValidator(DividedValidator[list[float]]):
    """Validates a student's layers while its head is untrained."""

    def __init__(self, examples: Examples, max_tokens: int, **settings: Any) -> None:
        """settings: as DividedValidator takes them."""
        super().__init__(**settings)
        self.examples, self.max_tokens = examples, max_tokens

    def part(self, model: Any, rank: int, size: int) -> list[float]:
        """The sums of a rank's batches."""
        batches = evaluation_batches(self.examples, self.max_tokens)[rank::size]
        return self.loss_sums(model, (batch.to(self.device) for _, batch in batches))

    def score(self, part: list[float], workers: Workers) -> LayerScore:
        """The score over all examples."""
        loss, nll, examples = workers.sum(part)
        return LayerScore(loss=loss / examples, nll=nll / examples)


class TaskDistillation(FineTuning):
    """Task distillation: a task's examples with a fine-tuned teacher."""

    def __init__(
        self, teacher: FineTuned, student: Path, train: Path, valid: Path, columns: Sequence[str] = ()
    ) -> None:
        """student: model directory of the initial body, shape and vocabulary.

        Raises UserError for a GPT teacher, a student with another vocabulary, and data of another task.
        """
        if teacher.kind != teacher.task:
            raise UserError(f"{teacher.path}: is a GPT: a teacher is a BERT, ALBERT or ELECTRA")
        if vocabulary_digest(student) != vocabulary_digest(teacher.path):
            raise UserError(
                f"--init-from {student}: is of another vocabulary than {teacher.path}: give a student of this teacher "
                "(fasttfm mlm distill), or of the model that it was fine-tuned from"
            )
        labels = teacher.labels if teacher.task == "classify" else None
        super().__init__(TaskFiles(teacher.task, student, train, valid, columns or teacher.columns, labels))
        if self.files.kind != teacher.task:
            raise UserError(f"--init-from {student}: is a GPT: a student is a BERT")
        abstains = self.files.description["abstains"]
        if abstains != teacher.abstains:
            kinds = ("1.1, where every question has an answer", "2.0, where a question may have none")
            raise UserError(
                f"{train}: is of SQuAD {kinds[abstains]}; {teacher.path} was trained on {kinds[not abstains]}"
            )
        self.kind, self.teacher = KIND, teacher

    def build(self, values: Values, data: TaskFiles) -> RunConfig:
        """Also raises UserError for a student that cannot learn from the teacher."""
        config = super().build(values, data)
        model, shape = config.model, self.teacher.model.config
        if model.learns_layers:
            try:
                layer_map(shape.layers, model.layers)
            except ValueError as error:
                raise UserError(f"--init-from {data.body}: {error}") from None
        if model.attention_weight and model.heads != shape.heads:
            raise UserError(
                f"--init-from {data.body}: has {model.heads} attention heads, which are compared one by one with the "
                f"teacher's {shape.heads}: give --attention-weight 0"
            )
        if config.data.row_length > shape.max_length:
            raise UserError(f"--row-length {config.data.row_length}: the teacher has {shape.max_length} positions")
        refuse_flags(config)
        return config

    def model(self, config: Any) -> TaskStudent:
        """The student, with the teacher beside it."""
        return TaskStudent(config, self.teacher.model)

    def validator(self, config: Any, data: TaskFiles, device: torch.device) -> DividedValidator[Any]:
        """The validator of the task, or of the layers if only these are learned."""
        if config.model.soft_weight:
            return super().validator(config, data, device)
        split = data.split("valid", config.data.row_length, config.data.doc_stride)
        return LayerValidator(split.examples, config.data.max_tokens, **settings_of(config.training, device))

    @torch.no_grad()
    def initialise(self, model: Any, init_from: Path, model_dir: Path) -> None:
        """Load a student's body and, if present, its maps to the teacher's width."""
        super().initialise(model, init_from, model_dir)
        given = read_weights(resolve_checkpoint(init_from))
        for name in ("hidden_map", "embedding_map"):
            learned, wanted = given.get(f"{name}.weight"), getattr(model, name)
            if learned is not None and wanted is not None and learned.shape == wanted.weight.shape:
                wanted.weight.copy_(learned)


def write_task_student(model_dir: Path, task: str) -> Path | None:
    """Write the best student of a run as a fine-tuned model directory, MODEL/student. Returns its path.

    None if only layers were learned: the head is untrained.
    """
    config, weights, _ = read_run(model_dir, KIND, "best")
    if not config.model.soft_weight:
        return None
    shape = KINDS[task].model
    model = shape(**shared_fields(config.model, shape))
    run = dataclasses.replace(config, kind=task, model=model)
    student = {name.removeprefix("student."): each for name, each in weights.items() if name.startswith("student.")}
    description = read_plain_yaml(model_dir / DATA_FILE) | {"threshold": threshold_of_training(model_dir) or 0.0}
    write_run(model_dir / STUDENT, run, student, load_text_tokenizer(model_dir), description)
    return model_dir / STUDENT
