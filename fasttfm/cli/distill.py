"""`fasttfm distill translation|bert TEACHER --data DATA --out …`: what a large model has learnt, for a small one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fasttfm.cli.train import add_run_flags, run_task
from fasttfm.config import add_flags, flag_values


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command's parser and one for each kind of model."""
    parser = subparsers.add_parser("distill", help="train a small model by a large one: translation, BERT")
    kinds = parser.add_subparsers(metavar="translation|bert", required=True, parser_class=type(parser))
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
    translation.set_defaults(perform=_translation)
    bert = kinds.add_parser(
        "bert",
        help="train a small BERT by a large one, as DistilBERT or TinyBERT",
        description="Train a student of a BERT on prepared text. The same command started again resumes. Fields that "
        "are not given are the teacher's, with half its layers. The student alone is then in MODEL/student.",
    )
    bert.add_argument("teacher", type=Path, metavar="TEACHER", help="model directory of fasttfm mlm train")
    add_run_flags(bert, "student", "fasttfm mlm prepare")
    bert.set_defaults(perform=_bert)


def run(args: argparse.Namespace) -> int | None:
    """Distil."""
    return args.perform(args)


def _bert(args: argparse.Namespace) -> int:
    from fasttfm.checkpoints.steps import saved_steps
    from fasttfm.training.distillation import Distillation, write_student
    from fasttfm.training.progress import tell

    args.preset, args.init_from = args.preset or "distilbert", args.teacher
    status = run_task(args, "student", "fasttfm distill bert TEACHER", lambda: Distillation(args.teacher))
    is_first = os.environ.get("RANK", "0") == "0"
    if not status and is_first and args.out is not None and saved_steps(args.out):
        tell(f"student: {write_student(args.out)}")
    return status


def _translation(args: argparse.Namespace) -> None:
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
