"""Effect of a choice on the loss: trainings that differ in nothing else, as a record and a figure.

    python -m benchmarks.curves norm --text data/wmt_news_ende --work runs/curves

    shards      parts of the corpus one after the other, against evenly mixed ones
    batching    pairs of any length together, against pairs of like length
    norm        LayerNorm after the residual sum (the paper) against before the sub-layer (tensor2tensor)
    positions   the paper's sinusoids against tensor2tensor's

The corpus is one whose lines stand by their origin, such as WMT's news test sets of ten years. The model has 3 and 3
layers of width 128. Losses are told by update, so that they are the same on an idle machine and on a busy one.
A run that is in --work is not run again. Appends a line to benchmarks/results/curves.jsonl and draws
docs/images/curves-NAME.png.
"""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import command, end_to_end
from benchmarks.measure.machine import ROOT
from fasttfm.config.model import TransformerConfig
from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import Batch, TokenBatches, collate
from fasttfm.data.prepared import ParallelTokens, PreparedData
from fasttfm.data.shapes import round_length
from fasttfm.drawing import drawing
from fasttfm.models import Transformer
from fasttfm.parsing import parse_json
from fasttfm.training.translation import Validator
from fasttfm.training.updates import AUTOCAST, Updates

CORPUS = "wmt-news"
MAX_TOKENS = 1024
SHARDS = 8
POINTS = 25
"""Validations of a run."""
VALID = 500
"""Validation pairs, the first ones."""
_MODEL = {"d_model": 128, "heads": 4, "d_ff": 512, "encoder_layers": 3, "decoder_layers": 3, "dropout": 0.1}


class ConsecutiveShards:
    """Equal parts of a corpus one after the other, as they stand in it: only the pairs within a part are mixed.

    Speaks as TokenBatches does.
    """

    def __init__(self, pairs: ParallelTokens, max_tokens: int, seed: int, shards: int) -> None:
        self.pairs, self.max_tokens = pairs, max_tokens
        bounds = np.linspace(0, len(pairs), shards + 1).astype(int).tolist()
        self._begins = bounds[:-1]
        self._shards = [
            TokenBatches(pairs.part(begin, end), max_tokens, seed) for begin, end in itertools.pairwise(bounds)
        ]

    def __len__(self) -> int:
        """Batches of an epoch."""
        return sum(map(len, self._shards))

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """The batches of an epoch, as TokenBatches.epoch() gives them."""
        return [
            batch + begin
            for begin, shard in zip(self._begins, self._shards, strict=True)
            for batch in shard.epoch(epoch)
        ]

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Batch:
        """The batch of these pairs, as TokenBatches.batch() gives it."""
        shard = int(np.searchsorted(self._begins, indices[0], "right")) - 1
        return self._shards[shard].batch(indices - self._begins[shard], epoch)


class RandomLengths:
    """Batches of pairs of any length, in random order, of as many tokens on their longer side as those of TokenBatches.

    Both sides are padded to their longest, which a batch of bucketed pairs need not do. Speaks as TokenBatches does.
    """

    def __init__(self, pairs: ParallelTokens, max_tokens: int, seed: int) -> None:
        self.pairs, self.max_tokens, self.seed = pairs, max_tokens, seed
        bucketed = TokenBatches(pairs, max_tokens, seed)
        self._count = len(bucketed)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._count

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """The batches of an epoch, as many as TokenBatches.epoch() gives."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.pairs))
        lengths = np.maximum(self.pairs.source_lengths, self.pairs.target_lengths)[order] + 1
        ends = np.cumsum(lengths)
        bounds = np.searchsorted(ends, np.linspace(0, ends[-1], self._count + 1)[1:-1])
        return [batch for batch in np.split(order, bounds) if len(batch)]

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Batch:
        """The batch of these pairs, as TokenBatches.batch() gives it."""
        sides = [self.pairs.source(i) for i in indices], [self.pairs.target(i) for i in indices]
        return collate(*sides, [round_length(max(map(len, side)) + 1) for side in sides])


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One training: what it does otherwise than the others."""

    model: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0
    """Of the updates: a run that is dear, or shows nothing more, may end earlier."""
    batches: Callable[[ParallelTokens, int, int], Any] = TokenBatches


_PRE, _POST = {"norm_first": True, "final_norm": True}, {"norm_first": False, "final_norm": False}
VARIANTS = {
    "base": Variant(model=_PRE),
    "consecutive": Variant(model=_PRE, batches=partial(ConsecutiveShards, shards=SHARDS)),
    "random": Variant(model=_PRE, batches=RandomLengths, share=0.16),
    "post-norm": Variant(model=_POST),
    "tensor2tensor": Variant(model={**_PRE, "positional_encoding": "tensor2tensor"}, share=0.52),
}
COMPARISONS = {
    "shards": {"evenly mixed": "base", f"{SHARDS} shards one after the other": "consecutive"},
    "batching": {"pairs of like length": "base", "pairs of any length": "random"},
    "norm": {"pre-norm": "base", "post-norm": "post-norm"},
    "positions": {"the paper's": "base", "tensor2tensor's": "tensor2tensor"},
}
"""Comparison -> what a figure calls each run -> its variant."""


