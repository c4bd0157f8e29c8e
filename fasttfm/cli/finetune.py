"""Fine-tune a BERT, ALBERT or ELECTRA (choices and classes also a GPT) of a model directory."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from fasttfm.checkpoints.model_dir import read_kind
from fasttfm.checkpoints.run_log import LOG_FILE
from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import add_device, add_huggingface_export, add_huggingface_import, add_model
from fasttfm.cli.paths import INPUT_FILE, MODEL, OUTPUT_FILE, TRAINED_MODEL
from fasttfm.cli.train import add_recipe_flags, lists_presets, run_task
from fasttfm.cli.verbs import Verb
from fasttfm.config import add_flags
from fasttfm.errors import UserError
from fasttfm.presets import preset_names, preset_path

_TASKS = {
    "squad": "find answers in a context: SQuAD 1.1 and 2.0, official JSON",
    "choices": "choose how a text continues: SWAG, official CSV",
    "classify": "classify texts or pairs of them: CSV, TSV or JSON lines with a column label",
}


def _add_training(task: str, parser: argparse.ArgumentParser) -> None:
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--init-from", type=MODEL, metavar="MODEL", help="pre-trained model directory to begin with")
    start.add_argument(
        "--like",
        type=MODEL,
        metavar="MODEL",
        help="begin with fresh weights in the shape and with the vocabulary of MODEL: what was pre-training worth?",
    )
    for name in ("train", "valid"):
        parser.add_argument(
            f"--{name}", type=INPUT_FILE, required=True, metavar="FILE", help=f"{name} data, plain or packed"
        )
    parser.add_argument(
        "--out", type=TRAINED_MODEL, required=True, metavar="MODEL", help="directory to create or to go on with"
    )
    if task == "classify":
        parser.add_argument("--columns", metavar="A,B", help="the column of the text, or the two of a pair")
    add_recipe_flags(parser, preset_names("finetune"))
    add_flags(parser, ["data", "training"], kind=task)


def _train(task: str, args: argparse.Namespace) -> int:
    from fasttfm.training.finetuning import FineTuning, TaskFiles, kind_of_task

    if lists_presets(args):
        return 0
    body = args.init_from or args.like
    args.config = [preset_path(args.preset or _preset_of(body), "finetune"), *args.config]
    args.preset, args.data = None, args.train
    columns = [name.strip() for name in (getattr(args, "columns", None) or "").split(",") if name.strip()]
    return run_task(
        args,
        kind_of_task(task, body),
        f"fasttfm finetune {task}",
        lambda: FineTuning(TaskFiles(task, body, args.train, args.valid, columns)),
    )


def _preset_of(body: Path) -> str:
    """The recipe that a body is fine-tuned by where none is given: an imported one's is its family's."""
    if (body / LOG_FILE).is_file():
        return "tiny"
    return "gpt" if read_kind(body).startswith("gpt") else "bert"


def _add_predict(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "fasttfm finetune")
    add_device(parser)
    parser.add_argument(
        "file",
        type=INPUT_FILE,
        metavar="FILE",
        help="in the form of the task's training data; answers and labels are not read, and may be missing",
    )
    parser.add_argument(
        "--out", type=OUTPUT_FILE, required=True, metavar="FILE", help="JSON of ids and answers, or of labels"
    )
    parser.add_argument(
        "--null-scores", type=OUTPUT_FILE, metavar="FILE", help="write how much each question has no answer"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="X",
        help="null score above which there is no answer (default: the best on the validation data of the training)",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of a batch (default: as in training)")
    add_output_flags(parser, "how many answers were written where")


def _predict(args: argparse.Namespace) -> None:
    from fasttfm.data.answers import write_json
    from fasttfm.decoding.translator import pick_device
    from fasttfm.training.task_prediction import FineTuned

    output = Output.of(args, "finetune predict")
    model = FineTuned.load(args.model, args.checkpoint, pick_device(args.device))
    if model.task != "squad":
        if args.null_scores is not None or args.threshold is not None:
            raise UserError(
                f"{args.model}: is of {model.task}, null scores and thresholds are of squad: leave them out"
            )
        labels = model.labels_of(args.file, args.max_tokens)
        write_json(args.out, {str(number): label for number, label in enumerate(labels)})
        output.result(f"{args.out}: {len(labels):,} labels", out=str(args.out), labels=len(labels))
        return
    _, predictions = model.answers_to(args.file, args.max_tokens)
    threshold = args.threshold
    if threshold is None and model.abstains:
        threshold = model.threshold()
    texts = predictions.texts(threshold)
    write_json(args.out, texts)
    if args.null_scores is not None:
        write_json(args.null_scores, predictions.null_scores)
    empty = sum(not text for text in texts.values())
    told = "" if threshold is None else f", {empty:,} of them empty (null score above {threshold:.3f})"
    numbers = {"answers": len(texts), "empty": empty, "threshold": threshold}
    output.result(f"{args.out}: {len(texts):,} answers{told}", out=str(args.out), **numbers)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("predictions", type=INPUT_FILE, metavar="PREDICTIONS", help="what predict has written")
    parser.add_argument("file", type=INPUT_FILE, metavar="FILE", help="with the right answers or labels")
    parser.add_argument(
        "--null-scores", type=INPUT_FILE, metavar="FILE", help="search the best thresholds by these, too"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="X",
        help="null score above which an answer counts as empty (default: answers stand, as predict wrote them by the "
        "model's own threshold)",
    )
    add_output_flags(parser, "the scores")


def _evaluate(args: argparse.Namespace) -> None:
    from fasttfm.data.task_scores import score_file

    numbers: dict[str, Any] = score_file(args.predictions, args.file, args.null_scores, args.threshold)
    width = max(map(len, numbers))
    shown = {name: f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" for name, value in numbers.items()}
    lines = [f"{name.ljust(width)}  {value}" for name, value in shown.items()]
    Output.of(args, "finetune evaluate").result("\n".join(lines), **numbers)


def _add_import(parser: argparse.ArgumentParser) -> None:
    add_huggingface_import(
        parser, "of Hugging Face: a BERT, ALBERT, RoBERTa (answers also ELECTRA, DistilBERT) with a trained head"
    )
    parser.add_argument(
        "--abstains",
        action="store_true",
        help="the model was trained on SQuAD 2.0 and may answer that there is no answer",
    )


def _import(args: argparse.Namespace) -> None:
    from fasttfm.interop.heads import import_folder

    trained, left_out = import_folder(args.folder, args.out, abstains=args.abstains)
    told = f"{trained.task}, labels {', '.join(trained.labels)}" if trained.task == "classify" else trained.task
    output = Output.of(args, args.verb)
    output.result(f"{args.out}: {told}", model=str(args.out), task=trained.task, told=left_out)


def _export(args: argparse.Namespace) -> None:
    from fasttfm.interop.heads import Trained, export_folder
    from fasttfm.training.task_prediction import FineTuned

    model = FineTuned.load(args.model, args.checkpoint)
    if model.kind != model.task:
        raise UserError(f"{args.model}: is a GPT with its own marker tokens, which no class of transformers has")
    trained = Trained(model.task, model.model, model.labels, model.abstains, model.threshold())
    name = export_folder(trained, args.out, model.tokenizer)
    Output.of(args, "finetune export").result(f"{args.out}: {name}", folder=str(args.out), architecture=name)


VERBS = {
    **{task: Verb(partial(_add_training, task), partial(_train, task), summary) for task, summary in _TASKS.items()},
    "predict": Verb(_add_predict, _predict, "write a fine-tuned model's answers to a file's questions"),
    "import": Verb(_add_import, _import, "take a Hugging Face folder of a model with a task's head"),
    "export": Verb(
        partial(add_huggingface_export, made_by="fasttfm finetune"),
        _export,
        "write a folder that Hugging Face's transformers loads, head included",
    ),
    "evaluate": Verb(_add_evaluate, _evaluate, "score predictions: exact match and F1, or accuracy"),
}
