"""Fine-tuning of a pre-trained model for answers, choices or classes: fasttfm finetune.

Body, shape and vocabulary come from a model directory of pre-training or another fine-tuning; the head is initialized
anew. Adam, schedule, workers, checkpoints and resuming are the trainer's.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fasttfm.config import RunConfig, Values, build, field_types
from fasttfm.errors import UserError
from fasttfm.store.checkpoint import read_weights
from fasttfm.store.model_dir import DATA_FILE, read_config, read_kind
from fasttfm.store.steps import resolve_checkpoint
from fasttfm.store.vocabulary import check_vocabulary
from fasttfm.store.weights import load_weights, model_weights
from fasttfm.system.files import sha256
from fasttfm.system.folders import VOCABULARY_FILES
from fasttfm.system.parsing import write_yaml
from fasttfm.system.wording import plain_text
from fasttfm.training.task import Task
from fasttfm.training.validation import DividedValidator, settings_of
from fasttfm_pretraining.data.masking_vocabulary import masking_vocabulary
from fasttfm_pretraining.data.pairs import label_names, label_numbers, read_pairs, text_columns
from fasttfm_pretraining.data.squad import SquadData, read_squad
from fasttfm_pretraining.data.swag import ENDINGS, read_swag
from fasttfm_pretraining.data.tables import columns_of
from fasttfm_pretraining.data.task_batches import Examples, TaskBatches
from fasttfm_pretraining.data.task_examples import answer_examples, choice_examples, class_examples
from fasttfm_pretraining.data.task_inputs import Markers, Window
from fasttfm_pretraining.data.text_tokenizer import TextTokenizer, load_text_tokenizer
from fasttfm_pretraining.kinds import KINDS
from fasttfm_pretraining.models.gpt_heads import MARKERS, GPTClassifier
from fasttfm_pretraining.models.heads import Answerer, Classifier
from fasttfm_pretraining.training.language_modelling import check_row_length
from fasttfm_pretraining.training.task_validation import TaskValidator, answer_judge, label_judge

TASKS = ("squad", "choices", "classify")
_GPT = ("gpt", "gpt-choices", "gpt-classify")
_WARMUP = 0.1


class Split(NamedTuple):
    """The examples of a file, and what scoring their outputs needs."""

    examples: Examples
    squad: SquadData | None = None
    windows: list[Window] = []  # noqa: RUF012 (never changed)


class TaskFiles:
    """Training and validation files of a task, tokenized with a model's vocabulary, instead of a prepared directory."""

    def __init__(
        self,
        task: str,
        body: Path,
        train: Path,
        valid: Path,
        columns: Sequence[str] = (),
        labels: Sequence[str] | None = None,
    ) -> None:
        """task: one of TASKS. body: a model directory. columns, labels: for task classify; they default to those of
        the training file, whose order of two texts is that of every file.

        Raises UserError, with the line, for a malformed file.
        """
        self.task, self.body = task, body
        self.kind = kind_of_task(task, body)
        self.tokenizer = load_text_tokenizer(body)
        self.model_files = [body / name for name in VOCABULARY_FILES if (body / name).is_file()]
        if task == "classify":
            columns = columns or text_columns(columns_of(train))
        self.given = {"train": read_task(task, train, columns), "valid": read_task(task, valid, columns)}
        self.files = {"train": train, "valid": valid}
        self.labels = [str(number) for number in range(len(ENDINGS))] if task == "choices" else []
        """Labels of the model's scores."""
        if task == "classify":
            self.labels = list(labels or label_names(self.given["train"], train))
            for name, path in self.files.items():
                label_numbers(self.given[name], self.labels, path)
        for name, path in self.files.items():
            if task == "choices" and any(each.label is None for each in self.given[name]):
                raise UserError(f"{path}: has no column label, which {name} data need: give the labelled file")
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name)
        digests = {f"{name}_sha256": sha256(path) for name, path in self.files.items()}
        self.description: dict[str, Any] = {
            "labels": self.labels,
            "columns": list(columns),
            "abstains": task == "squad" and self.given["train"].may_be_impossible,
            "files": [plain_text(path) for path in self.files.values()],
            "fingerprint": {"task": task, **digests},
        }
        text = write_yaml(self.description, sort_keys=False)
        (self.path / DATA_FILE).write_text(text, encoding="utf-8")
        self._splits: dict[tuple[str, int, int], Split] = {}

    def split(self, name: str, row_length: int, doc_stride: int) -> Split:
        """The examples of `train` or `valid`, cached."""
        key = name, row_length, doc_stride
        if key not in self._splits:
            labels = label_numbers(self.given[name], self.labels, self.files[name]) if self.task == "classify" else None
            self._splits[key] = make_split(
                self.kind, self.given[name], labels, self.tokenizer, row_length=row_length, doc_stride=doc_stride
            )
        return self._splits[key]


def read_task(task: str, path: Path, columns: Sequence[str] = (), *, answered: bool = True) -> Any:
    """Read a task's examples. answered: whether to read answers. Raises UserError with the line."""
    if task == "squad":
        return read_squad(path, answered=answered)
    return read_swag(path, answered=answered) if task == "choices" else read_pairs(path, columns)


def make_split(
    kind: str, given: Any, labels: Sequence[int] | None, tokenizer: TextTokenizer, *, row_length: int, doc_stride: int
) -> Split:
    """Rows of the result of read_task() for a kind of model. labels: label indices, for classifiers."""
    markers = markers_of(kind, tokenizer)
    if kind == "squad":
        windows, examples = answer_examples(given, tokenizer, markers, max_length=row_length, doc_stride=doc_stride)
        return Split(examples, given, windows)
    if kind.endswith("choices"):
        return Split(choice_examples(given, tokenizer, markers, max_length=row_length))
    return Split(class_examples(given, labels, tokenizer, markers, max_length=row_length))


