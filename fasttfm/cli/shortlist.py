"""Writes the likely target tokens of each source token (IBM model 1) in the format of CTranslate2's vmap.txt.
fasttfm translate --shortlist FILE computes only these.
"""

import argparse

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import InRange, add_data
from fasttfm.cli.paths import MODEL, OUTPUT_SHORTLIST
from fasttfm.errors import UserError

_PAIRS = 100_000
"""Training pairs to count; each takes about 10 kB of memory."""
_COUNTS = {
    "best": "target tokens for each source token",
    "frequent": "most frequent target tokens, allowed in every sentence",
}
"""Flag -> its help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=MODEL, metavar="MODEL", help="model directory made by fasttfm train")
    add_data(parser, "prepared data that the model was trained on")
    parser.add_argument(
        "--out", type=OUTPUT_SHORTLIST, metavar="FILE", help="file to write (default: vmap.txt in MODEL)"
    )
    for name, text in _COUNTS.items():
        text += " (default: %(default)s)"
        parser.add_argument(f"--{name}", type=InRange(1, 1_000_000_000), default=100, help=text)
    add_output_flags(parser, "the sizes")


def run(args: argparse.Namespace) -> None:
    """Write the file and print how many target tokens it leaves to a sentence."""
    import numpy as np

    from fasttfm.data.prepared import ParallelTokens, PreparedData
    from fasttfm.store.vocabulary import refuse_another_vocabulary
    from fasttfm.translate.shortlist import FILE_NAME, Shortlist

    if not (args.model / "config.yaml").exists():
        raise UserError(f"{args.model}: not a model directory (no config.yaml): give one that fasttfm train made")
    data = PreparedData.open(args.data)
    refuse_another_vocabulary(data, args.model)
    chosen = np.unique(np.linspace(0, len(data.train) - 1, min(_PAIRS, len(data.train))).astype(int))
    sides = ([get(i).tolist() for i in chosen] for get in (data.train.source, data.train.target))
    pairs = ParallelTokens.from_lists(*sides)
    source, target = data.source_tokenizer, data.target_tokenizer
    shortlist = Shortlist.from_pairs(pairs, source, target, best=args.best, frequent=args.frequent)
    out = args.out or args.model / FILE_NAME
    shortlist.save(out, source, target)
    valid = data.valid  # measured on validation pairs: the map covers nearly all training pairs
    kept = [shortlist.tokens(valid.source(i).tolist()) for i in range(len(valid))]
    missing = sum(int((~np.isin(valid.target(i), tokens)).sum()) for i, tokens in enumerate(kept))
    left_out = missing / max(1, sum(len(valid.target(i)) for i in range(len(valid))))
    tokens_kept = sum(map(len, kept)) / max(1, len(kept))
    Output.of(args, "shortlist").result(
        f"{out}: a validation sentence keeps {tokens_kept:,.0f} of {len(target):,} target tokens; {left_out:.2%} of "
        "its reference's are left out",
        out=str(out), pairs=len(pairs), tokens_kept=round(tokens_kept, 1), vocabulary=len(target),
        left_out=round(left_out, 6),
    )  # fmt: skip
