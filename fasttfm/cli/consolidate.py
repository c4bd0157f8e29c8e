"""Joins a checkpoint that train --shard wrote in parts, and writes it as a new model directory, to share it or to train
on without --shard. Every other command reads checkpoints in parts too.
"""

import argparse

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import add_model, add_out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "fasttfm train --shard")
    add_out(parser, "WHOLE", "model directory to create")
    add_output_flags(parser, "what was written")


def run(args: argparse.Namespace) -> None:
    """Read all parts, write them in one piece, and say where."""
    from fasttfm.checkpoints.conversion import consolidate

    line = consolidate(args.model, args.checkpoint, args.out)
    Output.of(args, "consolidate").result(str(line), model=str(args.out))
