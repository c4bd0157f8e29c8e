"""Fine-tuned BERTs to and from Hugging Face's folders: fasttfm finetune import and export.

    squad      ...ForQuestionAnswering           qa_outputs, two scores per token: every family
    classify   ...ForSequenceClassification      a pooler with tanh and a linear layer: BERT, ALBERT, RoBERTa
    choices    ...ForMultipleChoice              the same with one score per row

A head of another shape (ELECTRA's and DistilBERT's classifiers) is refused by name.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fasttfm.convert.exchange import exporting, warnings_as_lines
from fasttfm.convert.names import parameters
from fasttfm.errors import UserError
from fasttfm.system.files import read_json
from fasttfm.system.parsing import field
from fasttfm_pretraining.config.bert import BertClassifierConfig, BertConfig
from fasttfm_pretraining.config.data import TaskConfig
from fasttfm_pretraining.data.swag import ENDINGS
from fasttfm_pretraining.data.text_tokenizer import TextTokenizer
from fasttfm_pretraining.interop import bert
from fasttfm_pretraining.interop.check import check_part
from fasttfm_pretraining.interop.folders import write_imported
from fasttfm_pretraining.interop.tokenizer_files import read_tokenizer, tell_other_tokens, write_text_tokenizer
from fasttfm_pretraining.models.bert import Bert
from fasttfm_pretraining.models.heads import Answerer, Classifier

_TASKS = {"squad": "ForQuestionAnswering", "classify": "ForSequenceClassification", "choices": "ForMultipleChoice"}
_HEADS: dict[str, dict[str, str | tuple[str, ...]]] = {
    "squad": {"span": "qa_outputs"},
    "classify": {"classifier": "classifier"},
    "choices": {"classifier": "classifier"},
}
_POOLED = ("bert", "albert", "roberta")
"""Model types whose classifier is a pooler with tanh and a linear layer."""


class Trained(NamedTuple):
    """A fine-tuned model and its task."""

    task: str
    """squad, classify or choices."""
    model: Answerer | Classifier
    labels: list[str]
    abstains: bool = False
    """Whether it may abstain."""
    threshold: float = 0.0
    """Null-score threshold above which it abstains."""


def read(folder: Path) -> Trained:
    """Read the model of a folder, in float32.

    Raises UserError for a head that is not one of the three, has another shape, or comes with further weights.
    """
    path = folder / "config.json"
    given = read_json(path)
    architectures, kind = given.get("architectures"), given.get("model_type")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else "no architecture"
    task = next((task for task, ending in _TASKS.items() if name.endswith(ending)), None)
    if task is None:
        raise UserError(f"{path}: is of {name}, without a task's head: BERTs {', '.join(_TASKS.values())} have one")
    if task != "squad" and kind not in _POOLED:
        raise UserError(f"{path}: the head of {name} is not supported: those of {', '.join(_POOLED)} are")
    labels = _labels(given, path) if task == "classify" else []
    family, body_config, weights = bert.read_family(folder)
    fields = dataclasses.asdict(body_config) | {"pooler": task != "squad", "sentence_head": False}
    model: Answerer | Classifier
    if task == "squad":
        model = Answerer(BertConfig(**fields))
    else:
        model = Classifier(BertClassifierConfig(**fields, labels=len(labels) or 1))
    bert.fill(model.body, weights, bert.body_parameters(model.body, family))
    bert.fill(model, weights, parameters(_HEADS[task]))
    weights.refuse_rest(bert.POSITIONS)
    if task == "choices":
        labels = [str(number) for number in range(len(ENDINGS))]
    abstains = field(given, "abstains", bool, str(path), False)
    return Trained(task, model.eval(), labels, abstains, field(given, "null_threshold", float, str(path), 0.0))


def _labels(given: Mapping[str, Any], path: Path) -> list[str]:
    """Class labels by index. Raises UserError for regression and multi-label models."""
    problem = field(given, "problem_type", str, str(path), "single_label_classification")
    names = field(given, "id2label", dict, str(path), {"0": "LABEL_0", "1": "LABEL_1"})
    if problem != "single_label_classification" or len(names) < 2:
        raise UserError(
            f"{path}: problem_type {problem} with {len(names)} labels: one label of two or more is supported"
        )
    if set(names) != {str(number) for number in range(len(names))}:
        raise UserError(f"{path}: id2label: its numbers must be 0 to {len(names) - 1}")
    return [str(names[str(number)]) for number in range(len(names))]


def import_folder(folder: Path, out: Path, *, abstains: bool = False, check: bool = False) -> tuple[Trained, list[str]]:
    """Convert a folder and its tokenizer to a model directory. abstains: it was trained on SQuAD 2.0. check: compare
    scores with transformers, if installed.

    Returns the model, and notes on omissions and assumptions. Raises UserError as read(), and for missing files.
    """
    with warnings_as_lines() as told:
        trained, tokenizer = read(folder), read_tokenizer(folder)
        tell_other_tokens(folder / "config.json", read_json(folder / "config.json"), tokenizer)
    if abstains and trained.task != "squad":
        raise UserError(f"--abstains: belongs to models that answer questions, and {folder} is of {trained.task}")
    told += check_part(_part(trained), folder) if check else []
    data = TaskConfig(row_length=min(384, trained.model.config.max_length), max_tokens=8192)
    description = {
        "labels": trained.labels,
        "columns": [],
        "abstains": abstains or trained.abstains,
        "threshold": trained.threshold,
    }
    return trained, write_imported(folder, out, trained.task, trained.model, data, tokenizer, told, description)


def export_folder(
    trained: Trained, out: Path, tokenizer: TextTokenizer, *, check: bool = False
) -> tuple[str, list[str]]:
    """Write a folder for transformers' AutoModelFor..., with the tokenizer. Returns the class, and lines for the user.
    check: as in import_folder(). Raises UserError as write_part().

    An ELECTRA with a classifier is written as an equivalent ALBERT with unshared layers.
    """
    task, _, labels, abstains, threshold = trained
    names = {str(number): name for number, name in enumerate(labels)}
    fields: dict[str, Any] = bert.special_tokens(tokenizer)
    if task == "squad":
        fields |= {"abstains": abstains, "null_threshold": threshold}
    elif task == "classify":
        fields |= {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}
        fields["problem_type"] = "single_label_classification"
    part = _part(trained)
    with exporting(out) as (fresh, told):
        bert.write_part(part, fresh, fields)
        told += write_text_tokenizer(tokenizer, fresh, "both")
        told += check_part(part, fresh) if check else []
    return part.architecture, told


def _part(trained: Trained) -> bert.TransformersModel:
    """Model class in transformers of a fine-tuned model."""
    task, model, *_ = trained
    return bert.TransformersModel(_kind(model.body, task), model.body, task_head=(_TASKS[task], model, _HEADS[task]))


def _kind(body: Bert, task: str) -> str:
    """Model type in transformers that computes the same as a body."""
    if body.embedding_projection is None and body.config.share == "none":
        return "bert"
    return "electra" if task == "squad" and body.config.share == "none" else "albert"
