"""Joins a checkpoint that train --shard wrote in parts, and writes it as a new model directory, to share it or to train
on without --shard. Every other command reads checkpoints in parts too.
"""

from __future__ import annotations

import argparse

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.paths import CHECKPOINT, MODEL, OUTPUT_FOLDER


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=MODEL, metavar="MODEL", help="model directory made by fasttfm train --shard")
    parser.add_argument(
        "--checkpoint",
        type=CHECKPOINT,
        default="best",
        metavar="WHICH",
        help="best, last, or the number of an update (default: %(default)s)",
    )
    parser.add_argument("--out", type=OUTPUT_FOLDER, required=True, metavar="WHOLE", help="model directory to create")
    add_output_flags(parser, "what was written")


def run(args: argparse.Namespace) -> None:
    """Read all parts, write them in one piece, and say where."""
    from fasttfm.checkpoints.conversion import consolidate

    line = consolidate(args.model, args.checkpoint, args.out)
    Output.of(args, "consolidate").result(str(line), model=str(args.out))
