"""Beam search for outputs that hold required phrases: grid beam search with the beam divided among how much is met.

A beam ranked by probability alone would put off unlikely phrases until nothing else is allowed. So of the extensions
the best one of all lives on, then the best of those that need 0 more tokens, the best of those that need 1, ..., then
the second best of each, until the beam is full. A token that would leave too little length for the phrases is not
allowed, and neither is end-of-sentence before all are there: every output that is found holds them.
Source: Hokamp and Liu 2017; dynamic beam allocation, Post and Vilar 2018; its ranks within banks, Hu et al. 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import EOS
from fasttfm.search.beam import BeamSteps, Live
from fasttfm.search.hypotheses import Constraints, Hypothesis, length_penalty
from fasttfm.search.phrases import CONTINUATION, WORD, Required, State
from fasttfm.search.top_k import top_k


@dataclass(frozen=True, slots=True)
class _Extension:
    score: float
    token: int
    row: int
    state: State
    needs: int


class ConstrainedSteps(BeamSteps):
    """A search for outputs that meet the requirements of their sentences."""

    def __init__(self, required: list[Required], constraints: Constraints, config: DecodingConfig) -> None:
        """constraints: with limits of at least longest_with_phrases()."""
        super().__init__(constraints, config)
        self.required, self.limits = required, constraints.limits
        self.forced = [len(prefix) for prefix in constraints.prefixes or [[] for _ in required]]
        self.states: list[list[State | None]] = [[each.start] for each in required]  # None: a row without hypothesis

    def choose(self, logits: Tensor) -> Live:
        """See BeamSteps."""
        log_probabilities, rows, sentences = logits.log_softmax(dim=1), self.rows, self.sentences
        self._allow(log_probabilities)
        width = min(2 * self.config.beam, log_probabilities.shape[1])
        values, ids = (part.view(len(sentences), rows, width).tolist() for part in top_k(log_probabilities, width))
        totals = self.scores.tolist()
        beams = []
        done = []
        for index, sentence in enumerate(sentences):
            required = self.required[sentence]
            extensions = []
            for row, state in enumerate(self.states[sentence]):
                if state is None:
                    continue
                gains = dict(zip(ids[index][row], values[index][row]))
                for token in required.awaited(state):
                    if token not in gains:
                        gains[token] = log_probabilities[index * rows + row, token].item()
                for token, gain in sorted(gains.items(), key=lambda each: (-each[1], each[0])):
                    if gain > -torch.inf and totals[index][row] > -torch.inf:
                        new = state if token == EOS else required.after(state, token)
                        total = totals[index][row] + gain
                        extensions.append(_Extension(total, token, row, new, required.needs(new)))
            extensions.sort(key=lambda each: -each.score)  # stable: of equal ones, those of the better row stay first
            outputs = self.history[index * rows : (index + 1) * rows, : self.written[index]]
            self._file(extensions, outputs, sentence)
            live = self._allocate([each for each in extensions if each.token != EOS])
            self.states[sentence] = [each.state for each in live] + [None] * (self.config.beam - len(live))
            best = max((each.score for each in live), default=-torch.inf)
            bound = best / length_penalty(self.limits[sentence] + 1, self.config)
            done.append(bound <= self.finished[sentence].worst)
            beams.append(live + [_NOTHING] * (self.config.beam - len(live)))
        device = logits.device
        return Live(
            torch.tensor([[each.score for each in live] for live in beams], device=device),
            torch.tensor([[each.token for each in live] for live in beams], device=device),
            torch.tensor([[each.row for each in live] for live in beams], device=device),
            done,
        )

    def _allow(self, log_probabilities: Tensor) -> None:
        """Sets tokens to -inf that leave too little length for the phrases, whose tokens nothing else hinders."""
        rows, sentences = self.rows, self.sentences
        awaited = {}
        for index, sentence in enumerate(sentences):
            if self.forced[sentence] <= self.written[index] < self.limits[sentence]:
                for row, state in enumerate(self.states[sentence]):
                    if state is not None and (tokens := list(self.required[sentence].awaited(state))):
                        number = index * rows + row
                        awaited[number] = sentence, state, tokens, log_probabilities[number, tokens].clone()
        self.forbid(log_probabilities)
        for index, sentence in enumerate(sentences):
            for row, state in enumerate(self.states[sentence]):
                if state is not None and self.required[sentence].needs(state):
                    log_probabilities[index * rows + row, EOS] = -torch.inf
        for number, (sentence, state, tokens, before) in awaited.items():
            required, left = self.required[sentence], self.limits[sentence] - self.written[number // rows] - 1
            values = log_probabilities[number]
            kept = values[tokens].clone()
            if required.needs(required.after_kind(state, WORD)) > left:
                end = values[EOS].clone()
                values.fill_(-torch.inf)
                values[EOS] = end
            elif required.continuations and required.needs(required.after_kind(state, CONTINUATION)) > left:
                values[list(required.continuations)] = -torch.inf
            now = required.needs(state)
            for token, masked, unmasked in zip(tokens, kept.tolist(), before.tolist()):
                needs = required.needs(required.after(state, token))
                values[token] = -torch.inf if needs > left else unmasked if needs < now else masked

    def _allocate(self, extensions: list[_Extension]) -> list[_Extension]:
        """The extensions that live on, of some sorted by score."""
        ranks: dict[int, int] = {}
        order = []
        for index, each in enumerate(extensions):
            rank = ranks[each.needs] = ranks.get(each.needs, -1) + 1
            order.append((index > 0, rank, each.needs, index))
        chosen = sorted(index for *_, index in sorted(order)[: self.config.beam])
        return [extensions[index] for index in chosen]

    def _file(self, extensions: list[_Extension], history: Tensor, sentence: int) -> None:
        """File those that end among the 2K best that need nothing more; history (rows, tokens of each)."""
        penalty = length_penalty(history.shape[1] + 1, self.config)
        finished = self.finished[sentence]
        for rank, each in enumerate([each for each in extensions if not each.needs][: 2 * self.config.beam]):
            self.ends[sentence] += each.token == EOS and rank < self.config.beam
            if each.token == EOS and each.score / penalty > finished.worst:
                finished.add(Hypothesis(history[each.row].tolist(), each.score / penalty, each.score))


_NOTHING = _Extension(float("-inf"), EOS, 0, frozenset(), 0)


def longest_with_phrases(limit: int, prefix: Sequence[int], required: Required) -> int:
    """limit, or what a prefix and the phrases that it does not hold take where that is longer."""
    state = required.start
    for token in prefix:
        state = required.after(state, token)
    return max(limit, len(prefix) + required.needs(state))
