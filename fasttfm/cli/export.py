"""Converts a model and its tokenizer to another tool's format."""

import argparse
import importlib

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import add_checkpoint, add_out
from fasttfm.cli.paths import MODEL

FORMATS = {
    "ctranslate2": ("fasttfm.convert.ctranslate2", "ctranslate2.Translator"),
    "marian-hf": ("fasttfm.convert.marian", "transformers' MarianMTModel and MarianTokenizer"),
    "onnx": ("fasttfm.convert.onnx", "onnxruntime (the encoder and one step of the decoder)"),
    "pretrained": ("fasttfm.convert.exchange", "Transformer.from_pretrained(), pipeline() and Hugging Face's hub"),
}
"""Format -> (module with export(model, folder), what loads it)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=MODEL, metavar="MODEL", help="model directory")
    parser.add_argument(
        "--format",
        required=True,
        choices=FORMATS,
        help="; ".join(f"{name}: for {reader}" for name, (_, reader) in FORMATS.items()),
    )
    add_out(parser, "DIR", "directory to write")
    add_check(parser)
    add_checkpoint(parser)
    add_output_flags(parser, "what was written")


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add --no-check, which skips the comparison with the other tool."""
    parser.add_argument(
        "--no-check",
        dest="check",
        action="store_false",
        help="skip the comparison of translations with the other tool, made if that tool is installed",
    )


def run(args: argparse.Namespace) -> None:
    """Write the directory and print notes on how to use it with the other tool."""
    from fasttfm.convert.check import check
    from fasttfm.convert.exchange import exporting, load

    module = importlib.import_module(FORMATS[args.format][0])
    model = load(args.model, args.checkpoint)
    with exporting(args.out) as (folder, card):
        notes = [*module.export(model, folder), *(check(model, args.format, folder) if args.check else [])]
        card += [f"exported from {args.model.absolute().name} ({args.format})", *notes]
    Output.of(args, "export").result(
        f"{args.out}: {args.format}, for {FORMATS[args.format][1]}",
        out=str(args.out), format=args.format, loaded_by=FORMATS[args.format][1], told=notes,
    )  # fmt: skip
