"""Verbs that `fasttfm lm` and `fasttfm mlm` share: prepare, train and export."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fasttfm.cli.export import add_check
from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import THREADS, Parser, add_model, add_out
from fasttfm.cli.paths import INPUT_FILE, INPUT_FOLDER
from fasttfm.cli.train import SHOWN, add_run_flags, lists_presets, run_task
from fasttfm.cli.verbs import Verb
from fasttfm.config import add_field_flags, all_fields, field_types, field_values, kind_of
from fasttfm.config.fields import flag_name
from fasttfm.config.presets import preset_names
from fasttfm.errors import UserError
from fasttfm_pretraining.config.data import DocumentOptions
from fasttfm_pretraining.kinds import KINDS, kinds_of

_SETTINGS = ("valid_share", "vocab_size")
"""Fields of DocumentOptions whose flags have their names."""


def _add_prepare(parser: Parser) -> None:
    parser.apart = [("--bytes", "--spm"), ("--bytes", "--vocab-size"), ("--spm", "--vocab-size")]
    file: dict[str, Any] = {"nargs": "+", "action": "extend", "type": INPUT_FILE, "metavar": "FILE"}
    text = "UTF-8 text, plain or compressed by gzip, bzip2, xz or zstandard; may be repeated"
    parser.add_argument("--text", required=True, help=text, **file)
    parser.add_argument("--valid", default=[], help="validation text (default: the end of each --text)", **file)
    add_out(parser, "DATA", "directory to write")
    parser.add_argument(
        "--document-separator",
        metavar="LINE",
        help='line that ends a document; "": an empty line. A model never sees one document while it reads '
        "another (default: each file is one document)",
    )
    add_field_flags(parser, DocumentOptions, _SETTINGS)
    parser.add_argument("--bytes", action="store_true", help="use bytes as tokens in place of subwords")
    text = "SentencePiece model or tokenizer.json to use in place of training one"
    parser.add_argument("--spm", type=INPUT_FILE, help=text)
    parser.add_argument("--threads", type=THREADS, default=1, help="CPU threads (default: %(default)s)")
    add_output_flags(parser, "the directory and what was told")


def _prepare(args: argparse.Namespace) -> None:
    from fasttfm_pretraining.data.prepare_documents import prepare_documents

    options = DocumentOptions(
        vocabulary="bytes" if args.bytes else "pieces",
        document_separator=args.document_separator,
        **field_values(args, _SETTINGS),
    )
    output = Output.of(args, args.verb)
    prepare_documents(
        args.text, args.out, options, valid_texts=args.valid, model=args.spm, threads=args.threads, say=output.note
    )
    if args.json:
        output.result("", out=str(args.out), notes=output.notes)


PREPARE = Verb(_add_prepare, _prepare, "turn text files into a prepared data directory")


def train_verb(command: str, widest: str, task: Callable[[str], Any], summary: str, default: str | None = None) -> Verb:
    """The `train` verb of a command; the preset or configuration names the kind of model.

    widest: the kind whose flags come first; the other kinds add theirs. task: makes the training.task.Task of a kind.
    default: the kind if neither preset nor configuration names one.
    """
    return Verb(partial(_add_train, command, widest), partial(_train, command, task, default), summary)


def _add_train(command: str, widest: str, parser: Parser) -> None:
    kinds = kinds_of(command)
    presets = [name for kind in kinds for name in preset_names(kind)]
    add_run_flags(parser, widest, f"fasttfm {command} prepare", presets)
    for kind in kinds:
        model = KINDS[kind].model
        if more := [name for name in field_types(model) if name not in all_fields(widest)]:
            add_field_flags(parser.add_argument_group(f"model settings of a {kind.capitalize()}"), model, more)
    parser.shorten(
        *SHOWN, "--layers", examples=f"fasttfm {command} train --preset {presets[0]} --data DATA --out MODEL"
    )


def _train(command: str, task: Callable[[str], Any], default: str | None, args: argparse.Namespace) -> int:
    """Train. Raises UserError for settings of another kind than the run's."""
    if lists_presets(args):
        return 0
    kinds = kinds_of(command)
    kind = _kind_of_run(args, kinds, default)
    for other in kinds:
        for name in set(all_fields(other)) - set(all_fields(kind)):
            if hasattr(args, name):
                raise UserError(f"{flag_name(name)} belongs to a model of kind {other}, and this one is of kind {kind}")
    return run_task(args, kind, f"fasttfm {command} train", lambda: task(kind))


def _kind_of_run(args: argparse.Namespace, allowed: Sequence[str], default: str | None) -> str:
    """Kind of model of the preset or the configuration file. Raises UserError if neither names one."""
    kinds = {name: kind for kind in allowed for name in preset_names(kind)}
    if args.preset is not None:
        if args.preset not in kinds:
            raise UserError(f"preset {args.preset!r} is unknown: there are {', '.join(sorted(kinds))}")
        return kinds[args.preset]
    said = [kind_of(path) for path in args.config if path.is_file()]
    for kind in [*said, default]:
        if kind is not None and kind in allowed:
            return kind
    raise UserError(f"--preset is missing: there are {', '.join(sorted(kinds))}")


def add_huggingface_import(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the flags for importing a Hugging Face folder. text: the kinds of folders accepted."""
    parser.add_argument("folder", type=INPUT_FOLDER, metavar="FOLDER", help=text)
    add_out(parser, "MODEL", "model directory to write")
    add_check(parser)
    add_output_flags(parser, "what was written")


def add_huggingface_export(parser: argparse.ArgumentParser, made_by: str) -> None:
    """Add the flags for exporting to a Hugging Face folder. made_by: commands that make the model."""
    add_model(parser, made_by)
    add_out(parser, "FOLDER", "folder to write")
    add_check(parser)
    add_output_flags(parser, "what was written")


def export_verb(command: str, made_by: str, write: Callable[..., list[str]]) -> Verb:
    """The verb that writes a model as a Hugging Face folder. write(model, folder, tokenizer, check) returns lines for
    the user."""
    add_arguments = partial(add_huggingface_export, made_by=made_by)
    return Verb(add_arguments, partial(_export, command, write), "write a model for Hugging Face")


def _export(command: str, write: Callable[..., list[str]], args: argparse.Namespace) -> None:
    from fasttfm_pretraining.data.text_tokenizer import load_text_tokenizer
    from fasttfm_pretraining.models.kinds import read_model

    model, tokenizer = read_model(command, args.model, args.checkpoint), load_text_tokenizer(args.model)
    told = write(model, args.out, tokenizer, check=args.check)
    Output.of(args, args.verb).result(f"Hugging Face folder: {args.out}", folder=str(args.out), told=told)
