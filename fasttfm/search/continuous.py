"""Continuous batching on the host: sentences join a running search and take the place of finished ones.

Sentences of one batch end after different numbers of steps, so a plain batch ends with few rows per product. Here the
rows of all sentences take one step together, whatever position each has reached, and once a quarter of the token budget
is free, waiting sentences join. A row does not depend on other rows, so results have the same bits as in a fixed batch
or alone. A sentence may have its own options, the beam size included.

Sentences that join together are encoded together if they are padded to the same length. Sentences with the same
options share one Steps (beam.py), into which new ones are merged after their first step. Joining requires fused decoder
steps on a CPU (search/cpu/decoder_step.py); otherwise a batch is searched to its end.
Source: Yu et al. 2022 (Orca), iteration-level scheduling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.shapes import round_length
from fasttfm.errors import UserError
from fasttfm.search.batches import LENGTHS, padded
from fasttfm.search.beam import Beams, Steps
from fasttfm.search.capacity import refuse_more_than_available
from fasttfm.search.constrained import ConstrainedSteps
from fasttfm.search.constraints import Constraints
from fasttfm.search.decoder import decoder_of
from fasttfm.search.diverse import DiverseSteps
from fasttfm.search.greedy import GreedySteps
from fasttfm.search.hypotheses import Hypothesis, refuse_failed
from fasttfm.search.tasks import Task, Waiting, tasks_of

JOINING_SHARE = 4
"""One over the share of the budget that must be free before sentences join: encoding several at once is faster. Chosen,
not measured; the last bits of a search depend on it."""


def can_continue(model: Any) -> bool:
    """Return whether sentences may join a RunningSearch of this model. Call inside inference()."""
    takes = getattr(decoder_of(model), "takes_sentences", None)
    return takes is not None and bool(takes())


def steps_of(tasks: Sequence[Task], constraints: Constraints, *, in_order: bool) -> Steps:
    """The Steps subclass for the options of the tasks. in_order: see Beams."""
    config = tasks[0].config
    if tasks[0].required is not None:
        return ConstrainedSteps(tasks, constraints)
    if config.sampling or config.beam == 1:
        return GreedySteps(tasks, constraints)
    if config.diverse_beam_groups > 1:
        return DiverseSteps(tasks, constraints)
    return Beams(tasks, constraints, in_order=in_order)


class RunningSearch:
    """Search over a queue of sentences. Use inside inference()."""

    def __init__(
        self,
        model: Any,
        config: DecodingConfig,
        *,
        banned: Sequence[Sequence[int]] = (),
        continuations: frozenset[int] = frozenset(),
        at_once: int = 1,
    ) -> None:
        """banned, continuations: see search_ids(). at_once: number of such searches that share the machine's memory."""
        self.model, self.config, self.at_once = model, config, at_once
        self.banned, self.continuations = banned, continuations
        self.device = next(model.parameters()).device
        self.waiting: deque[Waiting] = deque()
        self.continues = can_continue(model)
        """Whether waiting sentences join before the search ends."""
        self._steps: list[Steps] = []
        """One per kind of sentences (Steps.kind)."""
        self._decoder = decoder_of(model)
        self._cache: Any = self._decoder.start_running() if self.continues else None

    @property
    def idle(self) -> bool:
        """Return whether no sentence is running or waiting."""
        return not (self.waiting or self._steps)

    def drop(self, keys: Collection[Hashable]) -> None:
        """Cancel sentences; running ones leave at the next step without a result."""
        self.waiting = deque(each for each in self.waiting if each.key not in keys)
        for each in self._steps:
            for task in each.tasks:
                task.cancelled |= task.waiting.key in keys

    def written(self) -> list[int]:
        """Tokens so far of the only hypothesis of the only sentence. Raises UserError if its probability is NaN."""
        for each in self._steps:
            refuse_failed([Hypothesis([], score, score) for score in each.scores.flatten().tolist()])
        return [token for each in self._steps for token in each.history[0, : each.tasks[0].written].tolist()]

    def run(self) -> Iterator[tuple[Hashable, list[Hypothesis]]]:
        """Step until no sentence is left, yielding (key, config.nbest best hypotheses) as sentences finish."""
        while not self.idle:
            yield from self.step()

    def step(self) -> list[tuple[Hashable, list[Hypothesis]]]:
        """Admit waiting sentences, take a step, and return the sentences that finished."""
        self._admit()
        if not self._steps:
            return []
        step = self._cache.fused if self.continues else self._decoder.step
        logits = step(torch.cat([each.tokens for each in self._steps]), self._cache)
        ended: list[Task] = []
        groups: dict[Hashable, Steps] = {}
        going: dict[Hashable, list[tuple[int, int, Tensor | None]]] = {}
        """Per kind: first row and number of rows before the step, and the old row that each new row continues."""
        begin, moves = 0, False
        for steps in self._steps:
            part = logits[begin : begin + len(steps.tokens)]
            rows, gone = steps.extend(part)
            ended += gone
            moves |= rows is not None or steps.kind in groups
            going.setdefault(steps.kind, []).append((begin, len(part), rows))
            if steps.kind in groups:
                groups[steps.kind].absorb(steps)
            else:
                groups[steps.kind] = steps
            begin += len(part)
        self._steps = [each for each in groups.values() if each.tasks]
        if moves:
            parts = [
                first + (torch.arange(count, device=self.device) if rows is None else rows)
                for some in going.values()
                for first, count, rows in some
            ]
            self._cache.go_on(torch.cat(parts), torch.cat([each.ranks() for each in groups.values()]))
        return [(task.waiting.key, task.best()) for task in ended if not task.cancelled]

    def _admit(self) -> None:
        """Admit the longest-waiting sentences that fit; one larger than the budget runs alone."""
        if not self.waiting or (self._steps and not self.continues):
            return
        budget = self.config.batch_tokens
        left = budget - sum(task.waiting.tokens for each in self._steps for task in each.tasks)
        if self._steps and left < budget // JOINING_SHARE:
            return
        members: list[Waiting] = []
        while self.waiting and (self.waiting[0].tokens <= left or not (members or self._steps)):
            members.append(self.waiting.popleft())
            left -= members[-1].tokens
        for _, error in self.join(members):
            raise error

    def search(self, batch: Sequence[Waiting]) -> Iterator[tuple[Hashable, list[Hypothesis]]]:
        """Join sentences and run(); without continuous batching they form one batch."""
        for _, error in self.join(batch):
            raise error
        return self.run()

    def join(self, members: Sequence[Waiting]) -> list[tuple[Hashable, UserError]]:
        """Add sentences to the next step, regardless of the budget.

        Returns the keys and errors of sentences whose search needs more memory than is free.
        """
        alike: dict[tuple[DecodingConfig, bool], list[Waiting]] = {}
        for each in members:
            alike.setdefault((each.config or self.config, bool(each.required)), []).append(each)
        refused: list[tuple[Hashable, UserError]] = []
        for (config, _), some in alike.items():
            try:
                self._join(some, config)
            except UserError as error:
                refused += [(each.key, error) for each in some]
        if alike and self._steps:
            self._select_outputs()
        return refused

    def _join(self, members: list[Waiting], config: DecodingConfig) -> None:
        refuse_more_than_available(self.model, [each.source for each in members], config, self.device, self.at_once)
        if self.continues:
            members.sort(key=lambda each: -round_length(len(each.source), LENGTHS))  # stable
        tasks = tasks_of(self.model, members, config, self.continuations)
        sizes = {
            "rows_per_sentence": config.nbest if config.sampling else 1,
            "beam": config.nbest if config.sampling else config.beam,
        }
        if self.continues:
            self._join_cache(tasks, sizes)
        else:
            self._cache = self._start_cache(tasks, sizes)
        in_order = getattr(self._cache, "moves_nothing", False)
        self._steps.append(steps_of(tasks, Constraints(config, self.device, self.banned), in_order=in_order))

    def _start_cache(self, tasks: Sequence[Task], sizes: dict[str, int]) -> Any:
        """Encode a batch and start its cache."""
        batch_invariant, sources = self.config.batch_invariant, [task.waiting.source for task in tasks]
        source, lengths = padded(sources, self.device, LENGTHS if batch_invariant else 1)
        # Without padding attention needs no mask. With a mask it sums in another order.
        is_padded = batch_invariant or any(len(each) < source.shape[1] for each in sources)
        mask_lengths = lengths if is_padded else None
        longest = max(task.limit for task in tasks)
        memory = self._decoder.encode(source, mask_lengths)
        return self._decoder.start_cache(memory, mask_lengths, max_length=longest + 1, **sizes)

    def _join_cache(self, tasks: Sequence[Task], sizes: dict[str, int]) -> None:
        """Add sentences to the cache; those of one padded length are encoded together."""
        pads = not self._decoder.fuses_encoder
        alike: dict[int, list[Sequence[int]]] = {}
        for task in tasks:
            source = task.waiting.source
            alike.setdefault(round_length(len(source), LENGTHS) if pads else 0, []).append(source)
        for sources in alike.values():
            ids, lengths = padded(sources, self.device, LENGTHS)
            self._decoder.join(self._cache, ids, lengths, **sizes)

    def _select_outputs(self) -> None:
        """Restrict the output product of fused steps to the tokens that some sentence may write."""
        fused = getattr(self._cache, "fused", None)
        if fused is None:
            return
        allowed = [task.allowed for each in self._steps for task in each.tasks]
        lists = [tokens for tokens in allowed if tokens is not None]
        fused.select_outputs(torch.cat(lists).unique() if len(lists) == len(allowed) else None)
