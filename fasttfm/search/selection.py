"""Searches in which every sentence has its own part of the vocabulary.

The last product of a step is then computed for the tokens that any of the sentences searched together may write, and
each sentence's own list decides which of them count: a sentence finds the same whatever is searched beside it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm.data.tokenizer import EOS


def allowed_tokens(allowed: Sequence[Sequence[int] | None], *forced: Iterable[Sequence[int]]) -> list[Tensor] | None:
    """For each sentence (n,) int64: the tokens that it may write, rising: its own, end-of-sentence and forced ones.

    forced: lists with a sequence of tokens for each sentence. None where no sentence has a list of its own; a sentence
    without one beside others that have is a ValueError.
    """
    if all(tokens is None for tokens in allowed):
        return None
    if any(tokens is None for tokens in allowed):
        raise ValueError("some sources have a list of allowed tokens and some have none: give one for each")
    parts = zip(allowed, *forced, strict=True)
    return [torch.from_numpy(np.unique(np.concatenate([[EOS], *map(_ids, each)]))) for each in parts]


def _ids(tokens: Sequence[int] | None) -> np.ndarray:
    return np.asarray(() if tokens is None else tokens, dtype=np.int64)


def compute_allowed(cache: Any, allowed: Iterable[Tensor] | None) -> None:
    """Let the steps of a cache compute the logits of these tokens alone, where they can (search/cpu/decoder_step.py).

    allowed: of each sentence that is searched; None for all tokens."""
    straight = getattr(cache, "straight", None)
    if straight is not None:
        straight.select_outputs(None if allowed is None else torch.cat(list(allowed)).unique())
