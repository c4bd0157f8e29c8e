"""Scores translations from standard input, one per line, with sacreBLEU."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fasttfm.cli.output import add_output_flags
from fasttfm.cli.parser import Parser
from fasttfm.cli.paths import CHECKPOINT, INPUT_FILE
from fasttfm.errors import UserError
from fasttfm.system.wording import Tally, counted

if TYPE_CHECKING:
    from fasttfm.data.scoring import Comparison, Score


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--ref",
        type=INPUT_FILE,
        required=True,
        action="append",
        help="reference translations, not tokenized, plain or gzip; may be repeated for multiple references",
    )
    parser.add_argument(
        "--tokenize",
        default="auto",
        metavar="NAME",
        help="sacreBLEU's tokenizer: 13a, intl, char, zh, ja-mecab or ko-mecab (need extra packages), flores101 "
        "or flores200 (need a download), or none (default: by the script of the references, 13a for most)",
    )
    parser.add_argument(
        "--compound-split",
        action="store_true",
        help="also print tokenized BLEU with split compounds, as papers report it on WMT14 English-German (extra: "
        "moses)",
    )
    parser.add_argument("--ter", action="store_true", help="also print TER; takes some seconds for thousands of lines")
    parser.add_argument(
        "--baseline",
        type=INPUT_FILE,
        help="translations of another system: print both systems' scores and whether they differ significantly",
    )
    parser.add_argument(
        "--test",
        choices=("bootstrap", "randomization"),
        default="bootstrap",
        help="with --baseline: sacreBLEU's paired bootstrap or approximate randomization (default: %(default)s)",
    )
    parser.needs = {"--test": ["--baseline"], "--comet": ["--src"], "--src": ["--comet"]}
    parser.add_argument(
        "--comet",
        type=CHECKPOINT,
        metavar="MODEL",
        help="also print the COMET score of a model, given by path or by its name on the hub, such as "
        "Unbabel/wmt22-comet-da; needs --src and pip install unbabel-comet",
    )
    parser.add_argument("--src", type=INPUT_FILE, help="with --comet: source text, plain or gzip")
    add_output_flags(parser, "the scores")


def run(args) -> None:
    from fasttfm.data.corpus import decode_lines, read_lines
    from fasttfm.data.scoring import bleu, chrf, comet, compare, compound_split_bleu, refuse_missing, ter

    first, *others = args.ref
    reference = list(read_lines(first))
    if not reference:
        raise UserError(f"{first}: the file is empty, there is nothing to score against")

    def aligned(name: object, lines: Iterable[str], what: str = "translation") -> list[str]:
        lines = list(lines)
        if lines and all(re.match(r"\d+ \|\|\| .* \|\|\| ", line) for line in lines):
            raise UserError(f"{name} is an n-best list: score one translation of each line, without number and score")
        if len(lines) != len(reference):
            raise UserError(
                f"{name} has {counted(len(lines), 'line')} but {first} has {len(reference):,}: one {what} for each "
                "reference is needed, in the same order"
            )
        return lines

    references = [reference, *(aligned(path, read_lines(path), "reference") for path in others)]
    args.tokenize = _tokenizer(args.tokenize, reference)

    # check everything before reading standard input: a pipe cannot be read again, and may hold hours of work
    refuse_missing(args.tokenize, compound_split=args.compound_split, with_comet=args.comet is not None)
    baseline = None if args.baseline is None else aligned(args.baseline, read_lines(args.baseline))
    sources = None if args.src is None else aligned(args.src, read_lines(args.src), "source line")
    if sys.stdin.isatty() and not args.quiet:
        print("fasttfm score: reading translations from the keyboard, end with Ctrl-D", file=sys.stderr)
    hypotheses = aligned("standard input", decode_lines(sys.stdin.buffer, "standard input"))
    _warn_of_unicode_forms(hypotheses, reference)
    scores = {
        "bleu": bleu(hypotheses, references, tokenize=args.tokenize),
        "bleu_lowercase": bleu(hypotheses, references, tokenize=args.tokenize, lowercase=True),
        "chrf": chrf(hypotheses, references),
    }
    if args.ter:
        scores["ter"] = ter(hypotheses, references)
    if args.compound_split:
        scores["bleu_compound_split"] = compound_split_bleu(hypotheses, references)
    if sources is not None:  # --src requires --comet
        scores["comet"] = comet(args.comet, sources, hypotheses, reference)
    comparisons = {}
    if baseline is not None:
        comparisons = compare(
            hypotheses, baseline, references, test=args.test, tokenize=args.tokenize, with_ter=args.ter
        )
    if args.json:
        print(json.dumps(_record(len(reference), scores, comparisons)))
        return
    for name, score in scores.items():
        print(f"{_TITLES[name]:<22}{score.value:6.2f}  {score.signature}")
    for name, each in comparisons.items():
        print(f"{_TITLES[name]:<22}{each.baseline:6.2f} -> {each.system:.2f}, p = {each.p_value:.4f}  {each.signature}")


def _warn_of_unicode_forms(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Warn of translations that differ from their references only in Unicode normalization."""
    from fasttfm.data.unicode_forms import composed

    differing = Tally()
    for number, (ours, theirs) in enumerate(zip(hypotheses, references), start=1):
        if ours != theirs and composed(ours) == composed(theirs):
            differing.add(number)
    if differing.count:
        warning = f"equal to the reference but for Unicode's normal form: {differing}: convert both sides"
        print(f"fasttfm score: warning: {warning} (uconv -x nfc)", file=sys.stderr)


def _tokenizer(name: str, references: Sequence[str]) -> str:
    """Resolve --tokenize; warns if the tokenizer cannot segment the script of the references."""
    from fasttfm.data.scoring import AUTO, TOKENIZERS, script_without_words, tokenizer_of

    if name == AUTO:
        return tokenizer_of(references)
    if name not in TOKENIZERS:
        raise UserError(f"--tokenize {name}: one of {', '.join((AUTO, *TOKENIZERS))} is allowed")
    if name in ("13a", "intl", "none") and script_without_words(references):
        warning = f"--tokenize {name} finds no words in this script: BLEU counts whole lines"
        print(f"fasttfm score: warning: {warning}; leave it out, or give char", file=sys.stderr)
    return name


def _record(lines: int, scores: "dict[str, Score]", comparisons: "dict[str, Comparison]") -> dict[str, object]:
    record: dict[str, object] = {"lines": lines}
    for name, score in scores.items():
        record[name] = round(score.value, 4)
        record[f"{name}_signature"] = score.signature
    for name, each in comparisons.items():
        record[f"{name}_baseline"] = round(each.baseline, 4)
        record[f"{name}_p_value"] = round(each.p_value, 6)
        record[f"{name}_test"] = each.signature
    return record


_TITLES = {
    "bleu": "BLEU",
    "bleu_lowercase": "BLEU, lower-cased",
    "chrf": "chrF",
    "ter": "TER",
    "comet": "COMET",
    "bleu_compound_split": "BLEU, compounds split",
}
"""Score -> its name in the table."""