def train(data: PreparedData, variant: Variant, updates: int) -> list[dict[str, Any]]:
    """Train; the points of the curve: cross entropy a target token of the updates before and of the validation set."""
    recipe = TrainingConfig(
        lr=2e-3,
        warmup_updates=min(200, updates // 4),
        schedule="inverse-sqrt",
        clip_norm=1.0,
        precision="bf16",
        max_update=updates,
        seed=1,
    )
    torch.manual_seed(recipe.seed)
    model = Transformer(TransformerConfig(vocab_size=len(data.target_tokenizer), **{**_MODEL, **variant.model}))
    batches = variant.batches(data.train, MAX_TOKENS, recipe.seed)
    cpu = torch.device("cpu")
    run = Updates(model.train(), batches, recipe, cpu)
    validator = Validator(
        data,
        max_tokens=MAX_TOKENS,
        label_smoothing=recipe.label_smoothing,
        decoding=None,
        device=cpu,
        autocast=AUTOCAST[recipe.precision],
    )
    points: list[dict[str, Any]] = []
    cells = tokens = 0
    end = math.ceil(updates * variant.share)
    while run.position.step < end:
        run.perform()
        if run.position.step % max(1, updates // POINTS) == 0 or run.position.step == end:
            cells, tokens = cells + run.sums.cells, tokens + run.sums.target_tokens
            _, nll, _, counted = run.totals.tolist()
            points.append(
                {
                    "update": run.position.step,
                    "train": round(nll / counted, 4),
                    "valid": round(validator(model).nll, 4),
                    "target_tokens": tokens,
                    "cells": cells,
                }
            )
            run.forget_sums()
            print(json.dumps(points[-1]), flush=True)
    return points


def curve(name: str, data: PreparedData, work: Path, updates: int) -> list[dict[str, Any]]:
    """The points of a variant, from the folder of earlier runs where it is in there."""
    kept = work / f"{name}-{updates}.json"
    if not kept.exists():
        print(f"{name}: {updates} updates", flush=True)
        points = train(data, VARIANTS[name], updates)
        kept.write_text(json.dumps(points))
    return parse_json(kept.read_text())


def draw(comparison: str, runs: dict[str, list[dict[str, Any]]], folder: Path) -> Path:
    """Writes curves-NAME.png into a folder: losses by update, and by what was computed where that differs."""
    # cells of a run with bucketed batches hardly differ; those of random lengths do
    costs = [points[-1]["cells"] / points[-1]["target_tokens"] for points in runs.values()]
    axes = [("update", 1.0, "update")]
    if max(costs) > 1.1 * min(costs):
        axes.append(("cells", 1e-6, "computed places of source and target, padding included (millions)"))
    target = folder / f"curves-{comparison}.png"
    folder.mkdir(parents=True, exist_ok=True)
    with drawing(figsize=(6.4 * len(axes), 4.4), dpi=110, layout="constrained") as figure:
        panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
        for panel, (key, unit, label) in zip(panels, axes, strict=True):
            for number, (title, points) in enumerate(runs.items()):
                across = [point[key] * unit for point in points]
                panel.plot(across, [point["train"] for point in points], color=f"C{number}", alpha=0.4, lw=1)
                panel.plot(across, [point["valid"] for point in points], "o-", ms=2.5, color=f"C{number}", label=title)
            panel.set_xlabel(label)
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("cross entropy per target token (nats)\npale: training, dots: validation")
        panels[0].legend(frameon=False)
        figure.savefig(target, format="png")
    return target


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("benchmarks.curves", __doc__)
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--text", type=Path, required=True, help="folder of train and valid files, en and de")
    parser.add_argument("--work", type=Path, required=True, help="folder for the prepared data and finished runs")
    parser.add_argument("--updates", type=int, default=700, help="of each training (default: %(default)s)")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images", help="folder of the figure")
    args = parser.parse_args(argv)
    data = PreparedData.open(end_to_end.prepare(CORPUS, args.text, args.work))
    data.valid = data.valid.part(0, min(VALID, len(data.valid)))
    runs = COMPARISONS[args.comparison]
    points = {title: curve(name, data, args.work, args.updates) for title, name in runs.items()}
    print(draw(args.comparison, points, args.images))
    command.keep(args.results, "curves", comparison=args.comparison, runs=points)
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
