"""The verb `fasttfm distill bert`: trains a small BERT from a large one."""

from __future__ import annotations

import argparse
import os

from fasttfm.cli.paths import MODEL
from fasttfm.cli.train import add_run_flags, run_task
from fasttfm.cli.verbs import Verb


def _add_bert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("teacher", type=MODEL, metavar="TEACHER", help="model directory made by fasttfm mlm train")
    add_run_flags(parser, "student", "fasttfm mlm prepare")


def _bert(args: argparse.Namespace) -> int:
    from fasttfm.checkpoints.steps import saved_steps
    from fasttfm.pretraining.training.distillation import Distillation, write_student
    from fasttfm.training.progress import tell

    args.preset, args.init_from = args.preset or "distilbert", args.teacher
    status = run_task(args, "student", "fasttfm distill bert TEACHER", lambda: Distillation(args.teacher))
    is_first = os.environ.get("RANK", "0") == "0"
    if not status and is_first and args.out is not None and saved_steps(args.out):
        tell(f"student: {write_student(args.out)}")
    return status


VERBS = {
    "bert": Verb(
        _add_bert,
        _bert,
        "train a small BERT from a large one, as DistilBERT or TinyBERT",
        "Train a student of a BERT on prepared text. The same command started again resumes. Fields that are not given "
        "are the teacher's, with half its layers. The student alone is then in MODEL/student.",
    ),
}
