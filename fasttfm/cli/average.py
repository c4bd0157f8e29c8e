"""Averages the last checkpoints of a model."""

import argparse

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.paths import TRAINED_MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=TRAINED_MODEL, metavar="MODEL", help="model directory made by fasttfm train")
    parser.add_argument(
        "--last", type=int, help="number of newest checkpoints to average (default: 5, or all if there are fewer)"
    )
    add_output_flags(parser, "what was averaged")


def run(args: argparse.Namespace) -> None:
    """Write MODEL/checkpoints/average and print the averaged updates."""
    from fasttfm.training.average import average_last

    target, steps = average_last(args.model, args.last)
    Output.of(args, "average").result(
        f"{target}: average of the checkpoints of updates {', '.join(map(str, steps))}", out=str(target), updates=steps
    )
