"""`fasttfm shortlist MODEL --data DATA`: which target tokens each source token may bring."""

from __future__ import annotations

import argparse
from pathlib import Path

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.errors import UserError


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "shortlist",
        help="make a vocabulary map from training data, for faster searches",
        description="Writes which target tokens each source token may bring into a translation (IBM model 1), in the "
        "format of CTranslate2's vmap.txt. fasttfm translate --shortlist FILE then computes these alone.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="model directory made by fasttfm train")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DATA", help="directory of fasttfm prepare that it was trained on"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="(default: vmap.txt in MODEL)")
    parser.add_argument(
        "--best", type=int, default=100, metavar="N", help="target tokens of a source token (default: %(default)s)"
    )
    parser.add_argument(
        "--frequent",
        type=int,
        default=100,
        metavar="N",
        help="most frequent target tokens, which every sentence may have (default: %(default)s)",
    )
    parser.add_argument(
        "--iterations", type=int, default=5, metavar="N", help="of expectation maximisation (default: %(default)s)"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=100_000,
        metavar="N",
        help="training pairs to count in, evenly spread over the data; about 10 KB of memory each (default: "
        "%(default)s)",
    )
    add_output_flags(parser, "the sizes")


def run(args: argparse.Namespace) -> None:
    """Write the file and say how many tokens sentences keep."""
    import numpy as np

    from fasttfm.checkpoints.vocabulary import VOCABULARY_FILES
    from fasttfm.data.prepared import ParallelTokens, PreparedData
    from fasttfm.decoding.shortlist import FILE_NAME, Shortlist

    for name in ("best", "frequent", "iterations", "pairs"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: give at least 1")
    if not (args.model / "config.yaml").exists():
        raise UserError(f"{args.model}: not a model directory (no config.yaml): give one that fasttfm train made")
    data = PreparedData.open(args.data)
    for name in VOCABULARY_FILES:
        ours, theirs = (folder / name for folder in (args.model, args.data))
        if ours.exists() != theirs.exists() or (ours.exists() and ours.read_bytes() != theirs.read_bytes()):
            raise UserError(f"{args.data}: its {name} is not that of {args.model}: give the data it was trained on")
    chosen = np.unique(np.linspace(0, len(data.train) - 1, min(args.pairs, len(data.train))).astype(int))
    sides = ([get(i).tolist() for i in chosen] for get in (data.train.source, data.train.target))
    pairs = ParallelTokens.from_lists(*sides)
    source, target = data.source_tokenizer, data.target_tokenizer
    shortlist = Shortlist.from_pairs(
        pairs, source, target, best=args.best, frequent=args.frequent, iterations=args.iterations
    )
    out = args.out or args.model / FILE_NAME
    shortlist.save(out, source, target)
    some = range(0, len(pairs), max(1, len(pairs) // 1000))
    kept = float(np.mean([len(shortlist.tokens(pairs.source(i).tolist())) for i in some]))
    missing = 1 - float(np.mean([_share(pairs.target(i), shortlist.tokens(pairs.source(i).tolist())) for i in some]))
    Output.of(args, "shortlist").result(
        f"{out}: a sentence keeps {kept:,.0f} of {len(target):,} target tokens; {missing:.2%} of the training data's "
        "target tokens are left out",
        out=str(out), pairs=len(pairs), tokens_kept=round(kept, 1), vocabulary=len(target),
        left_out=round(missing, 6),
    )  # fmt: skip


def _share(target, tokens) -> float:
    """Of a target's tokens those that are kept; 1 for an empty one."""
    import numpy as np

    return float(np.isin(target, tokens).mean()) if len(target) else 1.0
