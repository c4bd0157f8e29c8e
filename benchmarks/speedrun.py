"""Minutes of two CPU cores from text to BLEU on Multi30k's validation set, by the rules of docs/speedrun.md.

    python -m benchmarks.speedrun --text data/multi30k --seed 1     what follows -- goes to fasttfm train

The clock runs from the start of `fasttfm prepare` to the score: preparing, training, translating the validation set
with beam search, scoring. Appends one line to benchmarks/results/speedrun.jsonl.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import command, end_to_end
from fasttfm.checkpoints.run_log import read_log

NAME = "multi30k-fast"
GOAL, MINUTES = 39.0, 20.0


def run(text: Path, work: Path, seed: int, more: Sequence[str]) -> dict[str, Any]:
    """Text to score; the fields of the record."""
    begin = time.monotonic()
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks[name] = round((time.monotonic() - begin) / 60 - sum(marks.values()), 2)

    data = end_to_end.prepare(NAME, text, work)
    mark("prepare")
    model, output = work / "model", work / "valid.txt"
    train = ["train", *end_to_end.CORPORA[NAME].train, "--seed", str(seed), "--no-tensorboard", *more]
    end_to_end.fasttfm([*train, "--data", str(data), "--out", str(model)])
    mark("train")
    lines = end_to_end.source_lines(NAME, text)
    with output.open("wb") as out:
        end_to_end.fasttfm(["translate", str(model), "--checkpoint", "last"], input=lines, stdout=out)
    mark("translate")
    scores = end_to_end.scored(NAME, text, output)
    mark("score")
    steps = [entry for entry in read_log(model) if entry["kind"] == "train"]
    return {
        "train_command": " ".join(["fasttfm", *train]),
        "minutes": round((time.monotonic() - begin) / 60, 2),
        "minutes_of": marks,
        "bleu": scores["bleu"],
        "bleu_signature": scores["bleu_signature"],
        "updates": steps[-1]["step"],
        "target_tokens": sum(entry["target_tokens"] for entry in steps),
        "training_curve": [[entry["step"], round(entry["nll"], 3)] for entry in steps if entry["step"] % 200 == 0],
    }


def main(argv: Sequence[str] | None = None) -> int:
    given, more = command.split(argv)
    parser = command.parser("benchmarks.speedrun", __doc__)
    parser.add_argument("--text", type=Path, required=True, help="folder of Multi30k's train and valid files")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--note", help="kept in the record as it is")
    args = parser.parse_args(given)
    # workers take a thread each by themselves; the search and SentencePiece take what there is
    os.environ.pop("OMP_NUM_THREADS", None)
    with tempfile.TemporaryDirectory() as folder:
        fields = run(args.text, Path(folder), args.seed, more)
    reached = "reached" if fields["bleu"] >= GOAL and fields["minutes"] <= MINUTES else "not reached"
    print(f"BLEU {fields['bleu']:.2f} after {fields['minutes']} minutes: {GOAL} in {MINUTES:g} minutes is {reached}")
    noted = {} if args.note is None else {"note": args.note}
    command.keep(args.results, "speedrun", seed=args.seed, **fields, **noted)
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
