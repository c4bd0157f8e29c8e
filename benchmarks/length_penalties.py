"""BLEU, length and empty translations by beam, length penalty and early stopping, on the validation set.

    python -m benchmarks.length_penalties MODEL DATA

The default --length-penalty is the one that loses least over several corpora; the benchmark report has the table.
Appends one line to benchmarks/results/length-penalties.jsonl.
"""

import json
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import command
from fasttfm.cli.parser import InRange
from fasttfm.data.prepared import PreparedData
from fasttfm.data.scoring import bleu, tokenizer_of
from fasttfm.translate import Translator

BEAMS = (1, 2, 4, 8)
PENALTIES = (("none", 0.0), ("wu", 0.6), ("wu", 1.0), ("power", 0.6), ("power", 1.0))


def measured(model: Path, sources: Sequence[str], references: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a row for each beam, length penalty and early stopping; one for greedy search, which ignores both."""
    tokenize = tokenizer_of(references, packages=False)
    words = sum(len(line.split()) for line in references)
    for beam in BEAMS:
        for (penalty, alpha), early in product(PENALTIES, (False, True)) if beam > 1 else ((PENALTIES[0], False),):
            settings: dict[str, Any] = {"beam": beam, "length_penalty": penalty, "early_stopping": early}
            settings |= {"alpha": alpha} if alpha else {}
            translator = Translator.from_directory(model, workers=1, **settings)
            begin = time.perf_counter()
            lines = translator.translate(sources)
            seconds = time.perf_counter() - begin
            yield {
                "beam": beam, "length_penalty": penalty, "alpha": alpha, "early_stopping": early,
                "bleu": round(bleu(lines, references, tokenize=tokenize).value, 2),
                "length_ratio": round(sum(len(line.split()) for line in lines) / words, 4),
                "empty": sum(not line for line in lines), "seconds": round(seconds, 2),
            }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("benchmarks.length_penalties", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="model directory")
    parser.add_argument("data", type=Path, metavar="DATA", help="directory of fasttfm prepare")
    parser.add_argument("--lines", type=InRange(1, 10**6), default=1_000, help="evenly spaced (default: %(default)s)")
    args = parser.parse_args(argv)
    data, rows = PreparedData.open(args.data), []
    count = min(args.lines, len(data.valid))
    sources, references = (
        [text[index * len(text) // count] for index in range(count)]
        for text in (data.valid_source_text, data.valid_target_text)
    )
    for row in measured(args.model, sources, references):
        rows.append(row)
        print(json.dumps(row), flush=True)
    command.keep(args.results, "length_penalties", data=args.data.name, lines=count, measured=rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
