"""Downloads, prepares, trains, translates a test set and scores it, printing each command before it runs.

The same command goes on where it was stopped.
"""

from __future__ import annotations

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
from fasttfm.errors import UserError


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model on a dataset."""

    dataset: str
    """What `fasttfm prepare --dataset` calls it."""
    preset: str
    test: str
    """The test set that is scored."""
    vocab_size: int
    reverse: bool = False
    """Translate into the dataset's source language."""
    clean: tuple[str, ...] = ()
    """Rules for the training text."""
    train: tuple[str, ...] = ()
    score: tuple[str, ...] = ()
    source: str = ""
    """Where the set-up is published, and the score that it gives there."""


_WEB_TEXT = tuple(shlex.split("--max-ratio 3 --drop-duplicates --drop-identical --src-script latin --tgt-script latin"))
_COMPOUNDS = ("--compound-split",)
_PAPER = "Vaswani et al. 2017, table 2:"

RECIPES = {
    "paper-base-en-de": Recipe(
        "wmt14-en-de", "paper-base", "newstest2014", 37_000, score=_COMPOUNDS,
        source=f"{_PAPER} 27.3 (compounds split); 8 P100, 12 hours",
    ),
    "paper-big-en-de": Recipe(
        "wmt14-en-de", "paper-big", "newstest2014", 37_000, score=_COMPOUNDS,
        source=f"{_PAPER} 28.4 (compounds split); 8 P100, 3.5 days",
    ),
    "paper-base-en-fr": Recipe(
        "wmt14-en-fr", "paper-base", "newstest2014", 32_000, clean=_WEB_TEXT,
        source=f"{_PAPER} 38.1; 8 P100, 12 hours",
    ),
    "paper-big-en-fr": Recipe(
        "wmt14-en-fr", "paper-big", "newstest2014", 32_000, clean=_WEB_TEXT, train=("--dropout", "0.1"),
        source=f"{_PAPER} 41.8; 8 P100, 3.5 days",
    ),
    "tensor2tensor-base-de-en": Recipe(
        "wmt14-en-de", "tensor2tensor-base", "newstest2014", 32_000, reverse=True,
        source="tensor2tensor's transformer_base; --warmup-updates 8000 on several GPUs",
    ),
    "mlperf-en-de": Recipe(
        "wmt17-en-de", "paper-big", "newstest2014", 33_708,
        source="MLPerf Training v0.7, Transformer: target 25.0, lower-cased",
    ),
    "iwslt14-de-en": Recipe(
        "iwslt14-de-en", "iwslt14", "tst2012", 10_000, clean=("--max-ratio", "3"),
        source="fairseq's transformer_iwslt_de_en is scored on other, joined test sets",
    ),
    "multi30k": Recipe("multi30k", "multi30k", "flickr2016", 8_000),
}  # fmt: skip

_DRY_VOCABULARY = 2_000
_DRY_PREPARE = ("--subset", "2000")
_DRY_TRAIN = ("--max-update", "20")
"""What --dry-run puts in the place of the recipe's own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(RECIPES)}")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--mirror", action="append", default=[], metavar="URL", help="as for fasttfm prepare")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="where data, model and translations go (default: runs/NAME)"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="2,000 pairs of each training file and 20 updates: do all parts work on this machine?",
    )
    parser.add_argument(
        "--estimate",
        type=float,
        metavar="X",
        help="print how long training takes at X target tokens/s, as your log or a record tells them, and stop",
    )
    add_output_flags(parser, "the score, or with --estimate the estimate")
    parser.add_argument("--price", type=float, metavar="P", help="of an hour of the machine, for --estimate")
    parser.add_argument(
        "--train", nargs=argparse.REMAINDER, default=[], metavar="FLAG", help="all that follows goes to fasttfm train"
    )


def run(args: argparse.Namespace) -> None:
    """Run the commands of a recipe, one after the other."""
    from fasttfm.data.datasets import fetch_dataset

    if args.name not in RECIPES:
        raise UserError(f"{args.name}: one of {', '.join(RECIPES)} is allowed")
    recipe, output = RECIPES[args.name], Output.of(args, "recipe")
    if args.estimate is not None:
        line = estimate(recipe, args.estimate, args.price)
        output.result(f"fasttfm recipe: {line}", recipe=args.name, estimate=line)
        return
    work = args.work or Path("runs") / args.name
    if recipe.source:
        output.note(recipe.source)
    progress = partial(output.progress, unit="bytes")
    texts = fetch_dataset(recipe.dataset, args.data_dir, mirrors=args.mirror, say=output.note, progress=progress)
    turn = -1 if recipe.reverse else 1
    source, target = texts.tests[recipe.test][::turn]
    files: dict[str, Any] = dict(zip(("--src", "--tgt"), texts.train[::turn]))
    files |= zip(("--valid-src", "--valid-tgt"), texts.valid[::turn])
    prepare = [word for flag, paths in files.items() for word in (flag, *map(str, paths))]
    size = _DRY_VOCABULARY if args.dry_run else recipe.vocab_size
    prepare += ["--vocab-size", str(size), *recipe.clean, *(_DRY_PREPARE if args.dry_run else ())]
    train = ["--preset", recipe.preset, *recipe.train, *(_DRY_TRAIN if args.dry_run else ()), *args.train]
    data, model, out = work / "data", work / "model", work / f"{recipe.test}.{target.suffix.removeprefix('.')}"
    _run(output, "prepare", *prepare, "--out", str(data))
    _run(output, "train", *train, "--data", str(data), "--out", str(model))
    _run(output, "translate", str(model), read=source, write=out)
    _run(output, "score", "--ref", str(target), *recipe.score, read=out)


def estimate(recipe: Recipe, tokens_per_second: float, price: float | None = None) -> str:
    """A line with the hours, and the money at `price` an hour, of a recipe's training at a measured speed."""
    from fasttfm.config import gather, with_defaults

    if not tokens_per_second > 0:
        raise UserError(f"--estimate {tokens_per_second:g}: give the target tokens per second, more than 0")
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
    """Print a command and run it; SystemExit with its status where it fails, after its own message."""
    shown = shlex.join(["fasttfm", *words])
    shown += f" < {shlex.quote(str(read))}" * (read is not None) + f" > {shlex.quote(str(write))}" * (write is not None)
    is_result = words[0] == "score"
    if not output.quiet:
        print(f"\n$ {shown}", file=sys.stderr if output.as_json else sys.stdout, flush=True)
    # before the recipe's own flags: what follows may be all of --train
    flags = ["--quiet"] * output.quiet + ["--json"] * (output.as_json and is_result)
    command = [sys.executable, "-m", "fasttfm", words[0], *flags, *words[1:]]
    unfinished = None if write is None else write.with_name(f".{write.name}")
    with ExitStack() as files:
        stdin = subprocess.DEVNULL if read is None else files.enter_context(read.open("rb"))
        hidden = sys.stderr if output.as_json and not is_result else None  # standard output is for the document
        stdout = hidden if unfinished is None else files.enter_context(unfinished.open("wb"))
        status = subprocess.run(command, stdin=stdin, stdout=stdout, check=False).returncode
    if status:
        raise SystemExit(status)
    if unfinished is not None and write is not None:
        unfinished.replace(write)  # never half a translation under the name of a whole one
