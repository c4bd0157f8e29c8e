"""Greedy search and sampling: one token per row and step, never revised."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import EOS
from fasttfm.search.beam import Live, Steps
from fasttfm.search.constraints import Constraints
from fasttfm.search.tasks import Task
from fasttfm.search.top_k import Top, likeliest, top_k


class GreedySteps(Steps):
    """One greedy hypothesis per sentence, or config.nbest independent samples with config.sampling."""

    moves = False
    tables = ("scores", "open_rows")

    def __init__(self, tasks: Sequence[Task], constraints: Constraints) -> None:
        config = tasks[0].config
        super().__init__(tasks, constraints, rows=config.nbest if config.sampling else 1)
        self._places = torch.arange(self.rows, device=self.device)
        self.open_rows = torch.ones_like(self.scores, dtype=torch.bool)
        """(b, rows) rows that have not ended"""

    def choose(self, logits: Tensor) -> Live:
        """See Steps.choose(): every row continues itself."""
        gains, tokens = self._choose(logits)
        scores = torch.where(self.open_rows, self.scores + gains, self.scores)
        ends, places = self.open_rows & (tokens == EOS), self._places.expand(tokens.shape)
        done: Sequence[bool] = [False] * len(self.tasks)
        if ends.any():
            self._file(ends, scores, places)
            self.open_rows &= ~ends
            done = (~self.open_rows.any(dim=1)).tolist()
        return Live(scores, tokens, places, done)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and token for each row, (b, rows) each."""
        if not self.config.sampling:
            return likeliest(logits, 1, self.forbid)
        log_probabilities = logits.float().log_softmax(dim=1)
        self.forbid(log_probabilities)
        uniform = torch.from_numpy(np.concatenate([task.draws() for task in self.tasks]))
        tokens = draw_tokens(log_probabilities, uniform.to(logits.device), self.config)
        gains = log_probabilities.gather(1, tokens[:, None])
        return gains.view(self.scores.shape), tokens.view(self.scores.shape)


def draw_tokens(log_probabilities: Tensor, uniform: Tensor, config: DecodingConfig, top: Top = top_k) -> Tensor:
    """Sample one token per row of log_probabilities (N, V), by inverting its CDF at uniform (N,).

    Tokens are sorted by probability, so top-k and top-p (Holtzman et al. 2020) keep a prefix of each row.
    """
    width = log_probabilities.shape[1]
    values, ids = top(log_probabilities, min(config.sampling_topk or width, width))
    probabilities = (values / config.temperature).softmax(dim=1)
    cumulative = probabilities.cumsum(dim=1)
    kept = cumulative - probabilities < config.sampling_topp  # the smallest prefix that reaches p
    kept &= probabilities > 0
    kept[:, :1].fill_(True)
    mass = cumulative.masked_fill(~kept, 0).amax(dim=1)
    index = (cumulative <= (uniform * mass)[:, None]).sum(dim=1)
    index = torch.minimum(index, kept.sum(dim=1) - 1)
    return ids.gather(1, index[:, None])[:, 0]
