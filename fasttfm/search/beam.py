"""Beam search over a batch of sentences.

Each step extends the K live hypotheses of a sentence by one token, keeps the K best that go on and files those that
end. Log-probabilities only fall, and no length penalty divides by more than that of the longest output allowed; so a
sentence is done as soon as its best live log-probability, divided by that, is no better than its finished hypotheses.
With early_stopping it is done as soon as K hypotheses have ended that were among the K best of their step: that takes
fewer steps, and may miss a longer output that is better. It then leaves the batch with its caches. The first step runs
one row a sentence: K equal rows would do the same work. Rows are sentence * K + k throughout. Of equal extensions that
of the better hypothesis comes first, then, within a hypothesis, the likelier and the lower token.
Source: Wu et al. 2016, section 7; Vaswani et al. 2017, section 6.1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import BOS, EOS
from fasttfm.search.batches import LENGTHS, padded
from fasttfm.search.decoder import decoder_of
from fasttfm.search.hypotheses import Constraints, Hypothesis, length_penalty
from fasttfm.search.selection import compute_allowed
from fasttfm.search.top_k import likeliest, top_k

if TYPE_CHECKING:
    from fasttfm.models import Transformer


class Going(NamedTuple):
    """Continuation of the rows of a group of sentences after a step."""

    kept: Tensor | None
    """(b',) int64 indices of the sentences that go on among the b before the step, None for all of them."""
    parents: Tensor
    """(b', K) int64: the row within its sentence that each of the K new rows goes on from."""
    ended: list[int]
    """Numbers of the sentences that do not go on."""

    def rows(self, before: int) -> Tensor:
        """(b' * K,) int64: the old row that each new one goes on from; before: old rows of a sentence."""
        count = self.parents.shape[0]
        indices = torch.arange(count, device=self.parents.device) if self.kept is None else self.kept
        return (indices[:, None] * before + self.parents).flatten()


class Live(NamedTuple):
    """The hypotheses of b sentences that live on, K each."""

    scores: Tensor
    """(b, K) log-probability."""
    tokens: Tensor
    """(b, K) their newest token."""
    parents: Tensor
    """(b, K) the row within the sentence that each goes on from."""
    done: list[bool]
    """Of each sentence: whether nothing better can come."""


class Steps:
    """A search of sentences with the same options, whatever computes their logits."""

    moves = True
    """Whether hypotheses change rows."""
    moves_nothing = False
    """Whether they may at no cost; the cache knows."""

    def __init__(self, constraints: Constraints, config: DecodingConfig, rows: int = 1) -> None:
        """constraints: with the limits of the sentences; rows: of each sentence at the first step."""
        self.constraints, self.config = constraints, config
        self.last_step = max(constraints.limits)
        count, device = len(constraints.limits), constraints.device
        # All of these hold the sentences still searched, b of them, with `rows` hypotheses each.
        self.sentences = list(range(count))
        self.written = [0] * count
        """Tokens that the hypotheses of each sentence hold."""
        self.leaving: set[int] = set()
        """Those that end with the next step, whatever they have found."""
        self.rows = rows
        self.tokens = torch.full((count * rows,), BOS, device=device)  # (b * rows,) the newest of each row
        self.history = torch.empty(count * rows, 0, dtype=torch.int64, device=device)
        """(b * rows, max(written) or more)"""

    def extend(self, logits: Tensor) -> Going:
        """Takes a step: logits (b * rows, V) of what follows; they may be changed."""
        raise NotImplementedError

    def forbid(self, values: Tensor) -> None:
        """Set values (b * rows, V) of the tokens that may not follow to -inf, in place."""
        self.constraints.apply(values, self.history, self.sentences, self.written)

    def best(self, sentence: int) -> list[Hypothesis]:
        """Return the results of a sentence that has ended, best first."""
        raise NotImplementedError

    def absorb(self, other: Any) -> None:
        """Search the sentences of another search with the same options and rows along with these, and after them.

        All sentences are numbered anew in this order, from 0 on; the results of those that have ended are gone.
        """
        self.constraints.absorb(self.sentences, other.constraints, other.sentences)
        leaving = [number in some.leaving for some in (self, other) for number in some.sentences]
        self.leaving = {number for number, leaves in enumerate(leaving) if leaves}
        self.sentences = list(range(len(leaving)))
        longest = max(self.history.shape[1], other.history.shape[1])
        parts = [pad(each.history, (0, longest - each.history.shape[1])) for each in (self, other)]
        self.history, self.written = torch.cat(parts), self.written + other.written
        self.tokens = torch.cat([self.tokens, other.tokens])

    def _write(self, rows: Tensor | None) -> None:
        """Append the newest tokens to the history of the old rows (b * rows,) that they go on from; None: the same."""
        if rows is not None:
            self.history = self.history[rows]
        if not self.written:
            return
        longest = max(self.written) + 1
        if longest > self.history.shape[1]:
            self.history = pad(self.history, (0, longest))
        if len(set(self.written)) == 1:
            self.history[:, longest - 1] = self.tokens
        else:
            each = self.tokens.shape[0] // len(self.written)
            ends = torch.tensor(self.written, device=self.tokens.device).repeat_interleave(each)
            self.history.scatter_(1, ends[:, None], self.tokens[:, None])
        self.written = [each + 1 for each in self.written]


class BeamSteps(Steps):
    """One that extends the K best hypotheses of each sentence; choose() says which these are."""

    def __init__(self, constraints: Constraints, config: DecodingConfig) -> None:
        super().__init__(constraints, config)
        self.scores = torch.zeros(len(self.sentences), 1, device=constraints.device)  # (b, rows) log-probability
        self.ends = [0] * len(self.sentences)
        """By the number of a sentence: hypotheses that ended among the K best of their step; for early_stopping."""
        self.finished = [Finished(config.nbest) for _ in self.sentences]

    def choose(self, logits: Tensor) -> Live:
        """The extensions that live on, by logits (b * rows, V), which may be changed; those that end are filed."""
        raise NotImplementedError

    def extend(self, logits: Tensor) -> Going:
        """See Steps."""
        self.constraints.exclude(logits, self.sentences)
        scores, tokens, parents, done = self.choose(logits)
        enough = self.config.beam if self.config.early_stopping else sys.maxsize
        stay = [
            index
            for index, (is_done, number) in enumerate(zip(done, self.sentences))
            if not (
                is_done
                or self.ends[number] >= enough
                or number in self.leaving
                or self.written[index] == self.constraints.limits[number]
            )
        ]
        kept, ended = None, []
        if len(stay) < len(done):
            kept = torch.tensor(stay, dtype=torch.int64, device=logits.device)
            remaining = set(stay)
            ended = [sentence for index, sentence in enumerate(self.sentences) if index not in remaining]
            self.sentences, self.written = ([some[index] for index in stay] for some in (self.sentences, self.written))
            scores, tokens, parents = scores[kept], tokens[kept], parents[kept]
        going = Going(kept, parents, ended)
        self.scores, self.tokens = scores, tokens.reshape(-1)
        self._write(going.rows(self.rows))
        self.rows = self.config.beam
        return going

    def best(self, sentence: int) -> list[Hypothesis]:
        """See Steps."""
        return self.finished[sentence].hypotheses

    def _count(self, ends: Tensor) -> None:
        """Count the hypotheses that end: ends (b, K) bool, of the K best extensions of each sentence."""
        for number, count in zip(self.sentences, ends.sum(dim=1).tolist()):
            self.ends[number] += count

    def absorb(self, other: BeamSteps) -> None:
        """See Steps."""
        self.ends = [some.ends[number] for some in (self, other) for number in some.sentences]
        super().absorb(other)
        self.scores = torch.cat([self.scores, other.scores])


class Beams(BeamSteps):
    """Beam search."""

    def __init__(self, constraints: Constraints, config: DecodingConfig) -> None:
        super().__init__(constraints, config)
        limits, device = constraints.limits, constraints.device
        self.worst = torch.full((len(limits),), -torch.inf, device=device)  # (b,) that a new hypothesis has to beat
        # (b, rows) rows within the sentence, from the best hypothesis to the worst
        self.ranked = torch.zeros(len(limits), 1, dtype=torch.int64, device=device)
        # (b,) largest divisor that a hypothesis of the sentence can still get
        self.last_penalty = torch.tensor([length_penalty(limit + 1, config) for limit in limits], device=device)

    def choose(self, logits: Tensor) -> Live:
        """See BeamSteps."""
        best, best_tokens, parents = _candidates(logits, self)  # (b, 2K) each
        ends = best_tokens == EOS
        penalties = [length_penalty(each + 1, self.config) for each in self.written]
        penalised = best / torch.tensor(penalties, dtype=best.dtype, device=best.device)[:, None]
        news = ends & (penalised > self.worst[:, None])
        if news.any():
            self._file(news, penalised, best, parents)
        if self.config.early_stopping:
            self._count((ends & (best > -torch.inf))[:, : self.config.beam])
        scores, chosen = top_k(best.masked_fill_(ends, -torch.inf), self.config.beam)  # (b, K)
        done = (scores[:, 0] / self.last_penalty <= self.worst).tolist()
        parents = parents.gather(1, chosen)
        if self.moves_nothing:
            self.ranked = torch.arange(self.config.beam, device=parents.device).expand_as(parents)
        else:
            self.ranked = _stay_in_place(parents)
            order = self.ranked.argsort(dim=1)
            scores, parents, chosen = (part.gather(1, order) for part in (scores, parents, chosen))
        return Live(scores, best_tokens.gather(1, chosen), parents, done)

    def extend(self, logits: Tensor) -> Going:
        """See Steps."""
        going = super().extend(logits)
        if going.kept is not None:
            self.worst, self.last_penalty, self.ranked = (
                part[going.kept] for part in (self.worst, self.last_penalty, self.ranked)
            )
        return going

    def absorb(self, other: Any) -> None:
        """See Steps."""
        self.finished = [some.finished[number] for some in (self, other) for number in some.sentences]
        self.worst = torch.cat([self.worst, other.worst])
        self.last_penalty = torch.cat([self.last_penalty, other.last_penalty])
        self.ranked = torch.cat([self.ranked, other.ranked])
        super().absorb(other)

    def _file(self, news: Tensor, penalised: Tensor, best: Tensor, parents: Tensor) -> None:
        """Add the extensions marked in news (b, 2K) to their sentences' finished hypotheses."""
        index, _ = news.nonzero(as_tuple=True)
        outputs = self.history[index * self.rows + parents[news]].tolist()
        for row, score, log_probability, output in zip(
            index.tolist(), penalised[news].tolist(), best[news].tolist(), outputs
        ):
            hypothesis = Hypothesis(output[: self.written[row]], score, log_probability)
            self.finished[self.sentences[row]].add(hypothesis)
        self.worst = torch.tensor([self.finished[each].worst for each in self.sentences], device=news.device)


def start_cache(model: Transformer, sources: Sequence[Sequence[int]], steps: Steps) -> Any:
    """The cache for the steps of a search: of its sources (ids with end-of-sentence), read by the encoder."""
    batch_invariant = steps.config.batch_invariant
    source, lengths = padded(sources, steps.constraints.device, LENGTHS if batch_invariant else 1)
    # Without padding attention needs no mask, in the encoder and at every step. It sums in another order with one.
    is_padded = batch_invariant or any(len(each) < source.shape[1] for each in sources)
    known = lengths if is_padded else None
    decoder = decoder_of(model)
    cache = decoder.start_cache(
        decoder.encode(source, known), known, rows_per_sentence=steps.rows, max_length=steps.last_step + 1
    )
    compute_allowed(cache, steps.constraints.allowed)
    return cache


def search_together(model: Transformer, sources: Sequence[Sequence[int]], steps: Steps) -> list[list[Hypothesis]]:
    """Search for each source (ids with end-of-sentence) of a batch; results best first."""
    cache = start_cache(model, sources, steps)
    steps.moves_nothing = getattr(cache, "moves_nothing", False)
    decoder, sentences = decoder_of(model), list(steps.sentences)
    while True:
        rows = steps.rows
        going = steps.extend(decoder.step(steps.tokens, cache))
        if not steps.sentences:
            return [steps.best(sentence) for sentence in sentences]
        if going.kept is not None:
            cache.keep(going.kept)
        if steps.moves:
            cache.reorder(going._replace(kept=None).rows(rows))


def _stay_in_place(parents: Tensor) -> Tensor:
    """New rows (b, K) of the K live hypotheses, as many as possible of them the row of their parent (b, K).

    Those rows' caches need not move. The first child of a parent takes its row, the others rows of childless parents.
    """
    count, beam = parents.shape
    same = parents[:, :, None] == parents[:, None, :]
    first = ~same.tril(-1).any(dim=2)  # (b, K) no earlier hypothesis has this parent
    childless = torch.ones(count, beam, dtype=torch.bool, device=parents.device).scatter_(1, parents, False)
    # Stable sorts bring the further children, and the childless rows, to the front in their order.
    further, free = first.long().argsort(dim=1, stable=True), (~childless).long().argsort(dim=1, stable=True)
    return torch.where(first, parents, parents.scatter(1, further, free))


def _candidates(logits: Tensor, beams: Beams) -> tuple[Tensor, Tensor, Tensor]:
    """The 2K best extensions of each sentence's hypotheses, best first: log-probability, token, row within sentence.

    At most K of 2K extensions end, so at least K go on. The 2K best of a sentence are among the 2K best of its rows, so
    nothing as large as K vocabularies is sorted.
    """
    sentence_count, rows = beams.scores.shape
    wanted = 2 * beams.config.beam
    width = min(wanted, logits.shape[1])
    values, ids = likeliest(logits, width, beams.forbid)
    totals = values.view(sentence_count, rows, width) + beams.scores[:, :, None]
    totals = totals.gather(1, beams.ranked[:, :, None].expand_as(totals)).flatten(1)
    if totals.shape[1] < wanted:  # a vocabulary smaller than the beam
        totals = pad(totals, (0, wanted - totals.shape[1]), value=-torch.inf)
    best, slots = top_k(totals, wanted)  # (b, 2K)
    parents = beams.ranked.gather(1, (slots // width).clamp_(max=rows - 1))
    return best, ids.reshape(sentence_count, -1).gather(1, parents * width + slots % width), parents


class Finished:
    """The best finished hypotheses of one sentence."""

    def __init__(self, size: int):
        self.size = size
        self.hypotheses: list[Hypothesis] = []
        """Best first."""

    @property
    def worst(self) -> float:
        """The score that a hypothesis must beat to get in."""
        return self.hypotheses[-1].score if len(self.hypotheses) == self.size else float("-inf")

    def add(self, hypothesis: Hypothesis) -> None:
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda each: -each.score)  # stable: of equal ones, the first found stays first
        del self.hypotheses[self.size :]
