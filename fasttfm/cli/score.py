"""`fasttfm score`: translations on standard input against raw references."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "score",
        help="sacreBLEU and chrF of standard input against references",
        description="Scores standard input, line by line, against raw (not tokenised) references.",
    )
    parser.add_argument("--ref", type=Path, required=True, metavar="FILE", help="raw references, plain or gzip")
    parser.add_argument(
        "--tokenize",
        default="13a",
        metavar="NAME",
        help="how sacreBLEU splits words: 13a (default), intl, char or zh; ja-mecab and ko-mecab need extra packages, "
        "flores101 and flores200 a download, none takes the text as it is",
    )
    parser.add_argument(
        "--compound-split",
        action="store_true",
        help="also the number that papers on WMT14 English-German print: tokenised, hyphenated words split",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line in place of the table")


def run(args) -> None:
    from fasttfm.data.corpus import decode_lines, read_lines
    from fasttfm.data.scoring import TOKENIZERS, bleu, chrf, compound_split_bleu
    from fasttfm.errors import UserError
    from fasttfm.wording import counted

    if args.tokenize not in TOKENIZERS:
        raise UserError(f"--tokenize {args.tokenize}: one of {', '.join(TOKENIZERS)} is allowed")
    references = list(read_lines(args.ref))
    if not references:
        raise UserError(f"{args.ref}: the file is empty, there is nothing to score against")
    if sys.stdin.isatty():
        print("fasttfm score: reading translations from the keyboard, end with Ctrl-D", file=sys.stderr)
    hypotheses = list(decode_lines(sys.stdin.buffer, "standard input"))
    if len(hypotheses) != len(references):
        raise UserError(
            f"standard input has {counted(len(hypotheses), 'line')} but {args.ref} has {len(references):,}: "
            f"one translation for each reference is needed, in the same order"
        )
    scores = {
        "bleu": bleu(hypotheses, references, tokenize=args.tokenize),
        "bleu_lowercase": bleu(hypotheses, references, tokenize=args.tokenize, lowercase=True),
        "chrf": chrf(hypotheses, references),
    }
    if args.compound_split:
        scores["bleu_compound_split"] = compound_split_bleu(hypotheses, references)
    if args.json:
        record: dict[str, object] = {"lines": len(references)}
        for name, score in scores.items():
            record[name] = round(score.value, 4)
            record[f"{name}_signature"] = score.signature
        print(json.dumps(record))
        return
    for name, score in scores.items():
        print(f"{_TITLES[name]:<22}{score.value:6.2f}  {score.signature}")


_TITLES = {
    "bleu": "BLEU",
    "bleu_lowercase": "BLEU, lower-cased",
    "chrf": "chrF",
    "bleu_compound_split": "BLEU, compounds split",
}
"""Score -> its name in the table."""
