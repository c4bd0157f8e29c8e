"""Distillation of a BERT into a smaller one on prepared documents: fasttfm mlm distill."""

import dataclasses
from pathlib import Path
from typing import Any

from fasttfm.config import RunConfig, Values, build, field_types
from fasttfm.errors import UserError
from fasttfm.store.model_dir import read_kind
from fasttfm.store.vocabulary import refuse_another_vocabulary
from fasttfm.store.weights import layer_map
from fasttfm_pretraining.config.bert import BertConfig
from fasttfm_pretraining.config.shared import shared_fields
from fasttfm_pretraining.data.documents import PreparedDocuments
from fasttfm_pretraining.data.text_tokenizer import load_text_tokenizer
from fasttfm_pretraining.models.bert import BertPretraining
from fasttfm_pretraining.models.kinds import read_model
from fasttfm_pretraining.models.saved import read_run, write_run
from fasttfm_pretraining.models.student import Student
from fasttfm_pretraining.training.masked_modelling import MaskedModelling

STUDENT = "student"
"""Subfolder of a model directory that holds the student."""
_OF_THE_DATA = ("vocab_size", "pad_id")
_NONE = ("pooler", "sentence_head")


class Distillation(MaskedModelling):
    """Masked language modelling with a teacher."""

    def __init__(self, teacher: Path) -> None:
        """teacher: a BERT model directory. Raises UserError for any other."""
        super().__init__("student")
        kind = read_kind(teacher)
        if kind != "bert":
            raise UserError(
                f"{teacher}: is a model of kind {kind}: a teacher is a BERT, as fasttfm mlm train makes one"
            )
        model = read_model("mlm", teacher)
        assert isinstance(model, BertPretraining)
        self.path, self.teacher = teacher, model

    def build(self, values: Values, data: PreparedDocuments) -> RunConfig:
        """Configuration of the student, completed from the teacher's."""
        refuse_another_vocabulary(data, self.path)
        self.complete(values)
        config = build(values, {"vocab_size": len(data.tokenizer)})
        self._check(config)
        return config

    def complete(self, values: Values) -> None:
        """Set the fields that are not given to the teacher's, with half its layers."""
        if values["data"].setdefault("objective", "mlm") != "mlm":
            raise UserError("--objective: a student learns from hidden tokens alone: leave it out, or give mlm")
        given, shape, source = values["model"], self.teacher.config, f"{self.path}'s config.yaml"
        for name in field_types(BertConfig):
            if name not in (*_OF_THE_DATA, *_NONE, *given):
                layers = max(1, shape.layers // 2)
                values.put(name, layers if name == "layers" else getattr(shape, name), source)

    def model(self, config: Any) -> Student:
        """The student, with the teacher beside it."""
        return Student(config, self.teacher)

    def initialise(self, model: Any, init_from: Path, model_dir: Path) -> None:
        """Initialize from the teacher's layers if the widths are equal."""
        model.copy_layers()

    def _check(self, config: RunConfig) -> None:
        student, shape = config.model, self.teacher.config
        try:
            layer_map(shape.layers, student.layers)
        except ValueError as error:
            raise UserError(f"--layers {student.layers}: {error}: give a divisor of these") from None
        if student.cosine_weight and student.d_model != shape.d_model:
            raise UserError(
                f"--d-model {student.d_model}: directions are compared at the teacher's width {shape.d_model}: give "
                "--cosine-weight 0, or --preset tinybert"
            )
        if student.attention_weight and student.heads != shape.heads:
            raise UserError(
                f"--heads {student.heads}: attention is compared head by head, the teacher has {shape.heads}"
            )
        if config.data.row_length > min(student.max_length, shape.max_length):
            raise UserError(f"--row-length {config.data.row_length}: is more than the models' --max-length")
        refuse_flags(config)


def refuse_flags(config: RunConfig) -> None:
    """Raise UserError for settings under which layer outputs cannot be captured."""
    for name in ("checkpoint_activations", "shard"):
        if getattr(config.training, name):
            raise UserError(f"--{name.replace('_', '-')}: a student needs what its layers say: leave it out")


def write_student(model_dir: Path) -> Path:
    """Write the best student of a run as a BERT model directory, MODEL/student. Returns its path."""
    config, weights, _ = read_run(model_dir, "student", "best")
    run = dataclasses.replace(config, kind="bert", model=BertConfig(**shared_fields(config.model, BertConfig)))
    student = {name: each for name, each in weights.items() if name.startswith(("body.", "masked."))}
    write_run(model_dir / STUDENT, run, student, load_text_tokenizer(model_dir))
    return model_dir / STUDENT
