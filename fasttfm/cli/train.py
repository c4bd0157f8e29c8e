"""Trains a Transformer on prepared data. The same command resumes an interrupted run."""

import argparse
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttfm.cli.divisions import Division, fastest_division
from fasttfm.cli.environment import choose_settings
from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import TIME, Parser, add_repeated, add_workers
from fasttfm.cli.paths import CHECKPOINT_OR_MODEL, INPUT_FILE, LOADED_FOLDER, TRAINED_MODEL
from fasttfm.cli.workers import launch, number_of_workers, usable_cores
from fasttfm.config import (
    TRANSFORMER,
    Values,
    add_flags,
    check,
    convert,
    dump_yaml,
    field_types,
    flag_values,
    gather,
    with_defaults,
)  # fmt: skip
from fasttfm.config.presets import preset_names, preset_summary
from fasttfm.config.training import RESUMABLE, TrainingConfig
from fasttfm.errors import Stopped, UserError
from fasttfm.system.machine import emulates_bfloat16, processor_units
from fasttfm.system.parsing import parse_yaml

if TYPE_CHECKING:
    from fasttfm.training.run import Outcome

_EXAMPLES = """
    fasttfm train --preset multi30k --data DATA --out MODEL
    fasttfm train --preset multi30k --d-model 256 --max-minutes 30 --data DATA --out MODEL
    fasttfm train --preset paper-base --config my.yaml --dump-config     # the resulting configuration as YAML
"""
_FAIRSEQ: dict[str, str] = parse_yaml(Path(__file__).with_name("fairseq_flags.yaml").read_bytes())
SHOWN = (
    *("--data", "--out", "--init-from", "--preset", "--device", "--workers", "--config", "--quiet", "--json"),
    *("--d-model", "--d-ff", "--encoder-layers", "--decoder-layers", "--dropout", "--max-tokens", "--update-freq"),
    *("--lr", "--schedule", "--warmup-updates", "--precision", "--max-update", "--max-minutes", "--seed", "--threads"),
    *("--valid-interval-updates", "--valid-bleu"),
)
"""Flags that --help shows."""


def add_arguments(parser: Parser) -> None:
    parser.usage = "fasttfm train --preset NAME --data DATA --out MODEL [--SETTING VALUE …]"
    parser.epilog = "Settings of --config files replace those of the preset, and flags replace both."
    add_run_flags(parser, TRANSFORMER, "fasttfm prepare")
    parser.elsewhere = {flag: remedy for flags, remedy in _FAIRSEQ.items() for flag in flags.split()}
    parser.shorten(*SHOWN, examples=_EXAMPLES)


def add_run_flags(
    parser: argparse.ArgumentParser, kind: str, made_by: str, presets: Sequence[str] | None = None
) -> None:
    """Add the flags for training on prepared data. made_by: the command that prepares it.

    presets: names of the presets; None: those of kind.
    """
    parser.add_argument("--data", type=LOADED_FOLDER, metavar="DATA", help=f"directory made by {made_by}")
    parser.add_argument("--out", type=TRAINED_MODEL, help="model directory to create or to resume")
    parser.add_argument(
        "--init-from",
        type=CHECKPOINT_OR_MODEL,
        metavar="CHECKPOINT",
        help="start a new run from the weights of a checkpoint, or of a model directory's best checkpoint; "
        "requires the same vocabulary",
    )
    add_recipe_flags(parser, preset_names(kind) if presets is None else presets)
    add_flags(parser, kind=kind)


def add_recipe_flags(parser: argparse.ArgumentParser, presets: Sequence[str]) -> None:
    """Add the training flags other than data, directories and configuration fields. presets: their names."""
    parser.add_argument(
        "--preset", metavar="NAME", help=f"recipe to start from: {', '.join(presets)}; list: print what each is for"
    )
    parser.set_defaults(presets=presets)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device to train on (default: a GPU if there is one)")
    add_workers(
        parser,
        "data-parallel processes, as under torchrun; auto: one per CPU core, or one with --threads or a GPU; time: the "
        "split of the CPU cores into processes and threads that trains a few updates fastest",
        timed=True,
    )
    add_repeated(parser, "--config", "YAML file of settings that replace the preset's", type=INPUT_FILE)
    resume = f"resume with a new value of {', '.join(RESUMABLE)}, keeping the optimizer's state"
    add_repeated(parser, "--resume-with", resume, metavar="NAME=VALUE")
    parser.add_argument("--dump-config", action="store_true", help="print the resulting configuration as YAML and stop")
    add_output_flags(parser, "how the run ended")


def lists_presets(args: argparse.Namespace) -> bool:
    """Print a line for each preset if --preset list was given, and return whether it was."""
    if args.preset == "list":
        width = max(map(len, args.presets)) + 2
        print("\n".join(f"{name.ljust(width)}{preset_summary(name)}" for name in args.presets))
    return args.preset == "list"


def run(args: argparse.Namespace) -> int:
    """Resolve the configuration, train, and print the model's path and scores."""
    return run_task(args, TRANSFORMER, "fasttfm train", lambda: None)


