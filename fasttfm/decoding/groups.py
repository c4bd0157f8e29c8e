"""Diverse beam search: groups of hypotheses, each punished for tokens that groups before it have just taken.

Group g ranks the extensions of its hypotheses by log-probability minus strength times how often groups 0 to g - 1 have
chosen the token at this step; what a hypothesis has been punished for stays with it. Reported is the model's own
log-probability, by which finished hypotheses are ranked. One group is beam search.
Source: Vijayakumar et al. 2016, equation 5 with Hamming diversity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import EOS
from fasttfm.decoding.beam import Finished
from fasttfm.decoding.hypotheses import Constraints, Hypothesis, length_penalty
from fasttfm.decoding.steered import Live


class Groups:
    """Steers a search in config.diverse_beam_groups groups of beam / groups hypotheses."""

    def __init__(self, limits: list[int], constraints: Constraints, config: DecodingConfig) -> None:
        """limits: longest output of each sentence."""
        self.constraints, self.config, self.limits = constraints, config, limits
        self.groups = config.diverse_beam_groups
        self.size = config.beam // self.groups
        self.finished = [[Finished(self.size) for _ in range(self.groups)] for _ in limits]
        self.punished = torch.zeros(len(limits), config.beam)  # of the live hypotheses of each sentence

    def extend(
        self, log_probabilities: Tensor, scores: Tensor, history: Tensor, sentences: list[int], step: int
    ) -> Live:
        """See Steering."""
        self.constraints.apply(log_probabilities, history, sentences)
        count, rows = scores.shape
        by_row = log_probabilities.view(count, rows, -1)
        taken = torch.zeros_like(by_row[:, 0])  # (b, V) how often groups before have chosen a token
        past = self.punished[sentences].to(scores.device)  # (b, K)
        done = [True] * count
        chosen = []
        for group in range(self.groups):
            members = slice(group * self.size, (group + 1) * self.size) if rows > 1 else slice(0, 1)
            before = past[:, members] if rows > 1 else past[:, :1] * 0
            new = self.config.diverse_beam_strength * taken[:, None]  # (b, 1, V)
            totals = by_row[:, members] + scores[:, members, None]  # (b, k, V)
            ranked = (totals - before[:, :, None] - new).flatten(1)
            width = min(2 * self.size, ranked.shape[1])
            values, indices = ranked.topk(width)
            best = totals.flatten(1).gather(1, indices)  # (b, 2k) log-probability
            parents, tokens = indices // by_row.shape[2] + members.start, indices % by_row.shape[2]
            self._file(group, sentences, best, tokens, parents, history, step)
            live = values.masked_fill(tokens == EOS, -torch.inf)
            if width < 2 * self.size:
                live = torch.nn.functional.pad(live, (0, 2 * self.size - width), value=-torch.inf)
            values, order = live.topk(self.size)
            order = order.clamp(max=width - 1)
            best, tokens, parents = (part.gather(1, order) for part in (best, tokens, parents))
            best = best.masked_fill(values == -torch.inf, -torch.inf)
            taken.scatter_add_(1, tokens, (values > -torch.inf).to(taken.dtype))
            chosen.append((best, tokens, parents, (best - values).nan_to_num(0.0, 0.0, 0.0)))
            for index, (sentence, likeliest) in enumerate(zip(sentences, best.amax(dim=1).tolist())):
                bound = likeliest / length_penalty(self.limits[sentence] + 1, self.config)
                done[index] &= bound <= self.finished[sentence][group].worst
        best, tokens, parents, punished = (torch.cat(parts, dim=1) for parts in zip(*chosen))
        self.punished[sentences] = punished.cpu()
        return Live(best, tokens, parents, done)

    def _file(
        self,
        group: int,
        sentences: list[int],
        best: Tensor,
        tokens: Tensor,
        parents: Tensor,
        history: Tensor,
        step: int,
    ) -> None:
        rows = len(history) // len(sentences)
        penalty = length_penalty(step + 1, self.config)
        index, slot = ((tokens == EOS) & (best > -torch.inf)).nonzero(as_tuple=True)
        outputs = history[index * rows + parents[index, slot]].tolist()
        for row, log_probability, output in zip(index.tolist(), best[index, slot].tolist(), outputs):
            score = log_probability / penalty
            if score > self.finished[sentences[row]][group].worst:
                self.finished[sentences[row]][group].add(Hypothesis(output, score, log_probability))

    def best(self) -> list[list[Hypothesis]]:
        """The config.nbest best of all groups, each output once."""
        chosen = []
        for groups in self.finished:
            different = {tuple(each.tokens): each for finished in groups for each in finished.best_first()}
            chosen.append(sorted(different.values(), key=lambda each: -each.score)[: self.config.nbest])
        return chosen
