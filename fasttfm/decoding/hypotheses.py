"""A finished translation, its score, and which tokens a search may produce at a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import BOS, EOS, PAD, UNK

NOT_A_NUMBER = (
    "the model's probabilities are not numbers (NaN): its training diverged or its weights are damaged; use an earlier "
    "checkpoint, or train with a lower learning rate or gradient clipping"
)
"""What a search and a scoring say of such a model."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output of a search."""

    tokens: list[int]
    """Target ids without begin- and end-of-sentence."""
    score: float
    """log_probability divided by the length penalty: what searches rank by."""
    log_probability: float
    """Natural logarithm of the model's probability of tokens and end-of-sentence."""


def length_penalty(length: int, config: DecodingConfig) -> float:
    """What a log-probability is divided by; length counts end-of-sentence, as tensor2tensor does.

    gnmt is ((5 + length) / 6)^alpha (Wu et al. 2016, equation 14, coverage left out).
    """
    if config.length_penalty == "gnmt":
        return ((5.0 + length) / 6.0) ** config.alpha
    if config.length_penalty == "avg":
        return float(length)
    return 1.0


class Constraints:
    """Sets the log-probabilities of tokens that may not follow to -inf, for the sentences still in a batch.

    The others keep the model's own, so that a forced token (end-of-sentence at the limit, a prefix) is paid for.
    """

    def __init__(self, limits: list[int], prefixes: list[list[int]] | None, config: DecodingConfig, device):
        """limits: longest output of each sentence; prefixes: what each output must begin with."""
        self.prefixes = prefixes
        self.limits = limits
        self.min_len = config.min_len
        never = [PAD, BOS] if config.allow_unk else [PAD, UNK, BOS]
        self.never = torch.tensor(never, device=device)

    def apply(self, log_probabilities: Tensor, step: int, sentences: list[int]) -> None:
        """Change log_probabilities (len(sentences) * rows of each, V) of token number `step`, from 0, in place."""
        by_sentence = log_probabilities.unflatten(0, (len(sentences), -1))
        forced = []  # read before anything is masked: a prefix may hold a token that a search would not produce
        for place, sentence in enumerate(sentences):
            token = self._forced_token(sentence, step)
            if token is not None:
                forced.append((place, token, by_sentence[place, :, token].clone()))
        log_probabilities.index_fill_(1, self.never, -torch.inf)
        if step < self.min_len:
            log_probabilities[:, EOS] = -torch.inf
        for place, token, value in forced:
            by_sentence[place] = -torch.inf
            by_sentence[place, :, token] = value

    def _forced_token(self, sentence: int, step: int) -> int | None:
        if step >= self.limits[sentence]:
            return EOS
        if self.prefixes is not None and step < len(self.prefixes[sentence]):
            return self.prefixes[sentence][step]
        return None
