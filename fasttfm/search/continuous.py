"""A search that sentences join while it runs: those that end make room for those that wait (continuous batching).

Sentences of one batch end after different numbers of steps, and the last ones would be searched nearly alone, with
products of few rows. Here the rows of all sentences take one step together, whatever position each has reached, and as
soon as a quarter of the budget of tokens is free, sentences from the queue take it. A row does not depend on the rows
beside it, so what is found is the same to the last bit as in a batch that nobody joins, or alone. A sentence may have
options of its own, its beam among them.

Sentences that join together are encoded together where they are padded to the same length. Those with the same options
are searched by one Steps (beam.py), which takes in those that join after their first step. For models on a CPU whose
decoder takes straight steps (search/cpu/decoder_step.py).
Source: Yu et al. 2022 (Orca), iteration-level scheduling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.shapes import round_length
from fasttfm.errors import UserError
from fasttfm.search.batches import LENGTHS, SHORTEST, padded
from fasttfm.search.beam import Going, Steps
from fasttfm.search.constrained import longest_with_phrases
from fasttfm.search.decoder import decoder_of, positions_of, refuse_longer
from fasttfm.search.greedy import plain_steps
from fasttfm.search.hypotheses import Constraints, Hypothesis
from fasttfm.search.memory import refuse_more_than_available
from fasttfm.search.phrases import Phrases, Required
from fasttfm.search.selection import allowed_tokens, compute_allowed

JOINING_SHARE = 4
"""A quarter of the budget must be free before sentences join a search: an encoder is quicker with several. Chosen, not
measured; a search's last bits depend on it."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sentence that is to be searched."""

    key: Hashable
    """What its hypotheses come back with."""
    source: Sequence[int]
    """Ids with end-of-sentence."""
    prefix: Sequence[int] = ()
    """Ids that its output must begin with."""
    number: int = 0
    """What sampling takes its random numbers from besides the seed."""
    allowed: Sequence[int] | None = None
    """Ids that its output may hold besides end-of-sentence and what is forced; None for all."""
    required: Sequence[Phrases] = ()
    """Phrases that its output must hold, for which a RunningSearch does not look."""
    config: DecodingConfig | None = None
    """Its options, None for those of the search; one that can_continue() takes."""

    @property
    def tokens(self) -> int:
        """Tokens of the budget that it takes."""
        return max(round_length(len(self.source), LENGTHS), SHORTEST)


@dataclass(slots=True)
class _Joined:
    """Sentences with the same options that are searched together."""

    steps: Steps
    members: list[Waiting]
    """By the numbers that the sentences have in steps."""

    def absorb(self, other: _Joined) -> None:
        """Search the sentences of another group along with these, and after them."""
        self.members = [some.members[number] for some in (self, other) for number in some.steps.sentences]
        self.steps.absorb(other.steps)

    def ranks(self) -> Tensor:
        """(rows of the next step,) int32: the place of each row within its sentence."""
        return torch.arange(self.steps.rows, dtype=torch.int32).repeat(len(self.steps.sentences))


def constraints_of(
    model: Any,
    sentences: Sequence[Waiting],
    config: DecodingConfig,
    device: torch.device,
    banned: Sequence[Sequence[int]],
    phrases: Sequence[Required] | None = None,
) -> Constraints:
    """Return the constraints on sentences that are searched together; phrases: of each what is required of it.

    Raises UserError for a sentence that the model has no positions for.
    """
    prefixes = [each.prefix for each in sentences]
    limits = [max(config.longest_output(len(each.source) - 1), len(each.prefix)) for each in sentences]
    if phrases is not None:
        limits = [longest_with_phrases(*each) for each in zip(limits, prefixes, phrases)]
    if (most := positions_of(model)) is not None:  # the begin of an output has one of them
        forced = [*map(len, prefixes)]
        if phrases is not None:
            forced = [longest_with_phrases(0, *each) for each in zip(prefixes, phrases)]
        refuse_longer(model, (len(each.source) for each in sentences), (length + 1 for length in forced))
        limits = [min(limit, most - 1) for limit in limits]
    required = [[token for some in each.required for phrase in some for token in phrase] for each in sentences]
    allowed = allowed_tokens([each.allowed for each in sentences], prefixes, required)
    return Constraints(limits, prefixes, config, device, banned, allowed)


def can_continue(model: Any, config: DecodingConfig) -> bool:
    """Return whether a RunningSearch takes this model and configuration; asked inside batches.inference()."""
    takes = getattr(decoder_of(model), "takes_sentences", None)
    plain = config.diverse_beam_groups == 1 and config.batch_invariant
    return plain and takes is not None and bool(takes())


