"""Beam search over a batch of sentences.

Each step extends the K live hypotheses of a sentence by one token, keeps the K best that go on and files those that
end. Log-probabilities only decrease, and the largest length penalty is that of the longest output allowed; so a
sentence is done once its best live log-probability divided by that penalty is no better than its finished hypotheses.
With early_stopping it is done once K hypotheses have ended among the K best of their step: fewer steps, but a better,
longer output may be missed. Finished sentences leave the batch with their caches. The first step runs one row per
sentence because K equal rows would do the same work. Rows are sentence * K + k throughout. Among equal extensions the
better hypothesis comes first, then the likelier token, then the lower token.
Source: Wu et al. 2016, section 7; Vaswani et al. 2017, section 6.1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fasttfm.cpu import step_passes
from fasttfm.data.tokenizer import BOS, EOS
from fasttfm.search.constraints import Constraints
from fasttfm.search.hypotheses import Finished, Hypothesis, length_penalty
from fasttfm.search.tasks import Task
from fasttfm.search.top_k import Top, likeliest, top_k


class Live(NamedTuple):
    """The K live hypotheses of each of b sentences."""

    scores: Tensor
    """(b, K) log-probability."""
    tokens: Tensor
    """(b, K) newest token."""
    parents: Tensor
    """(b, K) row of the parent within the sentence."""
    done: Sequence[bool]
    """Per sentence: whether no better hypothesis can follow."""


class _Best(NamedTuple):
    """The 2K best extensions of each of b sentences, best first, and the K of them that go on."""

    totals: Tensor
    """(b, 2K) log-probability."""
    parents: Tensor
    """(b, 2K) row of the parent within the sentence."""
    ranking: Tensor
    """(b, 2K) log-probability with length penalty."""
    news: Tensor
    """(b, 2K) bool: whether it ends and is among the best finished ones."""
    ended: Tensor
    """(b,) how many of the first K end."""
    live: Tensor
    """(b, K) log-probability of those that go on."""
    of_live: Any
    """Their tokens and parents, (b, K) each."""


class Steps:
    """Search state of sentences with the same options; subclasses implement choose()."""

    moves = True
    """Whether hypotheses change rows."""
    tables: ClassVar[tuple[str, ...]] = ("scores",)
    """Attributes that are tensors (b, ...) with one entry per sentence."""

    def __init__(self, tasks: Sequence[Task], constraints: Constraints, *, rows: int = 1, groups: int = 1) -> None:
        """rows: per sentence at the first step. groups: of hypotheses."""
        self.tasks, self.constraints, self.rows = list(tasks), constraints, rows
        """The b unfinished sentences, with `rows` hypotheses each."""
        self.config = config = tasks[0].config
        self.kind = config, tasks[0].allowed is None, tasks[0].required is None
        """Key: sentences with equal kinds are searched together."""
        self.device = device = constraints.never.device
        self.tokens = torch.full((len(tasks) * rows,), BOS, device=device)
        """(b * rows,) newest token of each row."""
        self.scores = torch.zeros(len(tasks), rows, dtype=torch.float32, device=device)
        """(b, rows) log-probability."""
        self.history = torch.empty(len(tasks) * rows, 0, dtype=torch.int64, device=device)
        """(b * rows, >= longest output so far)"""
        for task in tasks:
            task.finished = [Finished(config.nbest if groups == 1 else config.beam // groups) for _ in range(groups)]

    def choose(self, logits: Tensor) -> Live:
        """Choose the extensions that live on and file those that end. logits (b * rows, V) may be modified."""
        raise NotImplementedError

    def extend(self, logits: Tensor) -> tuple[Tensor | None, list[Task]]:
        """Take a step with logits (b * rows, V), which may be modified.

        Returns the old row that each new row continues (int64; None if rows do not move), and the finished sentences.
        """
        self.constraints.exclude(logits, self.tasks)
        self.scores, tokens, parents, done = self.choose(logits)
        enough = self.config.beam if self.config.early_stopping else sys.maxsize
        leaves = [
            is_done or task.cancelled or task.ended >= enough or task.written == task.limit
            for is_done, task in zip(done, self.tasks)
        ]
        kept, rows, ended = None, None, []
        if any(leaves):
            ended = [task for task, leaving in zip(self.tasks, leaves) if leaving]
            self.tasks = [task for task, leaving in zip(self.tasks, leaves) if not leaving]
            stay = [index for index, leaving in enumerate(leaves) if not leaving]
            kept = torch.tensor(stay, dtype=torch.int64, device=logits.device)
            tokens, parents = tokens[kept], parents[kept]
            for name, table in self._tables().items():
                setattr(self, name, table[kept])
        if self.moves or kept is not None:
            sentences = torch.arange(len(parents), device=parents.device) if kept is None else kept
            rows = (sentences[:, None] * self.rows + parents).flatten()
            self.history = self.history[rows]
        self.tokens, self.rows = tokens.reshape(-1), parents.shape[1]
        self._write()
        return rows, ended

    def ranks(self) -> Tensor:
        """(b * rows,) int32: index of each row within its sentence."""
        return torch.arange(self.rows, dtype=torch.int32, device=self.device).repeat(len(self.tasks))

    def forbid(self, values: Tensor) -> None:
        """Set values (b * rows, V) of disallowed tokens to -inf, in place."""
        self.constraints.apply(values, self.history, self.tasks)

    def absorb(self, other: Steps) -> None:
        """Append the sentences of another search with the same kind and number of rows."""
        for name, table in self._tables().items():
            setattr(self, name, torch.cat([table, getattr(other, name)]))
        longest = max(self.history.shape[1], other.history.shape[1])
        parts = [pad(each.history, (0, longest - each.history.shape[1])) for each in (self, other)]
        self.history, self.tasks = torch.cat(parts), self.tasks + other.tasks
        self.tokens = torch.cat([self.tokens, other.tokens])

    def _tables(self) -> dict[str, Tensor]:
        return {name: table for name in self.tables if (table := getattr(self, name)) is not None}

    def _count(self, ended: Tensor) -> None:
        """Count ended hypotheses. ended (b,): among the K best extensions of each sentence."""
        for task, count in zip(self.tasks, ended.tolist()):
            task.ended += count

    def _file(
        self, news: Tensor, log_probabilities: Tensor, parents: Tensor, scores: Tensor | None = None, group: int = 0
    ) -> None:
        """Add the extensions marked in news (b, n) to the finished hypotheses of a group; all tensors (b, n).

        scores: ranking scores; None: computed here, in float64.
        """
        index, _ = news.nonzero(as_tuple=True)
        outputs = self.history[index * self.rows + parents[news]].tolist()
        values = log_probabilities[news].tolist()
        ranks = [None] * len(values) if scores is None else scores[news].tolist()
        for row, score, log_probability, output in zip(index.tolist(), ranks, values, outputs):
            task = self.tasks[row]
            if score is None:
                score = log_probability / length_penalty(task.written + 1, self.config)
            task.finished[group].add(Hypothesis(output[: task.written], score, log_probability))

    def _write(self) -> None:
        """Append the newest token of each row to its history."""
        if not self.tasks:
            return
        written = [task.written for task in self.tasks]
        longest = max(written) + 1
        if longest > self.history.shape[1]:
            self.history = pad(self.history, (0, longest))
        if len(set(written)) == 1:
            self.history[:, longest - 1] = self.tokens
        else:
            ends = torch.tensor(written, device=self.tokens.device).repeat_interleave(self.rows)
            self.history.scatter_(1, ends[:, None], self.tokens[:, None])
        for task in self.tasks:
            task.written += 1


class Beams(Steps):
    """Beam search."""

    tables = ("scores", "worst", "last_penalty", "ranked")

    def __init__(self, tasks: Sequence[Task], constraints: Constraints, *, in_order: bool) -> None:
        """in_order: rows of the caches can be permuted for free, so hypotheses are kept in order of rank."""
        super().__init__(tasks, constraints)
        self.worst = torch.full_like(self.scores[:, 0], -torch.inf)
        """(b,) score that a new hypothesis has to beat"""
        self.ranked = None if in_order else torch.zeros(len(tasks), 1, dtype=torch.int64, device=self.device)
        """(b, rows) rows within the sentence from the best hypothesis to the worst; None: they are in this order."""
        last = [length_penalty(task.limit + 1, self.config) for task in tasks]
        self.last_penalty = self.scores.new_tensor(last)
        """(b,) largest length penalty that a hypothesis of the sentence can reach"""

    def choose(self, logits: Tensor) -> Live:
        """See Steps.choose()."""
        penalties = self.scores.new_tensor([length_penalty(task.written + 1, self.config) for task in self.tasks])
        in_loop = self.ranked is None and step_passes.takes(logits)
        best = (self._best_in_loop if in_loop else self._best)(logits, penalties)
        if best.news.any():
            self._file(best.news, best.totals, best.parents, best.ranking)
            self.worst = self.worst.new_tensor([task.finished[0].worst for task in self.tasks])
        if self.config.early_stopping:
            self._count(best.ended)
        done = (best.live[:, 0] / self.last_penalty <= self.worst).tolist()
        if self.ranked is None:
            return Live(best.live, best.of_live[0], best.of_live[1], done)
        self.ranked = _stay_in_place(best.of_live[1])
        order = self.ranked.argsort(dim=1)
        scores, tokens, parents = (part.gather(1, order) for part in (best.live, *best.of_live))
        return Live(scores, tokens, parents, done)

    def _best(self, logits: Tensor, penalties: Tensor) -> _Best:
        totals, tokens, parents = self._candidates(logits)  # (b, 2K) each
        ends, ranking = tokens == EOS, totals / penalties[:, None]
        ended = (ends & (totals > -torch.inf))[:, : self.config.beam].sum(dim=1)
        live, chosen = top_k(totals.masked_fill(ends, -torch.inf), self.config.beam)  # (b, K)
        of_live = tokens.gather(1, chosen), parents.gather(1, chosen)
        return _Best(totals, parents, ranking, ends & (ranking > self.worst[:, None]), ended, live, of_live)

    def _best_in_loop(self, logits: Tensor, penalties: Tensor) -> _Best:
        """_best() by one compiled loop, which takes a tenth of the time."""
        count, beam = len(self.tasks), self.config.beam
        width = min(2 * beam, logits.shape[1])
        values, tokens = (each.view(*self.scores.shape, width) for each in likeliest(logits, width, self.forbid))
        totals, ranking = np.empty((2, count, 2 * beam), np.float32)
        news, parents = np.empty((count, 2 * beam), np.bool_), np.empty((count, 2 * beam), np.int64)
        live, of_live = np.empty((count, beam), np.float32), np.empty((2, count, beam), np.int64)
        ended = np.zeros(count, np.int64)
        of_sentences = (each.numpy() for each in (self.scores, penalties, self.worst))
        step_passes.loops("search_loops").choose_extensions(
            values.numpy(), tokens.numpy(), *of_sentences, EOS, totals, parents, ranking, news, ended, live, of_live
        )
        return _Best(*[torch.from_numpy(each) for each in (totals, parents, ranking, news, ended, live, of_live)])

    def _candidates(self, logits: Tensor) -> tuple[Tensor, ...]:
        """The 2K best extensions of each sentence, best first: log-probability, token, row within the sentence.

        At most K of them end, so at least K go on. The 2K best of a sentence are among the 2K best of its rows, so K
        vocabularies are never sorted together.
        """
        width = min(2 * self.config.beam, logits.shape[1])
        values, tokens = (each.view(*self.scores.shape, -1) for each in likeliest(logits, width, self.forbid))
        if self.ranked is None:
            return best_extensions(values, tokens, self.scores, 2 * self.config.beam, top_k)
        by_rank = self.ranked[:, :, None].expand_as(values)
        values, tokens, scores = (
            values.gather(1, by_rank),
            tokens.gather(1, by_rank),
            self.scores.gather(1, self.ranked),
        )
        best, tokens, parents = best_extensions(values, tokens, scores, 2 * self.config.beam, top_k)
        return best, tokens, self.ranked.gather(1, parents)


def best_extensions(values: Tensor, tokens: Tensor, scores: Tensor, count: int, top: Top) -> tuple[Tensor, ...]:
    """The `count` best extensions of each sentence, best first: log-probability, token, row within it, (b, count) each.

    values, tokens (b, rows, W): log-probabilities of the likeliest tokens of each row. scores (b, rows): of the rows.
    """
    rows, width = values.shape[1:]
    totals = (values + scores[:, :, None]).flatten(1)
    if totals.shape[1] < count:  # a vocabulary smaller than the beam
        totals = pad(totals, (0, count - totals.shape[1]), value=-torch.inf)
    best, order = top(totals, count)
    parents = (order // width).clamp_(max=rows - 1)
    return best, tokens.flatten(1).gather(1, parents * width + order % width), parents


def _stay_in_place(parents: Tensor) -> Tensor:
    """New rows (b, K) for the K live hypotheses, as many as possible in the row of their parent, parents (b, K).

    Caches of these rows need not move. The first child takes its parent's row, the others take rows of childless
    parents.
    """
    count, beam = parents.shape
    same = parents[:, :, None] == parents[:, None, :]
    first = ~same.tril(-1).any(dim=2)  # (b, K) no earlier hypothesis has this parent
    childless = torch.ones(count, beam, dtype=torch.bool, device=parents.device).scatter_(1, parents, False)
    # Stable sorts move the further children, and the childless rows, to the front in their order.
    further, free = first.long().argsort(dim=1, stable=True), (~childless).long().argsort(dim=1, stable=True)
    return torch.where(first, parents, parents.scatter(1, further, free))
