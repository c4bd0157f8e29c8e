"""Converts a model's matrices to int8 with one scale per output channel: a quarter of the size. Embeddings, norms and
biases are unchanged. fasttfm translate then computes in int8 on a CPU.
"""

import argparse

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import add_model, add_out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_out(parser, "Q", "model directory to write, new or empty")
    add_output_flags(parser, "the sizes")


def run(args: argparse.Namespace) -> None:
    """Write Q and print the sizes before and after."""
    from fasttfm.models.quantize import quantize_model

    before, after = quantize_model(args.model, args.checkpoint, args.out)
    Output.of(args, "quantize").result(
        f"{args.out}: int8, {after / 2**20:,.1f} MiB of weights ({before / 2**20:,.1f} MiB before)",
        out=str(args.out), bytes=after, bytes_before=before,
    )  # fmt: skip
