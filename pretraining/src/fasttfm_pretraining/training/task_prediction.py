"""Predictions of a fine-tuned model directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fasttfm.config import RunConfig
from fasttfm.errors import UserError
from fasttfm.search.batches import evaluating
from fasttfm.store.model_dir import DATA_FILE, read_kind
from fasttfm.store.run_log import read_log
from fasttfm.store.weights import with_weights
from fasttfm.system.files import read_plain_yaml
from fasttfm.system.parsing import field, texts
from fasttfm_pretraining.data.answers import Predictions
from fasttfm_pretraining.data.squad import SquadData
from fasttfm_pretraining.data.task_batches import evaluation_batches
from fasttfm_pretraining.data.text_tokenizer import TextTokenizer, load_text_tokenizer
from fasttfm_pretraining.models.saved import read_run
from fasttfm_pretraining.training.finetuning import TASKS, make_split, read_task, task_model
from fasttfm_pretraining.training.task_validation import answers_of, chosen_labels, score_examples


@dataclass(frozen=True, slots=True)
class FineTuned:
    """A fine-tuned model with its vocabulary and task."""

    path: Path
    kind: str
    config: RunConfig
    model: Any
    tokenizer: TextTokenizer
    labels: list[str]
    columns: list[str]
    abstains: bool
    """Whether it may abstain: it was trained on unanswerable questions."""
    default_threshold: float
    """Default threshold of models trained elsewhere."""
    device: torch.device

    @classmethod
    def load(cls, path: Path, checkpoint: str = "best", device: torch.device | None = None) -> FineTuned:
        """Load a directory of fasttfm finetune. Raises UserError for any other, or a damaged one."""
        kind = read_kind(path)
        if kind.removeprefix("gpt-") not in TASKS:
            raise UserError(
                f"{path}: is a model of kind {kind}, which has no task: fasttfm finetune --init-from {path}"
            )
        config, weights, saved = read_run(path, kind, checkpoint)
        model = with_weights(lambda: task_model(kind, config.model), weights, saved)
        device = device or torch.device("cpu")
        description, where = read_plain_yaml(path / DATA_FILE), str(path / DATA_FILE)
        labels, columns = texts(description, "labels", where), texts(description, "columns", where)
        abstains = field(description, "abstains", bool, where)
        default = field(description, "threshold", float, where, 0.0)
        tokenizer = load_text_tokenizer(path)
        return cls(path, kind, config, model.to(device).eval(), tokenizer, labels, columns, abstains, default, device)

    @property
    def task(self) -> str:
        """squad, choices or classify."""
        return self.kind.removeprefix("gpt-")

    def answers_to(self, file: Path, max_tokens: int | None = None) -> tuple[SquadData, Predictions]:
        """Questions of a file and the predicted answers; gold answers in the file are ignored."""
        data = read_task("squad", file, answered=False)
        split = self._split(data)
        scored = self._scored(split.examples, max_tokens)
        return data, answers_of(data, split.windows, scored, self.config.data.max_answer)

    def labels_of(self, file: Path, max_tokens: int | None = None) -> list[str]:
        """Predicted label of each row of a file; labels in the file are ignored."""
        given = read_task(self.task, file, self.columns, answered=False)
        split = self._split(given)
        chosen = chosen_labels(self._scored(split.examples, max_tokens), len(split.examples))
        return [self.labels[each] for each in chosen]

    def threshold(self) -> float:
        """Null-score threshold of the best validation during training, or the default."""
        found = threshold_of_training(self.path)
        return self.default_threshold if found is None else found

    def _split(self, given: Any) -> Any:
        sizes = self.config.data
        return make_split(
            self.kind, given, None, self.tokenizer, row_length=sizes.row_length, doc_stride=sizes.doc_stride
        )

    def _scored(self, examples: Any, max_tokens: int | None) -> list[Any]:
        if max_tokens is None:
            max_tokens = self.config.data.max_tokens
        if max_tokens < 1:
            raise UserError(f"--max-tokens {max_tokens}: at least 1 is needed")
        batches = evaluation_batches(examples, max_tokens)
        with evaluating(self.model, self.device):
            return [(numbers, scores) for numbers, scores, _ in score_examples(self.model, batches, self.device)]


def threshold_of_training(model_dir: Path) -> float | None:
    """Threshold of the best validation in a run's log, or None."""
    validations = [
        record
        for record in read_log(model_dir)
        if record["kind"] == "valid" and isinstance(record.get("threshold"), int | float)
    ]
    best = [record for record in validations if record.get("best")]
    return float((best or validations)[-1]["threshold"]) if validations else None
