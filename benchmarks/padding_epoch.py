"""What padding costs an epoch of a real corpus: pairs in random order against pairs of like length, the same budget.

    python -m benchmarks.padding_epoch --text data/tatoeba_ende                 whole epochs
    python -m benchmarks.padding_epoch --text data/tatoeba_ende --share 0.5     so much of each, and the record says so

"Transformer Details Not Described in The Paper" took 250 s an epoch with 60% padding and 100 s with 5%; that stands
beside. Timed is all of an epoch: planning, collating, forward, backward and optimizer, with the preset multi30k's model
on all cores of one process. Appends one line to benchmarks/results/padding-epoch.jsonl.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import command, end_to_end
from benchmarks.cases import padding, training_step
from benchmarks.measure import text_table
from fasttfm.data.batches import Batch, TokenBatches, collate
from fasttfm.data.prepared import ParallelTokens, PreparedData
from fasttfm.data.shapes import round_length
from fasttfm.errors import UserError
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.presets import preset_section

CORPUS, PRESET = "tatoeba-ende", "multi30k"
PUBLISHED = {"random order": {"padding": 0.6, "seconds": 250}, "like length": {"padding": 0.05, "seconds": 100}}
"""Of the document."""
_WARM_UP = 3


def random_order(pairs: ParallelTokens, max_tokens: int) -> Iterator[Batch]:
    """Batches of pairs as a random order brings them, rows times longest side within the budget."""
    for rows in padding.shuffled(pairs, max_tokens):
        sides = [pairs.source(row) for row in rows], [pairs.target(row) for row in rows]
        yield collate(*sides, [round_length(max(map(len, side)) + 1) for side in sides])


def like_length(pairs: ParallelTokens, max_tokens: int) -> Iterator[Batch]:
    """The trainer's batches."""
    batches = TokenBatches(pairs, max_tokens)
    for indices in batches.epoch(0):
        yield batches.batch(indices)


ORDERS = {"random order": random_order, "like length": like_length}


def run_epoch(step: padding.Step, batches: Iterator[Batch], tokens: int) -> dict[str, Any]:
    """Train on batches until they have held so many target tokens; seconds, and what was computed."""
    begin = time.perf_counter()
    used = cells = targets = count = 0
    for batch in batches:
        step(batch)
        used, cells = used + batch.source_tokens + batch.target_tokens, cells + batch.cells
        targets, count = targets + batch.target_tokens, count + 1
        if targets >= tokens:
            break
    seconds = time.perf_counter() - begin
    return {
        "seconds": round(seconds, 1),
        "padding": round(1 - used / cells, 4),
        "batches": count,
        "target_tokens": targets,
        "tokens_per_second": round(targets / seconds),
    }


def measure(data: PreparedData, max_tokens: int, share: float) -> dict[str, dict[str, Any]]:
    """An epoch of each order, on models that begin alike."""
    config = TransformerConfig(**{**preset_section(PRESET, "model"), "vocab_size": len(data.target_tokenizer)})
    training = training_step.training_config(PRESET, torch.bfloat16)
    tokens = int(np.ceil(share * int((data.train.target_lengths + 1).sum())))
    measured = {}
    for name, order in ORDERS.items():
        torch.manual_seed(1)
        step = training_step.OurStep(
            Transformer(config).train(), training=training, device=torch.device("cpu"), autocast=torch.bfloat16
        )
        for batch, _ in zip(order(data.train, max_tokens), range(_WARM_UP)):
            step(batch)
        measured[name] = run_epoch(step, order(data.train, max_tokens), tokens)
        print(name, measured[name], flush=True)
    return measured


def beside_published(measured: dict[str, dict[str, Any]]) -> str:
    """Ours beside the document's, as lines of text."""
    rows = [["", "padding", "seconds", "document: padding", "seconds"]]
    for name, row in measured.items():
        theirs = PUBLISHED[name]
        rows.append(
            [name, f"{row['padding']:.0%}", f"{row['seconds']:.0f}", f"{theirs['padding']:.0%}", f"{theirs['seconds']}"]
        )
    gains = [each["random order"]["seconds"] / each["like length"]["seconds"] for each in (measured, PUBLISHED)]
    rows.append(["times as fast", "", f"{gains[0]:.2f}", "", f"{gains[1]:.2f}"])
    return text_table.aligned(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("padding_epoch", __doc__)
    parser.add_argument("--text", type=Path, required=True, help="folder of train and valid files, en and de")
    parser.add_argument("--work", type=Path, help="folder for the prepared data (default: one that goes afterwards)")
    parser.add_argument("--share", type=float, default=1.0, help="of an epoch's target tokens (default: all)")
    parser.add_argument(
        "--max-tokens", type=int, default=4096, help="of a batch, padding counted (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if not 0 < args.share <= 1:
        raise UserError(f"--share {args.share:g}: above 0 and at most 1 is allowed")
    with tempfile.TemporaryDirectory() as folder:
        data = PreparedData.open(end_to_end.prepare(CORPUS, args.text, args.work or Path(folder)))
        pairs, measured = len(data.train), measure(data, args.max_tokens, args.share)
    command.keep(
        args.results,
        "padding_epoch",
        corpus=args.text.name,
        pairs=pairs,
        share=args.share,
        max_tokens=args.max_tokens,
        threads=torch.get_num_threads(),
        measured=[{"order": name, **row} for name, row in measured.items()],
        published=[{"order": name, **row} for name, row in PUBLISHED.items()],
    )
    print(f"{args.share:.0%} of an epoch of {pairs:,} pairs")
    print(beside_published(measured))
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
