"""Finished hypotheses, their scores, and the n-best list of a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fasttfm.config.decoding import DecodingConfig
from fasttfm.errors import UserError

NOT_A_NUMBER = (
    "the model's probabilities are not numbers (NaN): its training diverged or its weights are damaged; use an earlier "
    "checkpoint, or train with a lower learning rate or gradient clipping"
)
"""Error message of searches and scoring with such a model."""
NOTHING_FOUND = (
    f"no translation can be found: banned words, a shortlist, prefixes and min_len leave no token, or {NOT_A_NUMBER}"
)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output of a search."""

    tokens: list[int]
    """Target ids without begin- and end-of-sentence."""
    score: float
    """log_probability divided by the length penalty; the ranking score."""
    log_probability: float
    """Natural log of the model's probability of tokens and end-of-sentence."""


def refuse_failed(hypotheses: Sequence[Hypothesis]) -> None:
    """Raise UserError if a search found nothing, or if its probabilities are NaN."""
    if not hypotheses or hypotheses[0].log_probability == -math.inf:
        raise UserError(NOTHING_FOUND)
    if math.isnan(hypotheses[0].log_probability):
        raise UserError(NOT_A_NUMBER)


def length_penalty(length: int, config: DecodingConfig) -> float:
    """Divisor of a log-probability. length includes end-of-sentence, as in tensor2tensor.

    wu: ((5 + length) / 6)^alpha (Wu et al. 2016, equation 14, without coverage); power: length^alpha (fairseq).
    """
    if config.length_penalty == "wu":
        return ((5.0 + length) / 6.0) ** config.alpha
    if config.length_penalty == "power":
        return float(length) ** config.alpha
    if config.length_penalty == "avg":
        return float(length)
    return 1.0


class Finished:
    """The `size` best finished hypotheses of one sentence."""

    def __init__(self, size: int):
        self.size = size
        self.hypotheses: list[Hypothesis] = []
        """Best first."""

    @property
    def worst(self) -> float:
        """Score that a new hypothesis has to beat."""
        return self.hypotheses[-1].score if len(self.hypotheses) == self.size else float("-inf")

    def add(self, hypothesis: Hypothesis) -> None:
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda each: -each.score)  # stable: the first found of equal ones stays first
        del self.hypotheses[self.size :]


def distinct(hypotheses: Iterable[Hypothesis], count: int) -> list[Hypothesis]:
    """The `count` best hypotheses with distinct outputs."""
    unique = {tuple(each.tokens): each for each in hypotheses}
    return sorted(unique.values(), key=lambda each: -each.score)[:count]
