"""Trains, evaluates and runs language models: GPT and Llama."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import (
    add_checkpoint,
    add_device,
    add_huggingface_export,
    add_huggingface_import,
    add_model,
    add_out,
)
from fasttfm.cli.paths import INPUT_FILE, INPUT_FOLDER, MODEL
from fasttfm.cli.train import add_run_flags, run_task_of_kind
from fasttfm.cli.verbs import Verb
from fasttfm.config import all_fields, field_types
from fasttfm.config.flags import add_field_flags
from fasttfm.errors import UserError
from fasttfm.presets import preset_names
from fasttfm.pretraining.kinds import KINDS, kinds_of

_KINDS = kinds_of("lm")
_MADE_BY = "fasttfm lm train or fasttfm lm import"


# ------------------------------------------------------------------------------------------------------------ prepare


def add_prepare_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that turning text into prepared documents takes."""
    file: dict[str, Any] = {"nargs": "+", "action": "extend", "type": INPUT_FILE, "metavar": "FILE"}
    parser.add_argument(
        "--text",
        required=True,
        help="UTF-8 text, plain or compressed by gzip, bzip2, xz or zstandard; may be repeated",
        **file,
    )
    parser.add_argument("--valid", default=[], help="validation text (default: the end of each --text)", **file)
    add_out(parser, "DATA", "directory to write")
    parser.add_argument(
        "--document-separator",
        metavar="LINE",
        help='line that ends a document; "": an empty line. A model never sees one document while it reads '
        "another (default: each file is one document)",
    )
    parser.add_argument(
        "--valid-share",
        type=float,
        default=0.05,
        metavar="X",
        help="share of each --text that is held out where --valid is not given (default: %(default)s)",
    )
    parser.add_argument(
        "--vocab-size", type=int, default=8000, metavar="N", help="size of the vocabulary (default: %(default)s)"
    )
    parser.add_argument("--bytes", action="store_true", help="use bytes as tokens in place of subwords")
    parser.add_argument(
        "--spm",
        type=INPUT_FILE,
        metavar="FILE",
        help="SentencePiece model or tokenizer.json to use in place of training one",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: %(default)s)")
    add_output_flags(parser, "the directory and what was told")


def run_prepare(args: argparse.Namespace) -> None:
    """Write the prepared documents."""
    from fasttfm.pretraining.data.prepare_documents import DocumentOptions, prepare_documents

    if args.bytes and args.spm:
        raise UserError("--bytes and --spm exclude each other: give one of them")
    options = DocumentOptions(
        vocabulary="bytes" if args.bytes else "pieces",
        vocab_size=args.vocab_size,
        document_separator=args.document_separator,
        valid_share=args.valid_share,
    )
    output, threads = Output.of(args, args.verb), max(1, args.threads)
    prepare_documents(
        args.text, args.out, options, valid_texts=args.valid, model=args.spm, threads=threads, say=output.note
    )
    if args.json:
        output.result("", out=str(args.out), notes=output.notes)


# -------------------------------------------------------------------------------------------------------------- train


def _add_train(parser: argparse.ArgumentParser) -> None:
    presets = [name for kind in _KINDS for name in preset_names(kind)]
    add_run_flags(parser, "gpt", "fasttfm lm prepare", presets)
    llama = KINDS["llama"].model
    more = [name for name in field_types(llama) if name not in all_fields("gpt")]
    add_field_flags(parser.add_argument_group("model settings of a Llama"), llama, more)


def _train(args: argparse.Namespace) -> int:
    def task(kind: str) -> Any:
        from fasttfm.pretraining.training.language_modelling import LanguageModelling

        return LanguageModelling(kind)

    return run_task_of_kind(args, _KINDS, "fasttfm lm train", task, "gpt")


# ------------------------------------------------------------------------------------------------- a model that exists


def _add_model(parser: argparse.ArgumentParser) -> None:
    add_model(parser, _MADE_BY)
    add_device(parser)


def _model(args: argparse.Namespace, folder: Path | None = None) -> tuple[Any, Any]:
    """The model of a folder, args.model where None, on its device; and its tokenizer."""
    from fasttfm.data.text_tokenizer import load_text_tokenizer
    from fasttfm.decoding.translator import pick_device

    device = pick_device(args.device)
    folder = folder or args.model
    return _read_model(folder, args.checkpoint).to(device), load_text_tokenizer(folder)


def _read_model(folder: Path, checkpoint: str) -> Any:
    from fasttfm.checkpoints.model_dir import read_kind
    from fasttfm.pretraining.models.kinds import model_class

    kind = read_kind(folder)
    if kind not in _KINDS:
        raise UserError(f"{folder}: is of a model of kind {kind}: {' or '.join(_KINDS)} is needed")
    return model_class(kind).from_pretrained(folder, checkpoint)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--data", type=INPUT_FOLDER, metavar="DATA", help="prepared documents; their held-out part is evaluated"
    )
    parser.add_argument(
        "--text", type=INPUT_FILE, metavar="FILE", help="text file to evaluate as one document, in place of --data"
    )
    parser.add_argument(
        "--row-length", type=int, metavar="N", help="length of a row in tokens (default: as in training)"
    )
    add_output_flags(parser, "the score")