class RunningSearch:
    """Searches sentences that come one after the other; to be used inside batches.inference(), where can_continue()."""

    def __init__(
        self, model: Any, config: DecodingConfig, *, banned: Sequence[Sequence[int]] = (), at_once: int = 1
    ) -> None:
        """banned: as of search_ids; at_once: how many such searches share the memory of this machine."""
        self.model, self.config, self.banned, self.at_once = model, config, banned, at_once
        self.waiting: deque[Waiting] = deque()
        self._joined: list[_Joined] = []
        self._decoder = decoder_of(model)
        self._cache = self._decoder.start_running()
        self._dropped: set[Hashable] = set()

    @property
    def idle(self) -> bool:
        """True if nothing is searched, nor waits."""
        return not (self.waiting or self._joined)

    @property
    def searched(self) -> int:
        """Sentences that have joined and have not ended."""
        return sum(len(each.steps.sentences) for each in self._joined)

    @property
    def free(self) -> int:
        """Source tokens of the budget that nothing is searched for."""
        searched = (each.members[index] for each in self._joined for index in each.steps.sentences)
        return self.config.batch_tokens - sum(each.tokens for each in searched)

    def drop(self, keys: Collection[Hashable]) -> None:
        """Cancels sentences: they leave at the next step without a result."""
        self.waiting = deque(each for each in self.waiting if each.key not in keys)
        for each in self._joined:
            leaving = {number for number in each.steps.sentences if each.members[number].key in keys}
            each.steps.leaving |= leaving
            self._dropped |= {each.members[number].key for number in leaving}

    def run(self) -> Iterator[tuple[Hashable, list[Hypothesis]]]:
        """Takes steps until nothing waits any more: (key, config.nbest best hypotheses), as sentences end."""
        while not self.idle:
            yield from self.step()

    def step(self) -> list[tuple[Hashable, list[Hypothesis]]]:
        """Lets waiting sentences join, takes a step, and returns those that ended with it."""
        self._admit()
        if not self._joined:
            return []
        tokens = torch.cat([each.steps.tokens for each in self._joined])
        logits = self._cache.straight(tokens, self._cache)  # (R, V), in the type that the model computes in
        results: list[tuple[Hashable, list[Hypothesis]]] = []
        groups: dict[Hashable, _Joined] = {}
        going: dict[Hashable, list[tuple[int, int, Going]]] = {}
        """Of each group, with the first row and rows a sentence."""
        begin, moves = 0, False
        for each in self._joined:
            steps = each.steps
            end, rows = begin + steps.tokens.shape[0], steps.rows
            after = steps.extend(logits[begin:end])
            results += [(each.members[sentence].key, steps.best(sentence)) for sentence in after.ended]
            options = steps.config, steps.constraints.allowed is None
            going.setdefault(options, []).append((begin, rows, after))
            moves |= steps.moves or after.kept is not None or options in groups
            if options in groups:
                groups[options].absorb(each)
            else:
                groups[options] = each
            begin = end
        self._joined = [each for each in groups.values() if each.steps.sentences]
        if moves:
            before = [first + after.rows(rows) for some in going.values() for first, rows, after in some]
            self._cache.go_on(torch.cat(before), torch.cat([each.ranks() for each in groups.values()]))
        if self._dropped:
            results = [(key, best) for key, best in results if key not in self._dropped]
            self._dropped.clear()
        return results

    def _admit(self) -> None:
        """Lets those that have waited longest join, as many as fit; a longer one than all of the budget alone."""
        if not self.waiting:
            return
        left = self.free
        if self._joined and left < self.config.batch_tokens // JOINING_SHARE:
            return
        members: list[Waiting] = []
        while self.waiting and (self.waiting[0].tokens <= left or not (members or self._joined)):
            members.append(self.waiting.popleft())
            left -= members[-1].tokens
        for _, error in self.join(members):
            raise error

    def join(self, members: Sequence[Waiting]) -> list[tuple[Hashable, UserError]]:
        """Let these sentences take part from the next step on, whatever is left of the budget.

        Returns the keys of those that do not, because their search needs more memory than there is, with the reason.
        """
        by_options: dict[DecodingConfig, list[Waiting]] = {}
        for each in members:
            by_options.setdefault(each.config or self.config, []).append(each)
        refused: list[tuple[Hashable, UserError]] = []
        for config, some in by_options.items():
            try:
                self._join(some, config)
            except UserError as error:
                refused += [(each.key, error) for each in some]
        if by_options and self._joined:
            self._select_outputs()
        return refused

    def _join(self, members: list[Waiting], config: DecodingConfig) -> None:
        refuse_more_than_available(self.model, [each.source for each in members], config, _CPU, self.at_once)
        pads = not self._decoder.encodes_straight
        members.sort(key=lambda each: -round_length(len(each.source), LENGTHS))  # stable
        alike: dict[int, list[Waiting]] = {}
        for each in members:
            alike.setdefault(round_length(len(each.source), LENGTHS) if pads else 0, []).append(each)
        steps = plain_steps(
            constraints_of(self.model, members, config, _CPU, self.banned), config, [m.number for m in members]
        )
        steps.moves_nothing = True
        beam = config.nbest if config.sampling else config.beam
        for some in alike.values():
            source, lengths = padded([each.source for each in some], _CPU, LENGTHS)
            self._decoder.join(self._cache, source, lengths, beam=beam, rows_per_sentence=steps.rows)
        self._joined.append(_Joined(steps, members))

    def _select_outputs(self) -> None:
        """Lets the next steps compute what one of the sentences may write."""
        tokens: list[Tensor] = []
        for each in self._joined:
            allowed = each.steps.constraints.allowed
            if allowed is None:
                compute_allowed(self._cache, None)
                return
            tokens += [allowed[number] for number in each.steps.sentences]
        compute_allowed(self._cache, tokens)
