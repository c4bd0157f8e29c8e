"""Draws training loss, validation loss and BLEU of training runs in one picture, a colour for each run."""

import argparse

from fasttfm.cli.paths import MODEL, OUTPUT_FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=MODEL, metavar="RUN", help="model directory made by fasttfm train")
    parser.add_argument("--out", type=OUTPUT_FILE, required=True, help="picture to write, .png or .svg")
    parser.add_argument(
        "--over",
        choices=("updates", "minutes"),
        default="updates",
        help="unit of the horizontal axis (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    """Draw, and say where the picture is."""
    from fasttfm.training.plots import plot_runs

    plot_runs(args.runs, args.out, args.over)
    print(args.out)
