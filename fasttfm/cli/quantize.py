"""`fasttfm quantize MODEL --out Q`: a model directory whose matrices are 8-bit integers."""

from __future__ import annotations

import argparse
from pathlib import Path

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import add_checkpoint


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "quantize",
        help="write a model directory with 8-bit matrices",
        description="Writes a model directory whose matrices are 8-bit integers with one scale for each output, a "
        "quarter of the bytes; embeddings, norms and biases stay as they are. fasttfm translate computes with it in "
        "int8 on a CPU.",
    )
    parser.add_argument("model", metavar="MODEL", help="model directory made by fasttfm train")
    parser.add_argument("--out", type=Path, required=True, metavar="Q", help="new or empty directory")
    add_checkpoint(parser)
    add_output_flags(parser, "the sizes")


def run(args: argparse.Namespace) -> None:
    """Write Q and say how much smaller it is."""
    from fasttfm.checkpoints.quantize import quantize_model

    before, after = quantize_model(Path(args.model), args.checkpoint, args.out)
    Output.of(args, "quantize").result(
        f"{args.out}: int8, {after / 2**20:,.1f} MiB of weights ({before / 2**20:,.1f} MiB before)",
        out=str(args.out), bytes=after, bytes_before=before,
    )  # fmt: skip
