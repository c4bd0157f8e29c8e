"""Greedy search and sampling: one token is chosen for every row at every step, and that choice is final."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import EOS
from fasttfm.search.beam import Beams, Going, Steps
from fasttfm.search.hypotheses import Constraints, Hypothesis, length_penalty
from fasttfm.search.top_k import likeliest, top_k


class GreedySteps(Steps):
    """Greedy search or sampling: of each sentence the one hypothesis of greedy search, or with config.sampling
    config.nbest independent draws."""

    moves = False

    def __init__(self, constraints: Constraints, config: DecodingConfig, numbers: Sequence[int]) -> None:
        """numbers: one for each sentence, which with config.sampling_seed decides the random numbers of sampling; how
        sentences are batched does not."""
        super().__init__(constraints, config, rows=config.nbest if config.sampling else 1)
        self.outputs: list[list[Hypothesis]] = [[] for _ in constraints.limits]
        if config.sampling:
            size = (self.last_step + 1, config.nbest)
            self.uniform = [np.random.default_rng([config.sampling_seed, each]).random(size) for each in numbers]
            """Of each sentence (steps, nbest)."""
        self.scores = torch.zeros(len(self.tokens), device=constraints.device)  # (b * rows,) log-probability
        self.open_rows = torch.ones(len(self.tokens), dtype=torch.bool, device=constraints.device)  # not ended yet

    def extend(self, logits: Tensor) -> Going:
        """See Steps: one token is chosen for each row, and every row goes on from itself."""
        self.constraints.exclude(logits, self.sentences)
        tokens, chosen = self._choose(logits)
        self.scores = torch.where(self.open_rows, self.scores + chosen, self.scores)
        ended = self.open_rows & (tokens == EOS)
        leaves = [
            number in self.leaving or length == self.constraints.limits[number]
            for number, length in zip(self.sentences, self.written)
        ]
        kept, left = None, []
        if ended.any() or any(leaves):
            self._file(ended)
            self.open_rows &= ~ended
            if any(leaves):
                self.open_rows &= ~torch.tensor(leaves, device=logits.device).repeat_interleave(self.rows)
            stay = self.open_rows.view(-1, self.rows).any(dim=1)
            left = [sentence for sentence, stays in zip(self.sentences, stay.tolist()) if not stays]
            if left:
                kept = stay.nonzero()[:, 0]
                indices = kept.tolist()
                self.sentences, self.written = (
                    [some[index] for index in indices] for some in (self.sentences, self.written)
                )
                rows = (kept[:, None] * self.rows + torch.arange(self.rows, device=logits.device)).view(-1)
                tokens, self.scores, self.open_rows = (part[rows] for part in (tokens, self.scores, self.open_rows))
        self.tokens = tokens
        parents = torch.arange(self.rows, device=logits.device).expand(len(self.sentences), self.rows)
        going = Going(kept, parents, left)
        self._write(None if kept is None else going.rows(self.rows))
        return going

    def absorb(self, other: Any) -> None:
        """See Steps."""
        both = [(some, number) for some in (self, other) for number in some.sentences]
        self.outputs = [some.outputs[number] for some, number in both]
        if self.config.sampling:
            self.uniform = [some.uniform[number] for some, number in both]
        self.scores = torch.cat([self.scores, other.scores])
        self.open_rows = torch.cat([self.open_rows, other.open_rows])
        super().absorb(other)

    def best(self, sentence: int) -> list[Hypothesis]:
        """See Steps."""
        return sorted(self.outputs[sentence], key=lambda each: -each.score)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """A token for each row, and its log-probability, both (b * rows,)."""

        if not self.config.sampling:
            values, tokens = likeliest(logits, 1, self.forbid)
            return tokens[:, 0], values[:, 0]
        log_probabilities = logits.float().log_softmax(dim=1)
        self.forbid(log_probabilities)
        draws = [self.uniform[number][step] for number, step in zip(self.sentences, self.written)]
        uniform = torch.from_numpy(np.concatenate(draws).astype(np.float32))
        tokens = draw_tokens(log_probabilities, uniform.to(logits.device), self.config)
        return tokens, log_probabilities.gather(1, tokens[:, None])[:, 0]

    def _file(self, ended: Tensor) -> None:
        which = ended.nonzero()[:, 0]
        outputs, scores = self.history[which].tolist(), self.scores[which].tolist()
        for row, output, score in zip(which.tolist(), outputs, scores):
            index = row // self.rows
            length = self.written[index]
            penalty = length_penalty(length + 1, self.config)
            self.outputs[self.sentences[index]].append(Hypothesis(output[:length], score / penalty, score))


def plain_steps(constraints: Constraints, config: DecodingConfig, numbers: Sequence[int]) -> Steps:
    """The search that a configuration asks for without groups and required phrases; numbers: as of GreedySteps."""
    if config.sampling or config.beam == 1:
        return GreedySteps(constraints, config, numbers)
    return Beams(constraints, config)


def draw_tokens(
    log_probabilities: Tensor, uniform: Tensor, config: DecodingConfig, top: Callable[..., Any] = top_k
) -> Tensor:
    """One token for each row of log_probabilities (N, V): where the cumulative distribution passes uniform (N,).

    Tokens stand in falling order of probability, so top-k and top-p (Holtzman et al. 2020) keep a beginning of the row.
    top: top_k() or its like.
    """
    width = log_probabilities.shape[1]
    values, ids = top(log_probabilities, min(config.sampling_topk or width, width))
    probabilities = (values / config.temperature).softmax(dim=1)
    cumulative = probabilities.cumsum(dim=1)
    kept = cumulative - probabilities < config.sampling_topp  # the fewest that reach p
    kept &= probabilities > 0
    kept[:, :1].fill_(True)
    mass = cumulative.masked_fill(~kept, 0).amax(dim=1)
    index = (cumulative <= (uniform * mass)[:, None]).sum(dim=1)
    index = torch.minimum(index, kept.sum(dim=1) - 1)
    return ids.gather(1, index[:, None])[:, 0]
