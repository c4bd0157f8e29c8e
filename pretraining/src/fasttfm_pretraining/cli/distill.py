"""Training of a small BERT from a large one: `fasttfm mlm distill` and `fasttfm finetune distill`."""

import argparse
import os

from fasttfm.cli.parser import Parser
from fasttfm.cli.paths import MODEL
from fasttfm.cli.train import SHOWN, add_recipe_flags, add_run_flags, run_task
from fasttfm.cli.verbs import Verb
from fasttfm.config import add_flags
from fasttfm.config.flags import add_field_flags
from fasttfm.config.presets import preset_names
from fasttfm.errors import UserError
from fasttfm_pretraining.cli.task_flags import add_task_files, given_columns
from fasttfm_pretraining.config.task_student import LOSSES, TaskStudentConfig


def _add_bert(parser: Parser) -> None:
    parser.add_argument("teacher", type=MODEL, metavar="TEACHER", help="model directory made by fasttfm mlm train")
    add_run_flags(parser, "student", "fasttfm mlm prepare")
    parser.shorten(
        *SHOWN, "--layers", examples="fasttfm mlm distill BERT --preset distilbert --data DATA --out STUDENT"
    )


def _bert(args: argparse.Namespace) -> int:
    from fasttfm.training.progress import tell
    from fasttfm_pretraining.training.distillation import Distillation, write_student

    args.preset, args.init_from = args.preset or "distilbert", args.teacher
    status = run_task(
        args,
        "student",
        "fasttfm mlm distill TEACHER",
        lambda: Distillation(args.teacher),
        complete=lambda values: Distillation(args.teacher).complete(values),
    )
    if not status and _has_trained(args):
        tell(f"student: {write_student(args.out)}")
    return status


def _has_trained(args: argparse.Namespace) -> bool:
    """Whether the command has trained, on rank 0, and there is a checkpoint to take the student from."""
    from fasttfm.store.steps import saved_steps

    only_tells = args.dump_config or args.preset == "list"
    return not only_tells and os.environ.get("RANK", "0") == "0" and bool(saved_steps(args.out))


_STAGES = ("tinybert-layers", "tinybert-task")


def _add_task(parser: Parser) -> None:
    parser.add_argument("teacher", type=MODEL, metavar="TEACHER", help="model directory made by fasttfm finetune")
    parser.add_argument(
        "--init-from",
        type=MODEL,
        required=True,
        metavar="STUDENT",
        help="student to begin with: of fasttfm mlm distill for the layers, then of this command for the task",
    )
    add_task_files(parser)
    add_recipe_flags(parser, preset_names("task-student"))
    add_field_flags(parser.add_argument_group("model settings"), TaskStudentConfig, LOSSES)
    add_flags(parser, ["data", "training"], kind="task-student")
    parser.shorten(
        *(*SHOWN, "--train", "--valid", "--columns"),
        examples="fasttfm finetune distill TUNED --init-from TINY --preset tinybert-layers --train A.tsv --valid B.tsv "
        "--out LAYERS",
    )


def _task(args: argparse.Namespace) -> int:
    from fasttfm.store.model_dir import read_kind
    from fasttfm.training.progress import tell
    from fasttfm_pretraining.training.task_distillation import TaskDistillation, write_task_student
    from fasttfm_pretraining.training.task_prediction import FineTuned

    if args.preset is None and not args.config:
        raise UserError(f"--preset is missing: {_STAGES[0]}, then {_STAGES[1]} with --init-from its model")
    args.data = args.train
    files = (args.init_from, args.train, args.valid, given_columns(args))
    status = run_task(
        args,
        "task-student",
        "fasttfm finetune distill TEACHER",
        lambda: TaskDistillation(FineTuned.load(args.teacher), *files),
    )
    if not status and _has_trained(args):
        student = write_task_student(args.out, read_kind(args.teacher))
        tell(f"next: --preset {_STAGES[1]} --init-from {args.out}" if student is None else f"student: {student}")
    return status


BERT = Verb(
    _add_bert,
    _bert,
    "train a small BERT from a large one, as DistilBERT or TinyBERT",
    "Train a student of a BERT on prepared text. The same command started again resumes. Fields that are not given "
    "are the teacher's, with half its layers. The student alone is then in MODEL/student.",
)
TASK = Verb(
    _add_task,
    _task,
    "train a small BERT from a fine-tuned one on its task, as TinyBERT",
    "Train a student of a fine-tuned BERT on its task: its layers with --preset tinybert-layers, then its "
    "answers with --preset tinybert-task. The student alone is then in MODEL/student.",
)
