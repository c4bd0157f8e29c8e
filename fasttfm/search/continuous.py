"""A search on the host, which sentences join while it runs: those that end make room for those that wait.

Sentences of one batch end after different numbers of steps, and the last ones would be searched nearly alone, with
products of few rows. With continuous batching the rows of all sentences take one step together, whatever position each
has reached, and as soon as a quarter of the budget of tokens is free, sentences from the queue take it. A row does not
depend on the rows beside it, so what is found is the same to the last bit as in a batch that nobody joins, or alone. A
sentence may have options of its own, its beam among them.

Sentences that join together are encoded together where they are padded to the same length. Those with the same options
are searched by one Steps (beam.py), which takes in those that join after their first step. Sentences join on a CPU
where the decoder takes fused steps (search/cpu/decoder_step.py); elsewhere a batch is searched to its end.
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
"""A quarter of the budget must be free before sentences join a search: an encoder is quicker with several. Chosen, not
measured; a search's last bits depend on it."""


def can_continue(model: Any) -> bool:
    """Return whether sentences may join a RunningSearch of this model; asked inside batches.inference()."""
    takes = getattr(decoder_of(model), "takes_sentences", None)
    return takes is not None and bool(takes())


def steps_of(tasks: Sequence[Task], constraints: Constraints, *, in_order: bool) -> Steps:
    """The search that the options of the tasks ask for; in_order: as of Beams."""
    config = tasks[0].config
    if tasks[0].required is not None:
        return ConstrainedSteps(tasks, constraints)
    if config.sampling or config.beam == 1:
        return GreedySteps(tasks, constraints)
    if config.diverse_beam_groups > 1:
        return DiverseSteps(tasks, constraints)
    return Beams(tasks, constraints, in_order=in_order)


class RunningSearch:
    """Searches sentences that come one after the other; to be used inside batches.inference()."""

    def __init__(
        self,
        model: Any,
        config: DecodingConfig,
        *,
        banned: Sequence[Sequence[int]] = (),
        continuations: frozenset[int] = frozenset(),
        at_once: int = 1,
    ) -> None:
        """banned, continuations: as of search_ids; at_once: how many such searches share the memory of this machine."""
        self.model, self.config, self.at_once = model, config, at_once
        self.banned, self.continuations = banned, continuations
        self.device = next(model.parameters()).device
        self.waiting: deque[Waiting] = deque()
        self.continues = can_continue(model)
        """Whether sentences join while others are searched."""
        self._steps: list[Steps] = []
        """One of each kind of sentence."""
        self._decoder = decoder_of(model)
        self._cache: Any = self._decoder.start_running() if self.continues else None

    @property
    def idle(self) -> bool:
        """True if nothing is searched, nor waits."""
        return not (self.waiting or self._steps)

    @property
    def searched(self) -> int:
        """Sentences that have joined and have not ended."""
        return sum(len(each.tasks) for each in self._steps)

    @property
    def free(self) -> int:
        """Source tokens of the budget that nothing is searched for."""
        return self.config.batch_tokens - sum(task.waiting.tokens for each in self._steps for task in each.tasks)

    def drop(self, keys: Collection[Hashable]) -> None:
        """Cancels sentences: they leave at the next step without a result."""
        self.waiting = deque(each for each in self.waiting if each.key not in keys)
        for each in self._steps:
            for task in each.tasks:
                task.leaves |= task.waiting.key in keys

    def written(self) -> list[int]:
        """The tokens of the only sentence that is searched, which has one hypothesis; UserError for one whose
        probability is not a number."""
        for each in self._steps:
            refuse_failed([Hypothesis([], score, score) for score in each.scores.flatten().tolist()])
        return [token for each in self._steps for token in each.history[0, : each.tasks[0].written].tolist()]

    def run(self) -> Iterator[tuple[Hashable, list[Hypothesis]]]:
        """Takes steps until nothing waits any more: (key, config.nbest best hypotheses), as sentences end."""
        while not self.idle:
            yield from self.step()

    def step(self) -> list[tuple[Hashable, list[Hypothesis]]]:
        """Lets waiting sentences join, takes a step, and returns those that ended with it."""
        self._admit()
        if not self._steps:
            return []
        step = self._cache.fused if self.continues else self._decoder.step
        logits = step(torch.cat([each.tokens for each in self._steps]), self._cache)
        ended: list[Task] = []
        groups: dict[Hashable, Steps] = {}
        going: dict[Hashable, list[tuple[int, int, Tensor | None]]] = {}
        """Of each group: its first row and rows before the step, and those that its own go on from."""
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
        return [(task.waiting.key, task.best()) for task in ended if not task.leaves]

    def _admit(self) -> None:
        """Lets those that have waited longest join, as many as fit; a longer one than all of the budget alone."""
        if not self.waiting or (self._steps and not self.continues):
            return
        left = self.free
        if self._steps and left < self.config.batch_tokens // JOINING_SHARE:
            return
        members: list[Waiting] = []
        while self.waiting and (self.waiting[0].tokens <= left or not (members or self._steps)):
            members.append(self.waiting.popleft())
            left -= members[-1].tokens
        for _, error in self.join(members):
            raise error

    def search(self, batch: Sequence[Waiting]) -> Iterator[tuple[Hashable, list[Hypothesis]]]:
        """Searches sentences, which together are a batch where sentences cannot join others; as run()."""
        for _, error in self.join(batch):
            raise error
        return self.run()

    def join(self, members: Sequence[Waiting]) -> list[tuple[Hashable, UserError]]:
        """Let these sentences take part from the next step on, whatever is left of the budget.

        Returns the keys of those that do not, because their search needs more memory than there is, with the reason.
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
        """The cache of a batch, read by the encoder."""
        batch_invariant, sources = self.config.batch_invariant, [task.waiting.source for task in tasks]
        source, lengths = padded(sources, self.device, LENGTHS if batch_invariant else 1)
        # Without padding attention needs no mask, in the encoder and at every step. It sums in another order with one.
        is_padded = batch_invariant or any(len(each) < source.shape[1] for each in sources)
        known = lengths if is_padded else None
        longest = max(task.limit for task in tasks)
        memory = self._decoder.encode(source, known)
        return self._decoder.start_cache(memory, known, max_length=longest + 1, **sizes)

    def _join_cache(self, tasks: Sequence[Task], sizes: dict[str, int]) -> None:
        """Let sentences join the cache; those that are padded alike are encoded together."""
        pads = not self._decoder.fuses_encoder
        alike: dict[int, list[Sequence[int]]] = {}
        for task in tasks:
            source = task.waiting.source
            alike.setdefault(round_length(len(source), LENGTHS) if pads else 0, []).append(source)
        for sources in alike.values():
            ids, lengths = padded(sources, self.device, LENGTHS)
            self._decoder.join(self._cache, ids, lengths, **sizes)

    def _select_outputs(self) -> None:
        """Lets the next steps compute the logits that one of the sentences needs alone, where they can."""
        fused = getattr(self._cache, "fused", None)
        if fused is None:
            return
        allowed = [task.allowed for each in self._steps for task in each.tasks]
        known = [tokens for tokens in allowed if tokens is not None]
        fused.select_outputs(torch.cat(known).unique() if len(known) == len(allowed) else None)
