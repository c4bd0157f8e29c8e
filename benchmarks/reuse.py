"""What keeping the encoder's output, and the cross-attention's keys and values, is worth between two tokens: six rows.

    python -m benchmarks.reuse

The document "Transformer Details Not Described in The Paper" counts 1.33x for encoding a sentence once in place of once
a token, and another 1.42x for computing keys and values of the encoder's output once. Here the same two steps are timed
in greedy searches of 27 source tokens and outputs of 27 tokens at batch 1, 8 and 64, with paper-base (V = 8,000, random
weights), and printed beside theirs. cases/decoding_steps.py says what each search keeps: earlier targets are computed
again in all of them, as in theirs. The searches take turns after one of two tokens that warms what there is to warm,
and the median of their seconds counts. Appends one line to benchmarks/results/reuse.jsonl.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import command
from benchmarks.cases import synthetic
from benchmarks.cases.decoding import SOURCE, Ours, random_model
from benchmarks.cases.decoding_steps import RUNGS, Less
from benchmarks.cases.training_step import model_config
from fasttfm.models import TransformerConfig

BATCHES = (1, 8, 64)
STEPS = {
    "encoder once": ("nothing kept", "encoder kept", 1.33),
    "cross-attention's keys and values once": ("encoder kept", "encoder and cross K, V kept", 1.42),
}
"""What is kept from one search to the next -> the two searches, and how much faster the document found the second."""
_SIZE: dict[str, Any] = {"vocab_size": 8_000, "dropout": 0.0}


def measure(config: TransformerConfig, batch: int, length: int, rounds: int) -> list[dict[str, Any]]:
    """A row a step of STEPS."""
    model = random_model(config, 1)
    names = list(dict.fromkeys(name for before, after, _ in STEPS.values() for name in (before, after)))
    models = {name: Less(model, **RUNGS[name]) for name in names}
    sources = synthetic.sources(batch, SOURCE, config.vocab_size, seed=1)
    for each in models.values():
        Ours(each, beam=1, length=2)(sources)
    searches = {name: partial(Ours(each, beam=1, length=length), sources) for name, each in models.items()}
    seconds, outputs = command.in_turns(searches, rounds, warm_up=False)
    same = sum(one == other for one, other in zip(outputs[names[0]], outputs[names[-1]]))
    if same < 0.9 * batch:  # rounding may decide a tie
        raise SystemExit(f"{batch - same} of {batch} sentences differ between the searches")
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return [
        {
            "batch": batch,
            "step": step,
            "seconds_before": round(medians[before], 4),
            "seconds_after": round(medians[after], 4),
            "speedup": round(medians[before] / medians[after], 2),
            "speedup_of_the_document": theirs,
        }
        for step, (before, after, theirs) in STEPS.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("reuse", __doc__)
    parser.add_argument("--length", type=int, default=27, help="tokens of an output; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="turns at batch 64, more at others; default: %(default)s")
    args = parser.parse_args(argv)
    config = dataclasses.replace(model_config("paper-base"), **_SIZE)
    measured: list[dict[str, Any]] = []
    for batch in BATCHES:
        measured += measure(config, batch, args.length, args.rounds * {1: 3, 8: 3}.get(batch, 1))
        for row in measured[-len(STEPS) :]:
            theirs = row["speedup_of_the_document"]
            print(f"batch {batch:>2}  {row['step']:<40} {row['speedup']:.2f}x  (the document: {theirs}x)", flush=True)
    command.keep(args.results, "reuse", length=args.length, threads=torch.get_num_threads(), measured=measured)
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
