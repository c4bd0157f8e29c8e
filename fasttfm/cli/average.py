"""`fasttfm average MODEL --last 5`: average the last checkpoints of a model."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser("average", help="average the last checkpoints of a model")
    parser.add_argument("model", metavar="MODEL", help="model directory made by fasttfm train")
    parser.add_argument(
        "--last", type=int, default=5, metavar="N", help="how many of the newest checkpoints [default: 5]"
    )


def run(args: argparse.Namespace) -> None:
    """Write MODEL/checkpoints/average and say which updates it is made of."""
    from fasttfm.training.average import average_last

    target, steps = average_last(args.model, args.last)
    print(f"{target}: average of the checkpoints of updates {', '.join(map(str, steps))}")
