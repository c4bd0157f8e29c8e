"""Greedy search and sampling: one token is chosen for every row at every step, and that choice is final."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import EOS
from fasttfm.decoding.beam import Beams, Going, Steps
from fasttfm.decoding.hypotheses import Constraints, Hypothesis, length_penalty
from fasttfm.decoding.top_k import likeliest, top_k


class GreedySteps(Steps):
    """Greedy search or sampling of sentences that began together: of each the one hypothesis of greedy search, or with
    config.sampling config.nbest independent draws."""

    moves = False

    def __init__(self, constraints: Constraints, config: DecodingConfig, numbers: Sequence[int]) -> None:
        """numbers: one for each sentence, which with config.sampling_seed decides the random numbers of sampling; how
        sentences are batched does not."""
        super().__init__(constraints, config, rows=config.nbest if config.sampling else 1)
        self.outputs: list[list[Hypothesis]] = [[] for _ in constraints.limits]
        if config.sampling:
            size = (self.last_step + 1, config.nbest)
            draws = [np.random.default_rng([config.sampling_seed, number]).random(size) for number in numbers]
            self.uniform = np.stack(draws)  # (B, steps, nbest)
        self.scores = torch.zeros(len(self.tokens), device=constraints.device)  # (b * rows,) log-probability
        self.open_rows = torch.ones(len(self.tokens), dtype=torch.bool, device=constraints.device)  # not ended yet

    def extend(self, logits: Tensor) -> Going:
        """See Steps: one token is chosen for each row, and every row goes on from itself."""
        self.constraints.exclude(logits, self.sentences)
        tokens, chosen = self._choose(logits)
        self.scores = torch.where(self.open_rows, self.scores + chosen, self.scores)
        ended = self.open_rows & (tokens == EOS)
        kept, left = None, []
        if ended.any() or self.leaving or self.step == self.last_step:
            self._file(ended)
            self.open_rows = self.open_rows & ~ended & (self.step < self.last_step)
            if self.leaving:
                leaving = torch.tensor([number in self.leaving for number in self.sentences], device=logits.device)
                self.open_rows &= ~leaving.repeat_interleave(self.rows)
            stay = self.open_rows.view(-1, self.rows).any(dim=1)
            left = [sentence for sentence, stays in zip(self.sentences, stay.tolist()) if not stays]
            if left:
                kept = stay.nonzero()[:, 0]
                self.sentences = [self.sentences[index] for index in kept.tolist()]
                rows = (kept[:, None] * self.rows + torch.arange(self.rows, device=logits.device)).view(-1)
                tokens, self.scores, self.open_rows, self.history = (
                    part[rows] for part in (tokens, self.scores, self.open_rows, self.history)
                )
        self.tokens, self.step = tokens, self.step + 1
        self.history = torch.cat([self.history, tokens[:, None]], dim=1)
        parents = torch.arange(self.rows, device=logits.device).expand(len(self.sentences), self.rows)
        return Going(kept, parents, left)

    def best(self, sentence: int) -> list[Hypothesis]:
        """See Steps."""
        return sorted(self.outputs[sentence], key=lambda each: -each.score)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """A token for each row, and its log-probability, both (b * rows,)."""

        def forbid(values: Tensor) -> None:
            self.constraints.apply(values, self.history, self.sentences)

        if not self.config.sampling:
            values, tokens = likeliest(logits, 1, forbid)
            return tokens[:, 0], values[:, 0]
        log_probabilities = logits.float().log_softmax(dim=1)
        forbid(log_probabilities)
        uniform = torch.from_numpy(self.uniform[self.sentences, self.step].reshape(-1).astype(np.float32))
        tokens = draw_tokens(log_probabilities, uniform.to(logits.device), self.config)
        return tokens, log_probabilities.gather(1, tokens[:, None])[:, 0]

    def _file(self, ended: Tensor) -> None:
        which = ended.nonzero()[:, 0]
        penalty = length_penalty(self.step + 1, self.config)
        outputs, scores = self.history[which].tolist(), self.scores[which].tolist()
        for row, output, score in zip(which.tolist(), outputs, scores):
            self.outputs[self.sentences[row // self.rows]].append(Hypothesis(output, score / penalty, score))


def plain_steps(constraints: Constraints, config: DecodingConfig, numbers: Sequence[int]) -> Steps:
    """The search that a configuration asks for without groups and required phrases; numbers: as of GreedySteps."""
    if config.sampling or config.beam == 1:
        return GreedySteps(constraints, config, numbers)
    return Beams(constraints, config)


def draw_tokens(log_probabilities: Tensor, uniform: Tensor, config: DecodingConfig) -> Tensor:
    """One token for each row of log_probabilities (N, V): where the cumulative distribution passes uniform (N,).

    Tokens stand in falling order of probability, so top-k and top-p (Holtzman et al. 2020) keep a beginning of the row.
    """
    width = log_probabilities.shape[1]
    values, ids = top_k(log_probabilities, min(config.sampling_topk or width, width))
    probabilities = (values / config.temperature).softmax(dim=1)
    cumulative = probabilities.cumsum(dim=1)
    kept = cumulative - probabilities < config.sampling_topp  # the fewest that reach p
    kept &= probabilities > 0
    kept[:, 0] = True
    mass = cumulative.masked_fill(~kept, 0).amax(dim=1)
    index = (cumulative <= (uniform * mass)[:, None]).sum(dim=1)
    index = torch.minimum(index, kept.sum(dim=1) - 1)
    return ids.gather(1, index[:, None])[:, 0]
