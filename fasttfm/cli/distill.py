"""Trains a small model from a large one."""

import argparse
from functools import partial

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import Parser, add_checkpoint, add_data, add_device, add_out
from fasttfm.cli.paths import MODEL
from fasttfm.cli.verbs import Verb
from fasttfm.config import add_flags, flag_values
from fasttfm.kinds import verbs_of


def _add_translation(parser: Parser) -> None:
    parser.add_argument("teacher", type=MODEL, metavar="TEACHER", help="model directory made by fasttfm train")
    add_data(parser, "prepared directory whose source texts the teacher translates")
    add_out(parser, "OUT", "prepared directory to write")
    add_checkpoint(parser)
    add_device(parser)
    add_output_flags(parser, "the directory and what was told")
    add_flags(parser, ["decoding"])
    parser.shorten(
        *("--data", "--out", "--checkpoint", "--device", "--quiet", "--json", "--beam", "--batch-tokens", "--nbest"),
        examples="fasttfm distill translation MODEL --data DATA --out DISTILLED",
    )


def _translation(args: argparse.Namespace) -> None:
    from fasttfm.training.sequence_distillation import distill_translation

    output = Output.of(args, "distill translation")
    distill_translation(
        args.teacher,
        args.data,
        args.out,
        checkpoint=args.checkpoint,
        device=args.device,
        say=output.note,
        progress=partial(output.progress, unit="pairs"),
        **flag_values(args, ["decoding"]),
    )
    if args.json:
        output.result("", out=str(args.out), notes=output.notes)


VERBS = {
    "translation": Verb(
        _add_translation,
        _translation,
        "write a teacher's translations as training data for a student",
        "Write a prepared directory of the same sources with the teacher's translations as targets, to train a smaller "
        "model on: fasttfm train --preset multi30k-student --data OUT. The same command started again goes on where it "
        "stopped. Search settings that are not given are those of the teacher's config.yaml.",
    ),
    **verbs_of("distill"),
}