def _evaluate(args: argparse.Namespace) -> None:
    from fasttfm.pretraining.training.language_modelling import evaluate

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
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="largest number of new tokens (default: %(default)s)"
    )
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="number of texts (default: %(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="divisor of the logits; 0: always take the likeliest token (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="N",
        help="draw from the N likeliest tokens; 0: from all (default: %(default)s)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="draw from the fewest tokens whose probabilities sum to X (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        metavar="N",
        help="seed; the same seed gives the same text (default: %(default)s)",
    )
    add_output_flags(parser, "the texts")


def _generate(args: argparse.Namespace) -> None:
    from fasttfm.pretraining.decoding.continuation import Sampling, generate

    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    model, tokenizer = _model(args)
    texts = list(generate(model, tokenizer, args.prompt, args.tokens, args.samples, sampling))
    Output.of(args, args.verb).result("\n---\n".join(texts), texts=texts)


def _add_questions(parser: argparse.ArgumentParser) -> None:
    """Examples, and how they become prompts."""
    parser.add_argument(
        "--examples",
        type=INPUT_FILE,
        required=True,
        metavar="FILE",
        help='JSON file: [{"text": ..., "options": [...], "answer": "the correct option", ...}, ...]',
    )
    parser.add_argument(
        "--template",
        default="{text} {answer}",
        metavar="TEXT",
        help="how to write an example, with its fields in braces; text after {answer} is ignored (default: "
        "%(default)s)",
    )
    parser.add_argument("--options", nargs="+", metavar="TEXT", help="options of examples that have none")
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed that chooses the solved examples (default: %(default)s)"
    )
    parser.add_argument("--normalize", action="store_true", help="divide each option's log-probability by its bytes")


def _questions(args: argparse.Namespace, shots: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """The examples, and how they are asked with each number of solved ones."""
    from fasttfm.pretraining.decoding.prompting import Prompting, read_examples

    examples = read_examples(args.examples, args.options or [])
    options = {"template": args.template, "seed": args.seed, "normalize": args.normalize}
    return examples, [Prompting(shots=number, **options) for number in shots]


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_questions(parser)
    parser.add_argument(
        "--shots",
        type=int,
        default=0,
        metavar="N",
        help="number of solved examples before each question (default: %(default)s)",
    )
    add_output_flags(parser, "the answers and how many are right")


def _prompt(args: argparse.Namespace) -> None:
    examples, (prompting,) = _questions(args, [args.shots])
    model, tokenizer = _model(args)
    answers = prompting.answers(model, tokenizer, examples)
    wanted = [example.answer for example in examples]
    right = sum(map(eq, answers, wanted))
    lines = [f"{'right' if answer == want else 'wrong'}\t{answer}\t{want}" for answer, want in zip(answers, wanted)]
    Output.of(args, args.verb).result(
        "\n".join([*lines, f"{right} of {len(wanted)} right ({right / len(wanted):.1%}), {args.shots} shots"]),
        answers=answers, wanted=wanted, right=right, shots=args.shots,
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
        metavar="N",
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
    from fasttfm.pretraining.interop.causal import import_folder

    told = import_folder(args.folder, args.out)
    Output.of(args, args.verb).result(f"model: {args.out}", model=str(args.out), told=told)


def _export(args: argparse.Namespace) -> None:
    from fasttfm.data.text_tokenizer import load_text_tokenizer
    from fasttfm.pretraining.interop.causal import export_folder

    told = export_folder(_read_model(args.model, args.checkpoint), args.out, load_text_tokenizer(args.model))
    Output.of(args, args.verb).result(f"Hugging Face folder: {args.out}", folder=str(args.out), told=told)


VERBS = {
    "prepare": Verb(add_prepare_flags, run_prepare, "turn text files into a prepared data directory"),
    "train": Verb(_add_train, _train, "train a GPT or Llama on prepared documents, or resume"),
    "evaluate": Verb(_add_evaluate, _evaluate, "print loss, perplexity and bits per byte of held-out text"),
    "generate": Verb(_add_generate, _generate, "continue a prompt"),
    "prompt": Verb(
        _add_prompt, _prompt, "answer multiple-choice questions by likelihood, with or without solved examples"
    ),
    "few-shot": Verb(_add_few_shot, _few_shot, "print right answers by model and number of solved examples"),
    "import": Verb(_add_import, _import, "convert a Hugging Face model"),
    "export": Verb(partial(add_huggingface_export, made_by=_MADE_BY), _export, "write a model for Hugging Face"),
}
