"""Flags of training on a task's own files: fasttfm finetune and fasttfm finetune distill."""

import argparse

from fasttfm.cli.paths import INPUT_FILE, TRAINED_MODEL


def add_task_files(parser: argparse.ArgumentParser, *, with_columns: bool = True) -> None:
    """Add --train, --valid and --out, and --columns for tasks of tables."""
    for name, what in (("train", "training"), ("valid", "validation")):
        parser.add_argument(f"--{name}", type=INPUT_FILE, required=True, help=f"{what} data, plain or compressed")
    parser.add_argument("--out", type=TRAINED_MODEL, required=True, help="model directory to create or to resume")
    if with_columns:
        parser.add_argument("--columns", metavar="A,B", help="column of the text, or the two columns of a pair")


def given_columns(args: argparse.Namespace) -> list[str]:
    """Column names from --columns; none if the command has no such flag."""
    return [name.strip() for name in (getattr(args, "columns", None) or "").split(",") if name.strip()]
