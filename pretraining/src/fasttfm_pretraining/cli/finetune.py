"""Fine-tunes a BERT, ALBERT or ELECTRA for answers, choices or classes, or a GPT for choices or classes."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import Parser, add_device, add_model
from fasttfm.cli.paths import INPUT_FILE, MODEL, OUTPUT_FILE
from fasttfm.cli.train import SHOWN, add_recipe_flags, lists_presets, run_task
from fasttfm.cli.verbs import Verb
from fasttfm.config import add_flags
from fasttfm.config.presets import preset_names, preset_path
from fasttfm.errors import UserError
from fasttfm.store.model_dir import read_kind
from fasttfm.store.run_log import LOG_FILE
from fasttfm_pretraining.cli import distill
from fasttfm_pretraining.cli.shared import add_huggingface_export, add_huggingface_import
from fasttfm_pretraining.cli.task_flags import add_task_files, given_columns

_TASKS = {
    "squad": "train to find answers in a context (JSON of SQuAD 1.1 or 2.0)",
    "choices": "train to choose how a text continues (CSV of SWAG)",
    "classify": "train to classify texts or pairs (CSV, TSV or JSON lines with a column label)",
}


def _add_training(task: str, parser: Parser) -> None:
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--init-from", type=MODEL, help="pre-trained model directory to start from")
    start.add_argument(
        "--like",
        type=MODEL,
        help="start from random weights with the shape and vocabulary of MODEL, to measure what pre-training is worth",
    )
    add_task_files(parser, with_columns=task == "classify")
    add_recipe_flags(parser, preset_names("finetune"))
    add_flags(parser, ["data", "training"], kind=task)
    parser.shorten(
        *(*SHOWN, "--like", "--train", "--valid", "--columns"),
        examples=f"fasttfm finetune {task} --init-from MODEL --train TRAIN --valid VALID --out TUNED",
    )


def _train(task: str, args: argparse.Namespace) -> int:
    from fasttfm_pretraining.training.finetuning import FineTuning, TaskFiles, kind_of_task

    if lists_presets(args):
        return 0
    body = args.init_from or args.like
    args.config = [preset_path(args.preset or _preset_of(body), "finetune"), *args.config]
    args.preset, args.data = None, args.train
    return run_task(
        args,
        kind_of_task(task, body),
        f"fasttfm finetune {task}",
        lambda: FineTuning(TaskFiles(task, body, args.train, args.valid, given_columns(args))),
    )


def _preset_of(body: Path) -> str:
    """Default fine-tuning recipe of a body; an imported one uses the recipe of its family."""
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
        help="file in the format of the training data; answers and labels are not read and may be missing",
    )
    parser.add_argument(
        "--out", type=OUTPUT_FILE, required=True, help="JSON file to write, of ids and answers or of labels"
    )
    parser.add_argument(
        "--null-scores",
        type=OUTPUT_FILE,
        help="JSON file to write, of each question's null score: how likely it has no answer",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        help="null score above which the answer is empty (default: the best on the training's validation data)",
    )
    parser.add_argument("--max-tokens", type=int, help="largest batch in tokens (default: as in training)")
    add_output_flags(parser, "how many answers were written where")


def _predict(args: argparse.Namespace) -> None:
    from fasttfm.system.machine import pick_device
    from fasttfm_pretraining.data.answers import write_json
    from fasttfm_pretraining.training.task_prediction import FineTuned

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
    parser.add_argument(
        "predictions", type=INPUT_FILE, metavar="PREDICTIONS", help="predictions that fasttfm finetune predict wrote"
    )
    parser.add_argument("file", type=INPUT_FILE, metavar="FILE", help="file with the correct answers or labels")
    parser.add_argument(
        "--null-scores", type=INPUT_FILE, help="null scores that predict wrote: also print the best thresholds"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        help="null score above which an answer counts as empty (default: take the answers as predict wrote them)",
    )
    add_output_flags(parser, "the scores")


def _evaluate(args: argparse.Namespace) -> None:
    from fasttfm_pretraining.data.task_scores import score_file

    numbers: dict[str, Any] = score_file(args.predictions, args.file, args.null_scores, args.threshold)
    width = max(map(len, numbers))
    shown = {name: f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" for name, value in numbers.items()}
    lines = [f"{name.ljust(width)}  {value}" for name, value in shown.items()]
    Output.of(args, "finetune evaluate").result("\n".join(lines), **numbers)


def _add_import(parser: argparse.ArgumentParser) -> None:
    add_huggingface_import(
        parser,
        "Hugging Face folder of a BERT, ALBERT or RoBERTa with a trained head (for answers also ELECTRA or DistilBERT)",
    )
    parser.add_argument(
        "--abstains", action="store_true", help="the model was trained on SQuAD 2.0, so it may give no answer"
    )


def _import(args: argparse.Namespace) -> None:
    import torch

    from fasttfm_pretraining.interop.heads import import_folder

    torch.manual_seed(0)  # of a head that the folder has not: every import gives the same
    trained, left_out = import_folder(args.folder, args.out, abstains=args.abstains, check=args.check)
    told = f"{trained.task}, labels {', '.join(trained.labels)}" if trained.task == "classify" else trained.task
    output = Output.of(args, args.verb)
    output.result(f"{args.out}: {told}", model=str(args.out), task=trained.task, told=left_out)


def _export(args: argparse.Namespace) -> None:
    from fasttfm_pretraining.interop.heads import Trained, export_folder
    from fasttfm_pretraining.training.task_prediction import FineTuned

    model = FineTuned.load(args.model, args.checkpoint)
    if model.kind != model.task:
        raise UserError(f"{args.model}: is a GPT with its own marker tokens, which no class of transformers has")
    trained = Trained(model.task, model.model, model.labels, model.abstains, model.threshold())
    name, told = export_folder(trained, args.out, model.tokenizer, check=args.check)
    Output.of(args, "finetune export").result(f"{args.out}: {name}", folder=str(args.out), architecture=name, told=told)


VERBS = {
    **{task: Verb(partial(_add_training, task), partial(_train, task), summary) for task, summary in _TASKS.items()},
    "distill": distill.TASK,
    "predict": Verb(_add_predict, _predict, "write a fine-tuned model's predictions for a file"),
    "import": Verb(_add_import, _import, "convert a Hugging Face model with a trained head"),
    "export": Verb(
        partial(add_huggingface_export, made_by="fasttfm finetune"),
        _export,
        "write a model with its head for Hugging Face's transformers",
    ),
    "evaluate": Verb(_add_evaluate, _evaluate, "score predictions: exact match and F1, or accuracy"),
}
