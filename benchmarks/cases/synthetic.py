"""Sentences without a corpus: lengths and tokens at random, everything from a seed."""

import numpy as np
import torch

from fasttfm.data.batches import Batch, collate

_FIRST_TOKEN = 4  # after padding, unknown, begin and end


def batch(rows: int, width: int, padding: float, vocabulary: int, seed: int) -> Batch:
    """rows pairs padded to width on both sides, of which about a share `padding` is padding.

    Lengths are width * u^(padding / (1 - padding)) for u uniform in (0, 1), whose mean is (1 - padding) * width; the
    first pair is as long as the batch is wide.
    """
    random = np.random.default_rng(seed)
    sides = []
    for _ in range(2):
        lengths = np.ceil(width * random.random(rows) ** (padding / (1.0 - padding))).astype(np.int64)
        lengths[0] = width
        sides.append([random.integers(_FIRST_TOKEN, vocabulary, length - 1) for length in lengths])  # and its end
    return collate(*sides)


def sources(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Source sentences of `length` tokens, the last of which ends them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(_FIRST_TOKEN, vocabulary, (count, length - 1), generator=generator)
    return [[*row, 3] for row in drawn.tolist()]
