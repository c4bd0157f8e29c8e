"""Beam search for outputs that contain required phrases: grid beam search with dynamic beam allocation.

A beam ranked by probability alone would postpone unlikely phrases until nothing else is allowed. So the beam takes the
best extension, then the best of those that need 0 more tokens, the best of those that need 1, ..., then the second best
of each, until it is full. Tokens that would leave too little length for the missing phrases are masked, and so is
end-of-sentence while phrases are missing: every output contains all phrases.
Source: Hokamp and Liu 2017; dynamic beam allocation, Post and Vilar 2018; its ranks within banks, Hu et al. 2019.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fasttfm.data.tokenizer import EOS
from fasttfm.search.beam import Live, Steps
from fasttfm.search.constraints import Constraints
from fasttfm.search.hypotheses import Hypothesis, length_penalty
from fasttfm.search.phrases import CONTINUATION, WORD, Required, State
from fasttfm.search.tasks import Task
from fasttfm.search.top_k import top_k


@dataclass(frozen=True, slots=True)
class _Extension:
    score: float
    token: int
    row: int
    state: State
    needs: int


class ConstrainedSteps(Steps):
    """Search state of sentences with required phrases."""

    def __init__(self, tasks: Sequence[Task], constraints: Constraints) -> None:
        """tasks: their limits must leave room for the phrases."""
        super().__init__(tasks, constraints)
        for task in tasks:
            task.states = [_required(task).start]

    def choose(self, logits: Tensor) -> Live:
        """See Steps.choose()."""
        log_probabilities, rows, tasks = logits.float().log_softmax(dim=1), self.rows, self.tasks
        self._allow(log_probabilities)
        width = min(2 * self.config.beam, log_probabilities.shape[1])
        values, ids = (part.view(len(tasks), rows, width).tolist() for part in top_k(log_probabilities, width))
        totals = self.scores.tolist()
        beams = []
        done = []
        for index, task in enumerate(tasks):
            required = _required(task)
            extensions = []
            for row, state in enumerate(task.states):
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
            extensions.sort(key=lambda each: -each.score)  # stable: of equal ones the better row stays first
            self._file_best(extensions, self.history[index * rows : (index + 1) * rows, : task.written], task)
            live = self._allocate([each for each in extensions if each.token != EOS])
            task.states = [each.state for each in live] + [None] * (self.config.beam - len(live))
            best = max((each.score for each in live), default=-torch.inf)
            done.append(best / length_penalty(task.limit + 1, self.config) <= task.finished[0].worst)
            beams.append(live + [_NOTHING] * (self.config.beam - len(live)))
        device = logits.device
        return Live(
            torch.tensor([[each.score for each in live] for live in beams], dtype=torch.float32, device=device),
            torch.tensor([[each.token for each in live] for live in beams], device=device),
            torch.tensor([[each.row for each in live] for live in beams], device=device),
            done,
        )

    def _states(self) -> Iterator[tuple[int, Task, State]]:
        """Yield (row, task, state) of each row with a hypothesis."""
        for index, task in enumerate(self.tasks):
            for row, state in enumerate(task.states):
                if state is not None:
                    yield index * self.rows + row, task, state

    def _allow(self, log_probabilities: Tensor) -> None:
        """Mask tokens that leave too little length for the phrases; phrase tokens are exempt from other constraints."""
        awaited = []
        for row, task, state in self._states():
            free = len(task.waiting.prefix) <= task.written < task.limit
            if free and (tokens := list(_required(task).awaited(state))):
                awaited.append((row, task, state, tokens, log_probabilities[row, tokens].clone()))
        self.forbid(log_probabilities)
        for row, task, state in self._states():
            if _required(task).needs(state):
                log_probabilities[row, EOS] = -torch.inf
        for row, task, state, tokens, before in awaited:
            required, left, values = _required(task), task.limit - task.written - 1, log_probabilities[row]
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
        """Select the extensions that live on, from a list sorted by score."""
        ranks: dict[int, int] = {}
        order = []
        for index, each in enumerate(extensions):
            rank = ranks[each.needs] = ranks.get(each.needs, -1) + 1
            order.append((index > 0, rank, each.needs, index))
        chosen = sorted(index for *_, index in sorted(order)[: self.config.beam])
        return [extensions[index] for index in chosen]

    def _file_best(self, extensions: list[_Extension], history: Tensor, task: Task) -> None:
        """File the ended ones among the 2K best that need nothing more. history: (rows, tokens)."""
        penalty = length_penalty(history.shape[1] + 1, self.config)
        for rank, each in enumerate([each for each in extensions if not each.needs][: 2 * self.config.beam]):
            if each.token == EOS:
                task.ended += rank < self.config.beam
                task.finished[0].add(Hypothesis(history[each.row].tolist(), each.score / penalty, each.score))


_NOTHING = _Extension(float("-inf"), EOS, 0, frozenset(), 0)


def _required(task: Task) -> Required:
    assert task.required is not None
    return task.required
