"""Diverse beam search: groups of hypotheses, each punished for tokens that groups before it have just taken.

Group g ranks the extensions of its hypotheses by log-probability minus strength times how often groups 0 to g - 1 have
chosen the token at this step; what a hypothesis has been punished for stays with it. Reported is the model's own
log-probability, by which finished hypotheses are ranked. One group is beam search. Of extensions that rank equally that
of the better hypothesis comes first, then the lower token.
Source: Vijayakumar et al. 2016, equation 5 with Hamming diversity.
"""

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import EOS
from fasttfm.search.beam import BeamSteps, Finished, Live
from fasttfm.search.hypotheses import Constraints, Hypothesis, length_penalty
from fasttfm.search.top_k import top_k


class DiverseSteps(BeamSteps):
    """A search in config.diverse_beam_groups groups of beam / groups hypotheses."""

    def __init__(self, constraints: Constraints, config: DecodingConfig) -> None:
        super().__init__(constraints, config)
        limits = constraints.limits
        self.groups = config.diverse_beam_groups
        self.size = config.beam // self.groups
        self.of_groups = [[Finished(self.size) for _ in range(self.groups)] for _ in limits]
        self.punished = torch.zeros(len(limits), config.beam)  # of the live hypotheses of each sentence

    def choose(self, logits: Tensor) -> Live:
        """See BeamSteps."""
        log_probabilities, scores, sentences = logits.log_softmax(dim=1), self.scores, self.sentences
        self.forbid(log_probabilities)
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
            values, indices = top_k(ranked, width)
            best = totals.flatten(1).gather(1, indices)  # (b, 2k) log-probability
            parents, tokens = indices // by_row.shape[2] + members.start, indices % by_row.shape[2]
            self._file(group, best, tokens, parents)
            self._count(((tokens == EOS) & (best > -torch.inf))[:, : self.size])
            live = values.masked_fill(tokens == EOS, -torch.inf)
            if width < 2 * self.size:
                live = torch.nn.functional.pad(live, (0, 2 * self.size - width), value=-torch.inf)
            values, order = top_k(live, self.size)
            order = order.clamp(max=width - 1)
            best, tokens, parents = (part.gather(1, order) for part in (best, tokens, parents))
            best = best.masked_fill(values == -torch.inf, -torch.inf)
            taken.scatter_add_(1, tokens, (values > -torch.inf).to(taken.dtype))
            chosen.append((best, tokens, parents, (best - values).nan_to_num(0.0, 0.0, 0.0)))
            for index, (sentence, likeliest) in enumerate(zip(sentences, best.amax(dim=1).tolist())):
                bound = likeliest / length_penalty(self.constraints.limits[sentence] + 1, self.config)
                done[index] &= bound <= self.of_groups[sentence][group].worst
        best, tokens, parents, punished = (torch.cat(parts, dim=1) for parts in zip(*chosen))
        self.punished[sentences] = punished.cpu()
        return Live(best, tokens, parents, done)

    def _file(self, group: int, best: Tensor, tokens: Tensor, parents: Tensor) -> None:
        index, slot = ((tokens == EOS) & (best > -torch.inf)).nonzero(as_tuple=True)
        outputs = self.history[index * self.rows + parents[index, slot]].tolist()
        for row, log_probability, output in zip(index.tolist(), best[index, slot].tolist(), outputs):
            length = self.written[row]
            score = log_probability / length_penalty(length + 1, self.config)
            finished = self.of_groups[self.sentences[row]][group]
            if score > finished.worst:
                finished.add(Hypothesis(output[:length], score, log_probability))

    def best(self, sentence: int) -> list[Hypothesis]:
        """The config.nbest best of all groups, each output once."""
        different = {tuple(each.tokens): each for group in self.of_groups[sentence] for each in group.hypotheses}
        return sorted(different.values(), key=lambda each: -each.score)[: self.config.nbest]
