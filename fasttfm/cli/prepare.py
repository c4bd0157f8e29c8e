"""Trains a SentencePiece vocabulary on parallel text and writes the token ids of training and validation text.

Text files are UTF-8 with one sentence per line, plain or compressed with gzip, bzip2, xz or zstandard. Several files
per side are concatenated in the given order.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import THREADS, Parser, add_downloads, add_out
from fasttfm.cli.paths import INPUT_FILE
from fasttfm.config import add_field_flags, field_values
from fasttfm.config.fields import flag_name
from fasttfm.data.datasets import DATASETS, DEMO, fetch_dataset
from fasttfm.data.filters import SCRIPTS
from fasttfm.data.prepare import PrepareOptions, prepare
from fasttfm.errors import UserError
from fasttfm.system.machine import allowed_cores

_TEXTS = {
    "--src": "training source text",
    "--tgt": "training target text",
    "--valid-src": "validation source text",
    "--valid-tgt": "validation target text",
}
_SETTINGS = (
    "vocab_size", "vocab_pairs", "separate_vocab", "model_type", "character_coverage", "byte_fallback", "normalization",
    "max_length", "subset", "replace_invalid",
)  # fmt: skip
_OF_A_NEW_VOCABULARY = (
    "vocab_size", "vocab_pairs", "model_type", "character_coverage", "byte_fallback", "normalization",
)  # fmt: skip
"""Settings without effect on an existing vocabulary (--spm)."""
_RULES = ("max_ratio", "drop_duplicates", "drop_identical")
_SHOWN = (
    *(*_TEXTS, "--out", "--dataset", "--data-dir", "--spm", "--threads"),
    *("--vocab-size", "--separate-vocab", "--model-type", "--max-length", "--subset"),
    *("--max-ratio", "--drop-duplicates", "--quiet", "--json"),
)
"""Flags that --help shows."""
_EXAMPLES = """
    fasttfm prepare --src train.en --tgt train.de --valid-src valid.en --valid-tgt valid.de --out DATA
    fasttfm prepare --dataset multi30k --vocab-size 8000 --out DATA
    fasttfm prepare --dataset demo --vocab-size 2000 --out DATA          # a built-in corpus, for a first trial
"""


def add_arguments(parser: Parser) -> None:
    parser.needs = {"--mirror": ["--dataset"], "--data-dir": ["--dataset"]}
    parser.apart = [("--spm", flag_name(name)) for name in _OF_A_NEW_VOCABULARY]
    _add_texts(parser)
    add_out(parser, "DATA", "directory to write")
    _add_sources(parser)
    add_field_flags(parser.add_argument_group("data settings"), PrepareOptions, _SETTINGS)
    rules = parser.add_argument_group(
        "training pairs to leave out", "prepare reports the number of pairs that each rule left out, and the first"
    )
    add_field_flags(rules, PrepareOptions, _RULES)
    for flag, side in (("--src-script", "source"), ("--tgt-script", "target")):
        text = f"leave out training pairs whose {side} is mostly in another script than NAME: {', '.join(SCRIPTS)}"
        rules.add_argument(flag, dest=f"{side}_script", metavar="NAME", help=text)
    add_output_flags(parser, "the directory and the notes")
    parser.add_argument(
        "--threads",
        type=THREADS,
        default=allowed_cores(),
        help="threads that split text into subwords (default: all cores)",
    )
    parser.shorten(*_SHOWN, examples=_EXAMPLES)


def _add_texts(parser: argparse.ArgumentParser) -> None:
    for flag, text in _TEXTS.items():
        parser.add_argument(flag, nargs="+", action="extend", type=INPUT_FILE, help=f"{text}; may be repeated")
    parser.add_argument(
        "--dataset",
        metavar="NAME",
        help=f"dataset to download instead of --src, --tgt, --valid-src and --valid-tgt: {', '.join(DATASETS)}; or "
        f"{DEMO}, which is built in",
    )
    add_downloads(parser)


def _add_sources(parser: argparse.ArgumentParser) -> None:
    several = parser.add_argument_group("several sources", "give each flag once for every source file, in their order")
    several.add_argument(
        "--weight",
        dest="weights",
        type=float,
        action="append",
        default=[],
        help="how often an epoch uses the pairs of this training file: 2 uses each twice, 0.5 every second pair",
    )
    for flag, what in (("--source-tag", "training"), ("--valid-source-tag", "validation")):
        several.add_argument(
            flag,
            dest=f"{flag.removeprefix('--').replace('-', '_')}s",
            action="append",
            default=[],
            metavar="WORD",
            help=f"token to prepend to each source line of this {what} file, such as <2de> in a multilingual model",
        )
    parser.add_argument(
        "--spm",
        type=INPUT_FILE,
        action="append",
        default=[],
        metavar="PATH",
        help="vocabulary to use instead of training one: a model directory, data directory or SentencePiece file; give "
        "it once for both sides, or the source's and then the target's",
    )


def run(args) -> None:
    output = Output.of(args, "prepare")
    fields = {name: getattr(args, name) for name in ("source_script", "target_script")}
    fields |= {name: tuple(getattr(args, name)) for name in ("weights", "source_tags", "valid_source_tags")}
    options = PrepareOptions(**fields, **field_values(args, (*_SETTINGS, *_RULES)))
    progress = partial(output.progress, unit="pairs")
    texts = _texts(args, output)
    prepare(*texts, args.out, options, models=args.spm, threads=args.threads, say=output.note, progress=progress)
    if args.json:
        output.result("", out=str(args.out), notes=output.notes)


def _texts(args, output: Output) -> tuple[Sequence[Path], Sequence[Path], Sequence[Path], Sequence[Path]]:
    """Return the files given as flags, or those of the dataset."""
    files = {flag: getattr(args, flag.removeprefix("--").replace("-", "_")) for flag in _TEXTS}
    if args.dataset is None:
        if missing := [flag for flag in files if not files[flag]]:
            raise UserError(
                f"the following arguments are required: {', '.join(missing)}; or give --dataset; "
                "fasttfm prepare --help lists what there is"
            )
        return files["--src"], files["--tgt"], files["--valid-src"], files["--valid-tgt"]
    if more := [flag for flag in files if files[flag]]:
        raise UserError(f"--dataset brings its own text: leave out {', '.join(more)}")
    texts = fetch_dataset(
        args.dataset,
        args.data_dir,
        mirrors=args.mirror,
        say=output.note,
        progress=partial(output.progress, unit="bytes"),
    )
    for name, (source, target) in texts.tests.items():
        output.note(f"test set {name}: {source} and {target}")
    return *texts.train, *texts.valid
