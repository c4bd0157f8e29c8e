"""`fasttfm distill translation|bert TEACHER --data DATA --out …`: what a large model has learnt, for a small one."""

from __future__ import annotations

import argparse
from pathlib import Path

from fasttfm.config import add_flags, flag_values


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command's parser and one for each kind of model."""
    parser = subparsers.add_parser("distill", help="train a small model by a large one: translation, BERT")
    kinds = parser.add_subparsers(dest="what", metavar="translation", required=True, parser_class=type(parser))
    translation = kinds.add_parser(
        "translation",
        help="write a teacher's translations as a student's training data",
        description="Write a prepared directory of the same sources with the teacher's translations as targets, to "
        "train a smaller model on: fasttfm train --preset multi30k-student --data OUT. The same command started again "
        "goes on where it stopped. Search settings that are not given are those of the teacher's config.yaml.",
    )
    translation.add_argument("teacher", type=Path, metavar="TEACHER", help="model directory made by fasttfm train")
    translation.add_argument(
        "--data", type=Path, required=True, metavar="DATA", help="prepared directory whose sources are translated"
    )
    translation.add_argument("--out", type=Path, required=True, metavar="OUT", help="prepared directory to write")
    translation.add_argument(
        "--checkpoint",
        default="best",
        metavar="WHICH",
        help="best, last, average, the number of an update, or the path of a checkpoint (default: %(default)s)",
    )
    translation.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: a GPU where there is one)")
    add_flags(translation, ["decoding"])


def run(args: argparse.Namespace) -> None:
    """Translate the training text and prepare it."""
    from fasttfm.training.progress import tell
    from fasttfm.training.sequence_distillation import distill_translation

    distill_translation(
        args.teacher,
        args.data,
        args.out,
        checkpoint=args.checkpoint,
        device=args.device,
        say=tell,
        **flag_values(args, ["decoding"]),
    )
