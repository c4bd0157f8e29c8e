"""Diverse beam search: groups of hypotheses, each penalized for tokens that earlier groups chose at the same step.

Group g ranks the extensions of its hypotheses by log-probability minus strength times the number of groups 0 to g - 1
that chose the token at this step; a hypothesis keeps its accumulated penalty. Finished hypotheses are ranked by the
model's own log-probability. One group is plain beam search. Among equal extensions the better hypothesis comes first,
then the lower token.
Source: Vijayakumar et al. 2016, equation 5 with Hamming diversity.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import EOS
from fasttfm.search.beam import Live, Steps
from fasttfm.search.constraints import Constraints
from fasttfm.search.hypotheses import length_penalty
from fasttfm.search.tasks import Task
from fasttfm.search.top_k import Top, top_k


class DiverseSteps(Steps):
    """A search in config.diverse_beam_groups groups of beam / groups hypotheses."""

    tables = ("scores", "punished")

    def __init__(self, tasks: Sequence[Task], constraints: Constraints) -> None:
        config = tasks[0].config
        super().__init__(tasks, constraints, groups=config.diverse_beam_groups)
        self.punished = self.scores.new_zeros(len(tasks), config.beam)
        """(b, K): accumulated penalty of each live hypothesis."""

    def choose(self, logits: Tensor) -> Live:
        """See Steps.choose()."""
        values = logits.float().log_softmax(dim=1)
        self.forbid(values)
        done = [True] * len(self.tasks)

        def file(group: int, ends: Tensor, best: Tensor, parents: Tensor, live: Tensor) -> None:
            self._file(ends, best, parents, group=group)
            self._count(ends[:, : live.shape[1]].sum(dim=1))
            for index, (task, likeliest) in enumerate(zip(self.tasks, live.amax(dim=1).tolist())):
                done[index] &= likeliest / length_penalty(task.limit + 1, self.config) <= task.finished[group].worst

        by_row = values.view(*self.scores.shape, -1)
        scores, tokens, parents, self.punished = extend_groups(
            by_row, self.scores, self.punished, self.config, top_k, file
        )
        return Live(scores, tokens, parents, done)


def extend_groups(
    values: Tensor, scores: Tensor, punished: Tensor, config: DecodingConfig, top: Top, file: Callable[..., None]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The live extensions: log-probability, token, row of the parent within the sentence, penalty; (b, K) each.

    values (b, K, V): log-probabilities of the next token; scores, punished (b, K): of the hypotheses. At the first step
    values and scores may have one row, (b, 1, V). top: top_k() or equivalent. file(group, ends, best, parents, live) is
    called with the best extensions of each group in turn: (b, n) which of them end, their log-probabilities and rows,
    and the log-probabilities (b, K / groups) of those that live on.
    """
    vocabulary, size = values.shape[2], config.beam // config.diverse_beam_groups
    taken = torch.zeros_like(values[:, 0])  # (b, V) how often earlier groups chose a token
    chosen = []
    for group in range(config.diverse_beam_groups):
        members = slice(group * size, (group + 1) * size) if values.shape[1] > 1 else slice(0, 1)
        totals = values[:, members] + scores[:, members, None]  # (b, k, V)
        ranked = totals - punished[:, members, None] - config.diverse_beam_strength * taken[:, None]
        width = min(2 * size, ranked.flatten(1).shape[1])
        ranks, order = top(ranked.flatten(1), width)
        best = totals.flatten(1).gather(1, order)  # (b, 2k) log-probability
        tokens, parents = order % vocabulary, order // vocabulary + members.start
        ends = tokens == EOS
        ranks, order = top(pad(ranks.masked_fill(ends, -torch.inf), (0, 2 * size - width), value=-torch.inf), size)
        live, *others = (part.gather(1, order.clamp(max=width - 1)) for part in (best, tokens, parents))
        live = live.masked_fill(ranks == -torch.inf, -torch.inf)
        file(group, ends & (best > -torch.inf), best, parents, live)
        taken.scatter_add_(1, others[0], (ranks > -torch.inf).to(taken.dtype))
        chosen.append((live, *others, (live - ranks).nan_to_num(0.0, 0.0, 0.0)))
    best, tokens, parents, punished = (torch.cat(parts, dim=1) for parts in zip(*chosen))
    return best, tokens, parents, punished