def run_task(
    args: argparse.Namespace, kind: str, command: str, task: Callable[[], Any],
    complete: Callable[[Any], None] = lambda values: None,
) -> int:  # fmt: skip
    """Train a model of any kind. command: its name; task: makes the training.task.Task, None for translation.

    complete: for --dump-config, sets the fields that the task takes from another model.
    """
    if lists_presets(args):
        return 0
    values = gather(args.preset, args.config, flag_values(args, kind=kind), kind=kind)
    resumed_with = _put_resumed(values, args.resume_with)
    warning = _shorten_warmup(values)
    if args.dump_config:
        complete(values)
        check(values)
        print(dump_yaml(with_defaults(values), kind), end="")
        return 0
    for name in ("data", "out"):
        if getattr(args, name) is None:
            raise UserError(f"--{name} is missing: {command} --preset NAME --data DATA --out MODEL")
    settings = choose_settings()
    arguments = args.arguments
    if args.workers == TIME:
        division = _timed_division(args, values, command)
        arguments, args.workers = division.of(arguments), division.workers
        values.put("threads", division.threads, "--workers")
        args.started = time.monotonic()  # the trials do not count towards --max-minutes
    workers = number_of_workers(args.workers, values["training"].get("threads", 0), args.device)
    if workers > 1:
        return launch(workers, arguments, args.started)

    import torch  # after the configuration is valid, so that a wrong flag is reported at once

    from fasttfm.training.progress import hushed, tell
    from fasttfm.training.run import train

    if warning:
        tell(warning)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was given, but torch sees no GPU here: give --device cpu")
    device = torch.device(args.device) if args.device else None
    is_on_cpu = args.device == "cpu" or (device is None and not torch.cuda.is_available())
    if values["training"].get("precision") == "bf16" and is_on_cpu and emulates_bfloat16(processor_units()):
        tell("warning: this CPU emulates bf16 (several times slower): give --precision fp32")
    try:
        with hushed(args.quiet):
            outcome = train(
                values,
                args.data,
                args.out,
                device,
                task=task(),
                init_from=args.init_from,
                resumed_with=resumed_with,
                settings=settings,
                started=args.started,
            )
    except KeyboardInterrupt as interrupt:
        line = str(interrupt) or _saved_state(args.out)
        raise Stopped(line, getattr(interrupt, "number", signal.SIGINT)) from None
    if outcome is not None:  # None on ranks other than 0
        _report(args, command, outcome)
    return 0


def _report(args: argparse.Namespace, command: str, outcome: "Outcome") -> None:
    """Print why the run ended, its scores and its files."""
    from fasttfm.store.steps import saved_steps

    is_saved = bool(saved_steps(args.out))
    fields: dict[str, Any] = {
        "finished": outcome.reason + ("" if is_saved else "; no update was made, so nothing was saved"),
        "best checkpoint": outcome.best,
        "last checkpoint": outcome.score,
        "averaged checkpoint": outcome.average,
        "loss curve": _drawn_curve(args.out),
        "model": args.out if is_saved else None,
    }
    fields = {name: str(value) for name, value in fields.items() if value is not None}
    Output.of(args, command.removeprefix("fasttfm ")).result(
        "\n".join(f"{name}: {value}" for name, value in fields.items()),
        **{name.replace(" ", "_"): value for name, value in fields.items()},
    )


def _put_resumed(values: Values, assignments: Sequence[str]) -> list[str]:
    """Put the NAME=VALUE pairs of --resume-with into values and return the names."""
    names = []
    for name, equals, value in (each.partition("=") for each in assignments):
        flag = f"--resume-with {name}"
        if name not in RESUMABLE or not equals:
            raise UserError(f"{flag}{equals}{value}: must be NAME=VALUE with one of {', '.join(RESUMABLE)}")
        values.put(name, convert(value, field_types(TrainingConfig)[name], flag), flag)
        names.append(name)
    return names


def _timed_division(args: argparse.Namespace, values: Values, command: str) -> Division:
    """Return the fastest split of the CPU cores for this run; UserError if --workers time cannot be used."""
    if values["training"].get("threads", 0):
        raise UserError("--workers time finds the number of threads too: leave --threads out")
    if "WORLD_SIZE" in os.environ or number_of_workers(None, 0, args.device) != usable_cores():
        raise UserError("--workers time splits the cores of a CPU: it cannot be used with a GPU or torchrun")
    output = Output.of(args, command.removeprefix("fasttfm "))
    division = fastest_division(args.arguments, usable_cores(), output.note)
    output.note(f"training with {division}")
    return division


def _saved_state(model_dir: Path) -> str:
    """Describe what a run interrupted outside the training loop has saved, and how to continue."""
    from fasttfm.store.steps import saved_steps

    try:
        steps = saved_steps(model_dir)
    except UserError:
        steps = []
    if not steps:
        return f"stopped before anything was saved in {model_dir}: run the same command again to start over"
    return f"stopped; update {steps[-1]:,} is saved in {model_dir}: run the same command again to resume"


def _drawn_curve(model_dir: Path) -> Path | None:
    """Plot the run's log; None if there is nothing to plot or, with a warning, if plotting fails."""
    from fasttfm.store.run_log import read_log
    from fasttfm.training.plots import plot_curve
    from fasttfm.training.progress import tell

    try:
        # the log is empty if the run had fewer updates than log_interval and no validation
        return plot_curve(model_dir) if read_log(model_dir) else None
    except Exception as error:  # the model is saved: a failed plot must not fail the training
        reason = " ".join(str(error).split()) or type(error).__name__
        tell(f"warning: the loss curve could not be drawn: {reason}")
        return None


def _shorten_warmup(values: Values) -> str | None:
    """Shorten a preset's warm-up that would not end before --max-update; returns a warning, or None.

    Only for cosine and linear schedules, and only if --max-update was given and --warmup-updates was not.
    """
    training = values["training"]
    last, warmup = training.get("max_update"), training.get("warmup_updates")
    if training.get("schedule") not in ("cosine", "linear") or last is None or warmup is None or warmup < last:
        return None
    if values.origins["max_update"] != "--max-update" or values.origins["warmup_updates"] == "--warmup-updates":
        return None
    shortened = last // 10
    values.put("warmup_updates", shortened, "--warmup-updates")
    return (
        f"warning: a warm-up of {warmup:,} updates does not fit into --max-update {last}: it is shortened to "
        f"{shortened:,}; give --warmup-updates for another"
    )