def markers_of(kind: str, tokenizer: TextTokenizer) -> Markers:
    """[CLS] and [SEP] of a vocabulary; for a GPT three new tokens after its end."""
    if kind in _GPT:
        return Markers(*(len(tokenizer) + number for number in range(MARKERS)))
    vocabulary = masking_vocabulary(tokenizer)
    return Markers(vocabulary.begin, vocabulary.end, vocabulary.end, tokenizer.separators)


def kind_of_task(task: str, body: Path) -> str:
    """Kind of model that results from fine-tuning a body for a task. Raises UserError if unsupported."""
    kind = read_kind(body)
    bodies = [name for name, each in KINDS.items() if each.body is not None]
    if kind not in bodies:
        raise UserError(
            f"{body}: is a model of kind {kind}, which cannot be fine-tuned: give one of {', '.join(bodies)}"
        )
    if kind not in _GPT:
        return task
    if task == "squad":
        raise UserError(f"{body}: is a GPT, which sees no token after another: give a BERT, ALBERT or ELECTRA")
    return f"gpt-{task}"


class FineTuning(Task):
    """fasttfm finetune squad, choices or classify."""

    def __init__(self, files: TaskFiles) -> None:
        self.files, self.kind = files, files.kind

    def open(self, data_dir: Path) -> TaskFiles:
        """The task's files; the directory is ignored."""
        return self.files

    def build(self, values: Values, data: TaskFiles) -> RunConfig:
        """Takes the body's shape from its directory; converts epochs to updates, a tenth of them warm-up."""
        for name, value in body_fields(data.body, data.kind, len(data.labels)).items():
            values.put(name, value, f"{data.body}'s config.yaml")
        is_told = "warmup_updates" in values["training"]
        if not is_told:
            values.put("warmup_updates", 0, "a tenth of the updates")
        more = MARKERS if self.kind in _GPT else 0
        config = build(values, {"vocab_size": len(data.tokenizer) + more})
        check_row_length(config)
        training = config.training
        if training.max_epoch and "max_update" not in values["training"]:
            updates = len(self.batches(config, data)) * training.max_epoch // training.update_freq
            training = dataclasses.replace(training, max_update=max(1, updates))
        if not is_told:
            training = dataclasses.replace(training, warmup_updates=int(_WARMUP * training.max_update))
        return dataclasses.replace(config, training=training)

    def model(self, config: Any) -> nn.Module:
        """Body and head, freshly initialized."""
        return task_model(self.kind, config)

    def batches(self, config: Any, data: TaskFiles) -> TaskBatches:
        """Batches of examples of similar length."""
        split = data.split("train", config.data.row_length, config.data.doc_stride)
        try:
            return TaskBatches(
                split.examples, config.data.max_tokens, config.training.seed, together=config.training.update_freq
            )
        except ValueError as error:
            raise UserError(f"{data.files['train']}: {error}: raise --max-tokens") from error

    def validator(self, config: Any, data: TaskFiles, device: torch.device) -> DividedValidator[Any]:
        """Exact match and F1, or accuracy."""
        split = data.split("valid", config.data.row_length, config.data.doc_stride)
        if split.squad is not None:
            judge = answer_judge(split.squad, split.windows, config.data.max_answer)
        else:
            judge = label_judge(split.examples.labels, data.labels)
        settings = settings_of(config.training, device)
        return TaskValidator(split.examples, judge, max_tokens=config.data.max_tokens, **settings)

    def initialise(self, model: Any, init_from: Path, model_dir: Path) -> None:
        """Load the weights of a pre-trained body; the head, and a missing pooler, keep their initial values."""
        checkpoint = resolve_checkpoint(init_from)
        check_vocabulary(checkpoint, model_dir)
        begin = KINDS[read_kind(init_from)].body or ""
        given = {
            name.removeprefix(begin): tensor
            for name, tensor in read_weights(checkpoint).items()
            if name.startswith(begin)
        }
        wanted = model_weights(model.body)
        is_pooler = {name for name in {**given, **wanted} if name.startswith("pooler.")}
        fresh = {name: tensor.detach() for name, tensor in wanted.items() if name in is_pooler and name not in given}
        given = {name: tensor for name, tensor in given.items() if name not in is_pooler or name in wanted}
        if self.kind in _GPT:  # the markers' rows stay fresh
            old, new = given["embedding.weight"], wanted["embedding.weight"].detach()
            given["embedding.weight"] = torch.cat([old, new[len(old) :].to(old)])
        load_weights(model.body, {**given, **fresh}, checkpoint)


def task_model(kind: str, config: Any) -> nn.Module:
    """A freshly initialized model of a kind."""
    if kind == "squad":
        return Answerer(config)
    return GPTClassifier(config) if kind in _GPT else Classifier(config)


def body_fields(body: Path, task: str, labels: int) -> dict[str, Any]:
    """Configuration fields of a task model (a kind) taken from the body's directory. labels: class labels."""
    kind = read_kind(body)
    values = read_config(body, kind)["model"]
    if kind == "electra":
        values = dataclasses.asdict(KINDS[kind].model(**values).discriminator())
    fields = {name: value for name, value in values.items() if name in field_types(KINDS[task].model)}
    if kind not in _GPT:
        fields |= {"pooler": task != "squad", "sentence_head": False}
    if task != "squad":
        fields["labels"] = 1 if task.endswith("choices") else labels
    return {name: value for name, value in fields.items() if name not in ("vocab_size", "pad_id")}
