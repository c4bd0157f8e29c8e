"""Trains, evaluates and runs language models: GPT and Llama."""

import argparse
from collections.abc import Sequence
from operator import eq
from pathlib import Path
from typing import Any

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import add_checkpoint, add_device, add_model
from fasttfm.cli.paths import INPUT_FILE, LOADED_FOLDER, MODEL
from fasttfm.cli.verbs import Verb
from fasttfm.config import add_field_flags, field_types, field_values
from fasttfm.errors import UserError
from fasttfm_pretraining.cli.shared import PREPARE, add_huggingface_import, export_verb, train_verb
from fasttfm_pretraining.config.sampling import Sampling
from fasttfm_pretraining.decoding.prompting import Prompting, read_examples

_MADE_BY = "fasttfm lm train or fasttfm lm import"
_PROMPTING = ("template", "seed", "normalize")
"""Fields of Prompting whose flags prompt and few-shot share."""


def _task(kind: str) -> Any:
    from fasttfm_pretraining.training.language_modelling import LanguageModelling

    return LanguageModelling(kind)


# ------------------------------------------------------------------------------------------------- a model that exists


def _add_model(parser: argparse.ArgumentParser) -> None:
    add_model(parser, _MADE_BY)
    add_device(parser)


def _model(args: argparse.Namespace, folder: Path | None = None) -> tuple[Any, Any]:
    """Load the model of a folder (None: args.model) onto its device, and its tokenizer."""
    from fasttfm.system.machine import pick_device
    from fasttfm_pretraining.data.text_tokenizer import load_text_tokenizer
    from fasttfm_pretraining.models.kinds import read_model

    folder = folder or args.model
    model = read_model("lm", folder, args.checkpoint).to(pick_device(args.device))
    return model, load_text_tokenizer(folder)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--data", type=LOADED_FOLDER, metavar="DATA", help="prepared documents; their held-out part is evaluated"
    )
    parser.add_argument("--text", type=INPUT_FILE, help="text file to evaluate as one document, in place of --data")
    parser.add_argument("--row-length", type=int, help="length of a row in tokens (default: as in training)")
    add_output_flags(parser, "the score")


