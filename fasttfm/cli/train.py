"""`fasttfm train --preset multi30k --data DATA --out MODEL`: train a model, or go on with a run that was stopped."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from fasttfm.config import add_flags, build, dump_yaml, flag_values, gather, with_defaults
from fasttfm.errors import Stopped, UserError
from fasttfm.presets import preset_names

_ANY_VOCABULARY = 8000  # the data decide; without them any size will do to check everything else


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command's parser: what to train on and where to, then one flag for every configuration field."""
    parser = subparsers.add_parser(
        "train",
        help="train a Transformer on prepared data, or resume",
        description="Train a Transformer on prepared data. The same command started again resumes where it stopped.",
        epilog="Each setting comes from the preset, then from --config files, then from the command line; later wins.",
        usage="fasttfm train --preset NAME --data DATA --out MODEL [--config FILE] [--device NAME] [--SETTING VALUE …]",
    )
    parser.add_argument("--preset", metavar="NAME", help=f"recipe to start from: {', '.join(preset_names())}")
    parser.add_argument("--data", type=Path, metavar="DATA", help="directory made by fasttfm prepare")
    parser.add_argument("--out", type=Path, metavar="MODEL", help="model directory to create or to go on with")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file over the preset; may be repeated",
    )
    parser.add_argument("--dump-config", action="store_true", help="print the resolved configuration as YAML and stop")
    add_flags(parser)


def run(args: argparse.Namespace) -> None:
    """Resolve the configuration, train, and say where the model is and how well it scored."""
    values = gather(args.preset, args.config, flag_values(args))
    if args.dump_config:
        build(values, {"vocab_size": _ANY_VOCABULARY, "source_vocab_size": None})  # says what is out of range
        print(dump_yaml(with_defaults(values)), end="")
        return
    for name in ("data", "out"):
        if getattr(args, name) is None:
            raise UserError(f"--{name} is missing: fasttfm train --preset NAME --data DATA --out MODEL")

    import torch  # after the configuration is known to be right, so that a wrong flag is answered at once

    from fasttfm.training.log import read_log
    from fasttfm.training.plots import plot_curve
    from fasttfm.training.run import train

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was given, but torch sees no GPU here: give --device cpu")
    try:
        outcome = train(values, args.data, args.out, torch.device(args.device) if args.device else None)
    except KeyboardInterrupt as interrupt:
        again = f"stopped; what was saved in {args.out} is whole: run the same command again to go on"
        raise Stopped(str(interrupt) or again, getattr(interrupt, "number", signal.SIGINT)) from None
    print(f"finished: {outcome.reason}")
    if outcome.score is not None:
        print(f"last checkpoint: {outcome.score}")
    if outcome.average is not None:
        print(f"averaged checkpoint: {outcome.average}")
    if read_log(args.out):  # a run of fewer updates than log_interval that never validates has no curve
        print(f"loss curve: {plot_curve(args.out)}")
    print(f"model: {args.out}")
