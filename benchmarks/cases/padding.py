"""Group padding: an epoch with sentences in random order, and one with sentences batched by length.

The source document has 250 s per epoch with 60% padding and 100 s with 5%. Here the corpus is synthetic, with lengths
like WMT14's and Multi30k's (synthetic.py). Random order fills batches up to a budget of cells, with about as much
padding as the document's worst case; fasttfm's TokenBatches fill the same budget. Both run with fasttfm and with the
plain torch.nn trainer, which compares the gain of bucketing with that of the kernels.

Timed are planning, collating and a training step per batch, for the first batches of an epoch with `tokens` target
tokens in total, the last one cut. The check: without dropout and updates, the summed loss of the first pairs of the
corpus does not depend on the batching.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases import synthetic, training_step
from benchmarks.measure.case import Case, Setting, Work
from benchmarks.measure.providers import TORCH_NN, Provider
from fasttfm.data.batches import Batch, TokenBatches, collate
from fasttfm.data.prepared import ParallelTokens

Step = Callable[[Batch], Tensor]
Batching = Callable[[ParallelTokens, int], Iterator[np.ndarray]]
_RANDOM = "random order"


@dataclass(frozen=True, slots=True)
class Epoch:
    """Result of a provider."""

    loss: Tensor
    """0-d, summed over all target tokens."""
    padding: float
    """Share of the cells on both sides."""
    batches: int


def cases(setting: Setting) -> list[Case]:
    quick, smoke = not setting.at_least("standard"), setting.level == "smoke"
    if setting.on_gpu:
        sizes = [("WMT14-like", synthetic.WMT, "paper-base", 100_000, 25_000, 200_000 if quick else 800_000)]
    else:
        pairs, tokens = (40, 300) if smoke else (10_000, 1_200 if quick else 30_000)
        sizes = [("WMT14-like", synthetic.WMT, "multi30k", pairs, 256 if smoke else 1_024, tokens)]
    if not quick:
        tokens = 400_000 if setting.on_gpu else 30_000
        sizes.append(("Multi30k-like", synthetic.MULTI30K, "multi30k", 29_000, 4_096, tokens))
    return [_case(setting, *size) for size in sizes]


def _case(
    setting: Setting, name: str, lengths: synthetic.Lengths, preset: str, pairs: int, max_tokens: int, tokens: int
) -> Case:
    config = training_step.model_config(preset)
    device = setting.device

    def whole(step: Step, batching: Batching, corpus: ParallelTokens) -> Epoch:
        """The first 64 pairs in whole, so that the work does not depend on the batching."""
        few = range(min(len(corpus), 64))
        pairs: Any = [[side(i) for i in few] for side in (corpus.source, corpus.target)]
        head = ParallelTokens.from_lists(*pairs)
        with torch.no_grad():
            return epoch_of(step, batching, device, max_tokens, 1 << 60, head)

    def make() -> Work:
        contenders = training_step.Contenders(preset, setting)
        timed: dict[str, Provider] = {}
        checked: dict[str, Provider] = {}
        trained: dict[str, Any] = {}
        for suffix, batching in (("", bucketed), (f", {_RANDOM}", shuffled)):
            for name, step in contenders.steps().items():
                timed[name + suffix] = partial(epoch_of, step, batching, device, max_tokens, tokens)
                trained[name + suffix] = step.model
            for name, loss in contenders.losses().items():
                checked[name + suffix] = partial(whole, loss, batching)
        return Work(
            inputs=lambda i: (synthetic.corpus(pairs, lengths, config.vocab_size, seed=1_000 * setting.seed + i),),
            providers=timed,
            without_dropout=checked,
            trained=trained,
            reference=partial(whole, contenders.exact_loss(), bucketed),
            plain=TORCH_NN,
            unit="target tokens/s",
            units=lambda corpus: float(tokens),
            warm_up=0 if not setting.on_gpu else 1,
            rounds=setting.rounds_of_long_runs,
            details=lambda epoch: {"padding": round(epoch.padding, 4), "batches": epoch.batches},
        )

    return Case(
        group="padding",
        name=name,
        shape={"pairs": pairs, "cells": max_tokens, "tokens": tokens, "model": preset, "vocabulary": config.vocab_size},
        dtype=setting.training_dtype_name,
        passes="epoch",
        # products and Adam once for all tokens: a lower bound, because each batch reads the weights
        cost=training_step.cost(config, tokens=tokens),
        make=make,
    )


def bucketed(pairs: ParallelTokens, max_tokens: int) -> Iterator[np.ndarray]:
    """fasttfm's batches by length, in random order."""
    return iter(TokenBatches(pairs, max_tokens).epoch(0))


def shuffled(pairs: ParallelTokens, max_tokens: int) -> Iterator[np.ndarray]:
    """Batches of pairs in random order, each up to the budget of rows times longest side."""
    widths = np.maximum(pairs.source_lengths, pairs.target_lengths) + 1
    rows: list[int] = []
    for index in np.random.default_rng(0).permutation(len(pairs)):
        if rows and (len(rows) + 1) * max(widths[index], widths[rows].max()) > max_tokens:
            yield np.array(rows)
            rows = []
        rows.append(index)
    yield np.array(rows)


def epoch_of(
    step: Step, batching: Batching, device: torch.device, max_tokens: int, tokens: int, pairs: ParallelTokens
) -> Epoch:
    """Run the first batches of an epoch, with `tokens` target tokens in total; step returns the loss per token."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    used = cells = count = 0
    left = tokens
    for rows in batching(pairs, max_tokens):
        ends = np.cumsum(pairs.target_lengths[rows] + 1)
        rows = rows[: np.searchsorted(ends, left) + 1]
        left -= int(ends[len(rows) - 1])
        batch = collate([pairs.source(row) for row in rows], [pairs.target(row) for row in rows])
        total += step(batch.to(device)).double() * batch.target_tokens
        used += batch.source_tokens + batch.target_tokens
        cells += batch.source.numel() + batch.target_in.numel()
        count += 1
        if left <= 0:
            break
    return Epoch(total, 1.0 - used / cells, count)
