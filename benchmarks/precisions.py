"""Cost of fewer digits in translations: BLEU and chrF of one model in fp32, bf16 and int8 on given test sets.

    python -m benchmarks.precisions MODEL --src test.en --ref test.de
    python -m benchmarks.precisions MODEL --src test.en --ref test.de --shortlist MODEL/vmap.txt

--src and --ref may be repeated, as many of the one as of the other. With a vocabulary map of `fasttfm shortlist` every
precision is tried with it too. Also said is how many lines are translated as in fp32 with all of the vocabulary.
Appends one line to benchmarks/results/precisions.jsonl.
"""

import itertools
import json
import time
from pathlib import Path
from typing import Any

from benchmarks import command
from fasttfm.data.corpus import read_lines
from fasttfm.data.scoring import bleu, chrf
from fasttfm.decoding import Translator
from fasttfm.decoding.translator import Precision
from fasttfm.errors import UserError

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")


def measure(
    model: Path, source: Path, reference: Path, workers: int | None, shortlist: Path | None = None
) -> list[dict[str, Any]]:
    """A row a precision, of one test set, and one more each with the vocabulary map."""
    lines, wanted = list(read_lines(source)), list(read_lines(reference))
    if len(lines) != len(wanted):
        raise UserError(f"{source} has {len(lines):,} lines but {reference} has {len(wanted):,}: they must be aligned")
    rows: list[dict[str, Any]] = []
    exact: list[str] = []
    for precision, vmap in itertools.product(PRECISIONS, dict.fromkeys((None, shortlist))):
        with Translator.from_directory(
            model, device="cpu", precision=precision, workers=workers, shortlist=vmap
        ) as translator:
            begin = time.perf_counter()
            outputs = translator.translate(lines)
            seconds = time.perf_counter() - begin
        exact = exact or outputs
        score = bleu(outputs, wanted)
        rows.append(
            {
                "text": source.name,
                "precision": precision,
                "shortlist": vmap is not None,
                "lines": len(lines),
                "bleu": round(score.value, 2),
                "bleu_change": round(score.value - (rows[0]["bleu"] if rows else score.value), 2),
                "chrf": round(chrf(outputs, wanted).value, 2),
                "lines_as_in_fp32": sum(one == other for one, other in zip(outputs, exact)),
                "seconds": round(seconds, 1),
                "signature": score.signature,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


@command.program(
    command.flag("model", type=Path, metavar="MODEL", help="model directory"),
    command.flag("--src", type=Path, action="append", required=True, metavar="FILE", help="source lines"),
    command.flag("--ref", type=Path, action="append", required=True, metavar="FILE", help="their references"),
    command.flag("--shortlist", type=Path, metavar="FILE", help="a vocabulary map to try as well"),
    command.flag("--workers", type=int, metavar="N", help="as of fasttfm translate"),
)
def main(args: Any) -> dict[str, Any]:
    if len(args.src) != len(args.ref):
        raise UserError(f"--src was given {len(args.src)} times and --ref {len(args.ref)}: give as many of both")
    pairs = zip(args.src, args.ref)
    return {"measured": [row for pair in pairs for row in measure(args.model, *pair, args.workers, args.shortlist)]}


if __name__ == "__main__":
    raise SystemExit(command.run(main))
