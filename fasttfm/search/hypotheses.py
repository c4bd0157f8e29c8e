"""A finished translation, its score, and which tokens a search may produce at a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import BOS, EOS, PAD, UNK
from fasttfm.errors import UserError

NOT_A_NUMBER = (
    "the model's probabilities are not numbers (NaN): its training diverged or its weights are damaged; use an earlier "
    "checkpoint, or train with a lower learning rate or gradient clipping"
)
"""What a search and a scoring say of such a model."""
NOTHING_FOUND = (
    f"no translation can be found: banned words, a shortlist, prefixes and min_len leave no token, or {NOT_A_NUMBER}"
)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output of a search."""

    tokens: list[int]
    """Target ids without begin- and end-of-sentence."""
    score: float
    """log_probability divided by the length penalty: what searches rank by."""
    log_probability: float
    """Natural logarithm of the model's probability of tokens and end-of-sentence."""


def refuse_failed(found: Sequence[Hypothesis]) -> None:
    """Raise UserError for the results of a search that has found nothing, or by probabilities that are no numbers."""
    if not found or found[0].log_probability == -math.inf:
        raise UserError(NOTHING_FOUND)
    if math.isnan(found[0].log_probability):
        raise UserError(NOT_A_NUMBER)


def length_penalty(length: int, config: DecodingConfig) -> float:
    """Return the divisor of a log-probability; length counts end-of-sentence, as tensor2tensor does.

    wu is ((5 + length) / 6)^alpha (Wu et al. 2016, equation 14, coverage left out), power length^alpha (fairseq).
    """
    if config.length_penalty == "wu":
        return ((5.0 + length) / 6.0) ** config.alpha
    if config.length_penalty == "power":
        return float(length) ** config.alpha
    if config.length_penalty == "avg":
        return float(length)
    return 1.0


class Constraints:
    """Sets the log-probabilities of tokens that may not follow to -inf, for the sentences still in a batch.

    The others keep the model's own, so that a forced token (end-of-sentence at the limit, a prefix) is paid for.
    """

    def __init__(
        self,
        limits: list[int],
        prefixes: Sequence[Sequence[int]],
        config: DecodingConfig,
        device: torch.device,
        banned: Sequence[Sequence[int]] = (),
        allowed: Sequence[Tensor] | None = None,
    ) -> None:
        """limits: longest output of each sentence; prefixes: what each output must begin with; banned: sequences of
        tokens that no output holds, unless a prefix forces them. allowed: of each sentence the only tokens that its
        outputs may hold, what is forced among them (int64); None for all."""
        self.allowed = allowed
        self._excluded: Tensor | None = None  # (B, V) bool, of the tokens that are not allowed
        self.device = device
        self.prefixes = prefixes if any(map(len, prefixes)) else None
        self.limits = limits
        self.min_len = config.min_len
        self.ngram = config.no_repeat_ngram
        never = [PAD, BOS] if config.allow_unk else [PAD, UNK, BOS]
        self.never = torch.tensor(never + [each[0] for each in banned if len(each) == 1], device=device)
        self.endings: dict[tuple[int, ...], list[int]] = {}
        """Beginning of a banned sequence -> the tokens that would complete one."""
        for each in banned:
            if len(each) > 1:
                self.endings.setdefault(tuple(each[:-1]), []).append(each[-1])
        self.lengths = sorted({len(beginning) for beginning in self.endings})

    def exclude(self, logits: Tensor, sentences: list[int]) -> None:
        """Set logits (len(sentences) * rows of each, V) of tokens that are not allowed to -inf, in place.

        Before probabilities are computed, which those that are allowed then share.
        """
        if self.allowed is None:
            return
        if self._excluded is None:
            self._excluded = torch.ones(len(self.allowed), logits.shape[1], dtype=torch.bool)
            for row, tokens in zip(self._excluded, self.allowed):
                row[tokens] = False
            self._excluded = self._excluded.to(logits.device)
        by_sentence = logits.view(len(sentences), -1, logits.shape[1])
        by_sentence.masked_fill_(self._excluded[sentences][:, None], -torch.inf)

    def absorb(self, sentences: list[int], other: Constraints, others: list[int]) -> None:
        """Keep those of these sentences, followed by others of another search with the same options, numbered anew."""
        both = (self, sentences), (other, others)
        self.limits = [some.limits[number] for some, numbers in both for number in numbers]
        if self.prefixes is not None or other.prefixes is not None:
            self.prefixes = [some.prefixes[n] if some.prefixes else () for some, numbers in both for n in numbers]
        if self.allowed is not None and other.allowed is not None:
            allowed = (self.allowed, sentences), (other.allowed, others)
            self.allowed = [some[number] for some, numbers in allowed for number in numbers]
        self._excluded = None

    def apply(self, log_probabilities: Tensor, history: Tensor, sentences: list[int], written: list[int]) -> None:
        """Change log_probabilities (len(sentences) * rows of each, V) of the token that follows, in place.

        history (., W): tokens of each row without begin-of-sentence, of which written[i] count for the i-th sentence.
        """
        by_sentence = log_probabilities.view(len(sentences), -1, log_probabilities.shape[1])
        forced = []  # read before anything is masked: a prefix may hold a token that a search would not produce
        for index, sentence in enumerate(sentences):
            token = self._forced_token(sentence, written[index])
            if token is not None:
                forced.append((index, token, by_sentence[index, :, token].clone()))
        log_probabilities.index_fill_(1, self.never, -torch.inf)
        if short := [index for index, length in enumerate(written) if length < self.min_len]:
            by_sentence[short, :, EOS] = -torch.inf
        if self.ngram or self.endings:
            rows = by_sentence.shape[1]
            outputs = [row[: written[number // rows]] for number, row in enumerate(history.tolist())]
            self._mask_completions(log_probabilities, outputs)
        for index, token, value in forced:
            by_sentence[index] = -torch.inf
            by_sentence[index, :, token] = value

    def _mask_completions(self, log_probabilities: Tensor, history: list[list[int]]) -> None:
        """Tokens that would complete a repeated n-gram or a banned sequence."""
        rows: list[int] = []
        tokens: list[int] = []
        for row, written in enumerate(history):
            completions = {
                token
                for length in self.lengths
                if length <= len(written)
                for token in self.endings.get(tuple(written[-length:]), ())
            }
            if self.ngram and len(written) >= self.ngram:
                before = self.ngram - 1
                newest = written[len(written) - before :]
                completions |= {
                    written[index + before]
                    for index in range(len(written) - before)
                    if written[index : index + before] == newest
                }
            rows += [row] * len(completions)
            tokens += completions
        if rows:
            log_probabilities[rows, tokens] = -torch.inf

    def _forced_token(self, sentence: int, step: int) -> int | None:
        if step >= self.limits[sentence]:
            return EOS
        if self.prefixes is not None and step < len(self.prefixes[sentence]):
            return self.prefixes[sentence][step]
        return None
