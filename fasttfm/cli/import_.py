"""Converts another tool's model to a model directory for translate, export and serve. Runs no code from its files."""

import argparse
import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from fasttfm.cli.export import add_check
from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import add_out
from fasttfm.cli.paths import INPUT, INPUT_FILE
from fasttfm.errors import UserError

if TYPE_CHECKING:
    from fasttfm.convert.exchange import Model

FORMATS = {
    "marian-hf": ("fasttfm.convert.marian", "MarianMTModel with MarianTokenizer, such as OPUS-MT"),
    "m2m100": ("fasttfm.convert.m2m100", "M2M100ForConditionalGeneration, such as M2M-100 and NLLB"),
    "fairseq": ("fasttfm.convert.fairseq", "a checkpoint of fairseq-train, with --dict and --spm or --codes"),
    "ctranslate2": ("fasttfm.convert.ctranslate2_read", "the output of CTranslate2's converters"),
}
"""Format -> (module, description). The module has read(folder, source_language=..., target_language=...) -> Model;
fairseq's takes a checkpoint, dictionaries and SentencePiece models or codes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        type=INPUT,
        metavar="DIR",
        help="model saved by the other tool: a directory, or fairseq's checkpoint file",
    )
    parser.add_argument(
        "--format",
        required=True,
        choices=FORMATS,
        help="; ".join(f"{name}: {description}" for name, (_, description) in FORMATS.items()),
    )
    add_out(parser, "MODEL", "model directory to write")
    for name, what in (
        ("dict", "dict.LANG.txt"),
        ("spm", "SentencePiece model"),
        ("codes", "fastBPE's or subword-nmt's codes"),
    ):
        parser.add_argument(
            f"--{name}",
            type=INPUT_FILE,
            action="append",
            default=[],
            help=f"{what} of a fairseq model; give it once for both sides, or the source's and then the target's",
        )
    for side in ("source", "target"):
        parser.add_argument(
            f"--{side}-language", metavar="CODE", help=f"{side} language, for a model of many languages or with --codes"
        )
    add_check(parser)
    add_output_flags(parser, "what was written")


def run(args: argparse.Namespace) -> None:
    from fasttfm.convert.check import check
    from fasttfm.convert.exchange import store, warnings_as_lines

    module = importlib.import_module(FORMATS[args.format][0])
    languages = {"source_language": args.source_language, "target_language": args.target_language}
    has_no_languages = args.format == "marian-hf" or (args.format == "fairseq" and not args.codes)
    if has_no_languages and any(languages.values()):
        raise UserError(
            f"--source-language and --target-language do not apply to --format {args.format}: leave them out (input "
            "lines of a multilingual OPUS-MT model begin with >>deu<<)"
        )
    with warnings_as_lines() as warned:
        model = _read(args, module, languages)
    notes = [*model.notes, *warned]
    if args.check:
        notes += check(model, args.format, args.directory, (args.source_language, args.target_language))
    store(model, args.out, [f"imported from {args.directory.absolute().name} ({args.format})", *notes])
    size = sum(weight.numel() for weight in model.weights.values())
    Output.of(args, "import").result(
        f"{args.out}: {args.format}, {size / 1e6:,.1f} million parameters, {model.config.vocab_size:,} target tokens",
        out=str(args.out), format=args.format, parameters=size, target_tokens=model.config.vocab_size, told=notes,
    )  # fmt: skip


def _read(args: argparse.Namespace, module: ModuleType, languages: dict[str, str | None]) -> "Model":
    if args.format == "fairseq":
        return module.read(args.directory, args.dict, args.spm, args.codes, **languages)
    if args.dict or args.spm or args.codes:
        raise UserError(f"--dict, --spm and --codes belong to --format fairseq, not to {args.format}: leave them out")
    if not args.directory.is_dir():
        raise UserError(f"{args.directory}: is not a directory: give the one that the other tool saved")
    return module.read(args.directory, **languages)
