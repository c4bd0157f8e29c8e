"""Downloads and prepares text, trains, translates a test set and scores it. Prints each command before running it.

The same command resumes an interrupted recipe.
"""

import argparse
import shlex
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import InRange, Parser, add_downloads
from fasttfm.cli.paths import SHARED_FOLDER
from fasttfm.errors import UserError, optional
from fasttfm.system.children import child_environment, command_line, run_to_end, signal_name
from fasttfm.system.files import writing
from fasttfm.system.parsing import parse_yaml


@dataclass(frozen=True, slots=True)
class Recipe:
    """A preset on a dataset."""

    dataset: str
    """Name for `fasttfm prepare --dataset`."""
    preset: str
    test: str
    """Test set to score."""
    vocab_size: int
    reverse: bool = False
    """Translate into the dataset's source language."""
    clean: str = ""
    """Flags of `fasttfm prepare` that filter the training text."""
    train: str = ""
    score: str = ""
    source: str = ""
    """Publication, with its score."""


_TABLE: dict[str, Any] = parse_yaml((Path(__file__).parent / "recipes.yaml").read_bytes())
RECIPES = {name: Recipe(**fields) for name, fields in _TABLE.items()}
_DRY_VOCABULARY = 2_000
_BUILT_IN_VOCABULARY = 500
_DRY_PREPARE = ("--subset", "2000")
_DRY_TRAIN = ("--max-update", "20")
"""Flags that --dry-run adds, overriding the recipe's."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(RECIPES)}; list: print what each is")
    add_downloads(parser)
    parser.add_argument(
        "--work",
        type=SHARED_FOLDER,
        help="folder for data, model and translations (default: runs/NAME, or runs/NAME-dry for a dry run)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="try every step with 2,000 pairs of each training file and 20 updates; downloads nothing, and uses the "
        "demo corpus for text missing from --data-dir",
    )
    parser.add_argument(
        "--estimate",
        type=InRange(1, 10**12, float),
        help="print the training time at X target tokens/s, the speed shown in the training log, and stop",
    )
    add_output_flags(parser, "the score, or with --estimate the estimate")
    parser.add_argument(
        "--price", type=InRange(0, 10**9, float), metavar="P", help="with --estimate: price of the machine for an hour"
    )
    parser.add_argument(
        "--train", nargs=argparse.REMAINDER, default=[], metavar="FLAG", help="pass all later options to fasttfm train"
    )
    parser.needs = {"--price": ["--estimate"]}
    idle = ("--data-dir", "--mirror", "--work", "--dry-run", "--train")
    parser.apart = [*(("--estimate", flag) for flag in idle), ("--dry-run", "--mirror")]


def run(args: argparse.Namespace) -> None:
    from fasttfm.data import datasets

    if args.name == "list":
        width = max(map(len, RECIPES))
        print("\n".join(f"{name:<{width}}  preset {each.preset} on {each.dataset}" for name, each in RECIPES.items()))
        return
    if args.name not in RECIPES:
        raise UserError(f"{args.name}: one of {', '.join(RECIPES)} is allowed")
    recipe, output = RECIPES[args.name], Output.of(args, "recipe")
    if args.estimate is not None:
        line = estimate(recipe, args.estimate, args.price)
        output.result(f"fasttfm recipe: {line}", recipe=args.name, estimate=line)
        return
    if "--compound-split" in recipe.score:
        optional("sacremoses", "moses")  # fail now, not after days of training
    work = args.work or Path("runs") / f"{args.name}{'-dry' * args.dry_run}"
    if recipe.source:
        output.note(recipe.source)
    texts = datasets.existing_texts(recipe.dataset, args.data_dir) if args.dry_run else None
    size = recipe.vocab_size if not args.dry_run else _BUILT_IN_VOCABULARY if texts is None else _DRY_VOCABULARY
    if texts is None and args.dry_run:
        output.note(f"{recipe.dataset} is not downloaded: the built-in demo corpus in {work / 'demo'} is used instead")
        texts = datasets.demo_texts(work / "demo", recipe.test)
    elif texts is None:
        progress = partial(output.progress, unit="bytes")
        texts = datasets.fetch_dataset(
            recipe.dataset, args.data_dir, mirrors=args.mirror, say=output.note, progress=progress
        )
    turn = -1 if recipe.reverse else 1
    source, target = texts.tests[recipe.test][::turn]
    files: dict[str, Any] = dict(zip(("--src", "--tgt"), texts.train[::turn]))
    files |= zip(("--valid-src", "--valid-tgt"), texts.valid[::turn])
    prepare = [word for flag, paths in files.items() for word in (flag, *map(str, paths))]
    prepare += ["--vocab-size", str(size), *recipe.clean.split(), *(_DRY_PREPARE if args.dry_run else ())]
    train = ["--preset", recipe.preset, *recipe.train.split(), *(_DRY_TRAIN if args.dry_run else ()), *args.train]
    data, model, out = work / "data", work / "model", work / f"{recipe.test}.{target.suffix.removeprefix('.')}"
    _run(output, "prepare", *prepare, "--out", str(data))
    _run(output, "train", *train, "--data", str(data), "--out", str(model))
    _run(output, "translate", str(model), read=source, write=out)
    _run(output, "score", "--ref", str(target), *recipe.score.split(), read=out)


def estimate(recipe: Recipe, tokens_per_second: float, price: float | None = None) -> str:
    """Return a line with the training hours of a recipe at a measured speed, and their cost at `price` an hour."""
    from fasttfm.config import gather, with_defaults

    values = with_defaults(gather(recipe.preset))
    training, batching = values["training"], values["data"]
    updates, tokens = training["max_update"], training["update_freq"] * batching["max_tokens"]
    hours = updates * tokens / tokens_per_second / 3600
    money = "" if price is None else f", {hours * price:,.2f} at {price:g} an hour"
    return (
        f"estimate: {updates:,} updates of at most {tokens:,} target tokens at {tokens_per_second:,.0f} a second take "
        f"{hours:,.1f} hours{money}; validation, and a limit of epochs or minutes, are not in it"
    )


def _run(output: Output, *words: str, read: Path | None = None, write: Path | None = None) -> None:
    """Print a command and run it; raises SystemExit with its status if it fails (it has printed the error).

    Stop signals are forwarded to the command, which may save before it ends; then Stopped is raised.
    """
    shown = shlex.join(["fasttfm", *words])
    shown += f" < {shlex.quote(str(read))}" * (read is not None) + f" > {shlex.quote(str(write))}" * (write is not None)
    is_result = words[0] == "score"
    if not output.quiet:
        print(f"\n$ {shown}", file=sys.stderr if output.as_json else sys.stdout, flush=True)
    # before the recipe's flags: the last of them may be --train, which takes the rest of the line
    flags = ["--quiet"] * output.quiet + ["--json"] * (output.as_json and is_result)
    command = command_line(words[0], *flags, *words[1:])
    with ExitStack() as files:
        stdin = subprocess.DEVNULL if read is None else files.enter_context(read.open("rb"))
        hidden = sys.stderr if output.as_json and not is_result else None  # standard output is reserved for the JSON
        stdout = hidden if write is None else files.enter_context(writing(write))
        status = run_to_end(command, stdin=stdin, stdout=stdout, env=child_environment()).returncode
        if status < 0:
            name = signal_name(-status)
            raise UserError(f"fasttfm {words[0]} was ended by {name}: run the same command again to resume")
        if status:
            raise SystemExit(status)  # within writing(): a partial translation is discarded
