"""Synthetic sentences: realistic lengths, random tokens, reproducible from a seed.

Subword lengths of machine-translation corpora are close to log-normal, and target lengths follow the source's. The two
distributions are fitted by eye to published means: WMT14 English-German about 27 subwords per sentence with a long
tail, Multi30k about 14 and hardly any above 40.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fasttfm.data.batches import Batch, collate
from fasttfm.data.prepared import ParallelTokens

_FIRST_TOKEN = 4  # after padding, unknown, begin and end


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of sentence lengths, without end-of-sentence."""

    median: float
    spread: float
    """Standard deviation of the logarithm of a source length."""
    tied: float
    """Standard deviation of the logarithm of target length over source length."""
    longest: int


WMT = Lengths(median=22.0, spread=0.62, tied=0.18, longest=250)
MULTI30K = Lengths(median=13.0, spread=0.31, tied=0.16, longest=60)


def corpus(pairs: int, lengths: Lengths, vocabulary: int, seed: int) -> ParallelTokens:
    """Sentence pairs of random tokens."""
    random = np.random.default_rng(seed)
    source = np.exp(random.normal(np.log(lengths.median), lengths.spread, pairs))
    target = source * np.exp(random.normal(0.0, lengths.tied, pairs))
    sides = [np.clip(np.rint(side), 1, lengths.longest).astype(np.int64) for side in (source, target)]
    ids: list[Any] = [
        np.split(random.integers(_FIRST_TOKEN, vocabulary, side.sum()), np.cumsum(side)[:-1]) for side in sides
    ]
    return ParallelTokens.from_lists(*ids)


def batch(rows: int, width: int, padding: float, vocabulary: int, seed: int) -> Batch:
    """Batch of `rows` pairs, `width` wide on both sides, with about a share `padding` of padding.

    Lengths are width * u^(padding / (1 - padding)) for u uniform in (0, 1), whose mean is (1 - padding) * width; the
    first pair has length `width`.
    """
    random = np.random.default_rng(seed)
    sides = []
    for _ in range(2):
        lengths = np.ceil(width * random.random(rows) ** (padding / (1.0 - padding))).astype(np.int64)
        lengths[0] = width
        sides.append([random.integers(_FIRST_TOKEN, vocabulary, length - 1) for length in lengths])  # and its end
    return collate(*sides)


def sources(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Source sentences of `length` tokens, the last of which is end-of-sentence."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(_FIRST_TOKEN, vocabulary, (count, length - 1), generator=generator)
    return [[*row, 3] for row in drawn.tolist()]