def _evaluate(args: argparse.Namespace) -> None:
    from fasttfm_pretraining.training.language_modelling import evaluate

    if (args.data is None) == (args.text is None):
        raise UserError("give either --data DATA or --text FILE to evaluate on")
    model, tokenizer = _model(args)
    score = evaluate(model, tokenizer, args.model, data=args.data, text=args.text, row_length=args.row_length)
    Output.of(args, args.verb).result(str(score), **score.record())


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--prompt",
        default="",
        metavar="TEXT",
        help="start of the text; the model reads an end-of-document token before it (default: empty)",
    )
    parser.add_argument("--tokens", type=int, default=200, help="largest number of new tokens (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=1, help="number of texts (default: %(default)s)")
    add_field_flags(parser, Sampling, field_types(Sampling))
    add_output_flags(parser, "the texts")


def _generate(args: argparse.Namespace) -> None:
    from fasttfm_pretraining.decoding.continuation import generate

    sampling = Sampling(**field_values(args, field_types(Sampling)))
    model, tokenizer = _model(args)
    texts = list(generate(model, tokenizer, args.prompt, args.tokens, args.samples, sampling))
    Output.of(args, args.verb).result("\n---\n".join(texts), texts=texts)


def _add_questions(parser: argparse.ArgumentParser) -> None:
    """Examples and their prompt settings."""
    parser.add_argument(
        "--examples",
        type=INPUT_FILE,
        required=True,
        help='JSON file: [{"text": ..., "options": [...], "answer": "the correct option", ...}, ...]',
    )
    parser.add_argument("--options", nargs="+", metavar="TEXT", help="options of examples that have none")
    add_field_flags(parser, Prompting, _PROMPTING)


def _questions(args: argparse.Namespace, shots: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """The examples, and the prompt settings for each number of solved examples."""
    examples = read_examples(args.examples, args.options or [])
    options = field_values(args, _PROMPTING)
    return examples, [Prompting(shots=number, **options) for number in shots]


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_questions(parser)
    add_field_flags(parser, Prompting, ["shots"])
    add_output_flags(parser, "the answers and how many are right")


def _prompt(args: argparse.Namespace) -> None:
    shots = field_values(args, ["shots"]).get("shots", 0)
    examples, (prompting,) = _questions(args, [shots])
    model, tokenizer = _model(args)
    answers = prompting.answers(model, tokenizer, examples)
    wanted = [example.answer for example in examples]
    right = sum(map(eq, answers, wanted))
    lines = [f"{'right' if answer == want else 'wrong'}\t{answer}\t{want}" for answer, want in zip(answers, wanted)]
    Output.of(args, args.verb).result(
        "\n".join([*lines, f"{right} of {len(wanted)} right ({right / len(wanted):.1%}), {shots} shots"]),
        answers=answers, wanted=wanted, right=right, shots=shots,
    )  # fmt: skip


def _add_few_shot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", type=MODEL, metavar="MODEL", help=f"model directories made by {_MADE_BY}")
    add_checkpoint(parser)
    add_device(parser)
    _add_questions(parser)
    parser.add_argument(
        "--shots",
        type=int,
        nargs="+",
        default=[0, 1, 4],
        help="numbers of solved examples before each question (default: 0 1 4)",
    )
    add_output_flags(parser, "the share of right answers by model and number of solved examples")


def _few_shot(args: argparse.Namespace) -> None:
    examples, prompts = _questions(args, args.shots)
    rows = []
    for folder in args.models:
        model, tokenizer = _model(args, folder)
        size = sum(parameter.numel() for parameter in model.parameters())
        right = [
            sum(answer == example.answer for answer, example in zip(each.answers(model, tokenizer, examples), examples))
            for each in prompts
        ]
        rows.append({"model": str(folder), "parameters": size, "right": right})
    rows.sort(key=lambda row: row["parameters"])
    lines = ["\t".join(["model", "parameters", *(f"{number} shots" for number in args.shots)])]
    for row in rows:
        shares = (f"{right / len(examples):.1%}" for right in row["right"])
        lines.append("\t".join([row["model"], f"{row['parameters']:,}", *shares]))
    Output.of(args, args.verb).result("\n".join(lines), shots=args.shots, examples=len(examples), models=rows)


# ------------------------------------------------------------------------------------------------------ Hugging Face


def _add_import(parser: argparse.ArgumentParser) -> None:
    add_huggingface_import(parser, "a GPT-2, GPT-1 or Llama of Hugging Face")


def _import(args: argparse.Namespace) -> None:
    from fasttfm_pretraining.interop.causal import import_folder

    told = import_folder(args.folder, args.out, check=args.check)
    Output.of(args, args.verb).result(f"model: {args.out}", model=str(args.out), told=told)


def _write(*model: Any, check: bool) -> list[str]:
    from fasttfm_pretraining.interop.causal import export_folder

    return export_folder(*model, check=check)


VERBS = {
    "prepare": PREPARE,
    "train": train_verb("lm", "gpt", _task, "train a GPT or Llama on prepared documents, or resume", default="gpt"),
    "evaluate": Verb(_add_evaluate, _evaluate, "print loss, perplexity and bits per byte of held-out text"),
    "generate": Verb(_add_generate, _generate, "continue a prompt"),
    "prompt": Verb(
        _add_prompt, _prompt, "answer multiple-choice questions by likelihood, with or without solved examples"
    ),
    "few-shot": Verb(_add_few_shot, _few_shot, "print right answers by model and number of solved examples"),
    "import": Verb(_add_import, _import, "convert a Hugging Face model"),
    "export": export_verb("lm", _MADE_BY, _write),
}
