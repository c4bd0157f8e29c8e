"""Automaton over the tokens of an output that tracks which required phrases it contains.

A requirement is a list of alternatives, each a token sequence; an output meets all requirements if it contains one
alternative of each, at places that do not overlap. An occurrence may serve several requirements, so a state is the set
of all assignments, as in the simulation of a nondeterministic automaton, without those that another one dominates.
"""

from collections.abc import Sequence
from functools import cache

from fasttfm.data.tokenizer import BOS, EOS, PAD

Phrases = Sequence[Sequence[int]]
"""Alternatives, each a sequence of token ids."""
Way = tuple[int, tuple[int, int, int] | None]
"""Bit mask of requirements met; the alternative being written: requirement, alternative, tokens of it so far."""
State = frozenset[Way]

WORD, CONTINUATION = -1, -2
"""All tokens that no phrase waits for: those that begin a word, and those that continue one."""
_MOST_WAYS = 128
"""Limit on assignments, reached with many equal phrases or a long periodic one. Half of it is kept for the best ones
that write no phrase now, half for the best of all (fewest tokens needed); outputs with all phrases are still found."""


class Required:
    """The requirements of one sentence."""

    def __init__(self, requirements: Sequence[Phrases], continuations: frozenset[int] = frozenset()) -> None:
        """continuations: tokens that continue a word, except those that begin a phrase; a phrase followed by one does
        not count. Raises ValueError for a requirement without alternatives, and for an alternative that is empty or
        contains padding, begin- or end-of-sentence."""
        if not all(requirements) or not all(len(each) for phrases in requirements for each in phrases):
            raise ValueError("a required phrase has no tokens: give at least one for each alternative")
        if any(token in (PAD, BOS, EOS) for phrases in requirements for each in phrases for token in each):
            raise ValueError("a required phrase holds padding, begin- or end-of-sentence: leave them out")
        self.requirements = sorted(tuple(sorted({tuple(each) for each in phrases})) for phrases in requirements)
        begins = {phrase[0] for phrases in self.requirements for phrase in phrases}
        self.continuations = continuations - begins
        self.shortest = [min(map(len, phrases)) for phrases in self.requirements]
        self.start: State = frozenset({(0, None)})
        # A search asks about few distinct states, many times.
        self.needs, self.awaited, self.after_kind = cache(self._needs), cache(self._awaited), cache(self._step)

    def _needs(self, state: State) -> int:
        """The fewest tokens that complete the missing phrases."""
        return min(self._way_needs(*way) for way in state)

    def least(self, prefix: Sequence[int]) -> int:
        """Length of the shortest output that begins with this prefix and contains all phrases."""
        state = self.start
        for token in prefix:
            state = self.after(state, token)
        return len(prefix) + self.needs(state)

    def _way_needs(self, met: int, writing: tuple[int, int, int] | None) -> int:
        needs = sum(size for number, size in enumerate(self.shortest) if not met >> number & 1)
        if writing is not None:
            number, alternative, written = writing
            needs += len(self.requirements[number][alternative]) - written - self.shortest[number]
        return needs

    def _awaited(self, state: State) -> tuple[int, ...]:
        """Tokens that start or continue a missing phrase, ascending."""
        tokens = set()
        for met, writing in state:
            if writing is not None and writing[2] < len(self.requirements[writing[0]][writing[1]]):
                tokens.add(self.requirements[writing[0]][writing[1]][writing[2]])
                continue
            if writing is not None:
                met |= 1 << writing[0]
            tokens |= {self.requirements[number][other][0] for number, other in self._open(met)}
        return tuple(sorted(tokens))

    def after(self, state: State, token: int) -> State:
        """The state after token."""
        if token not in self.awaited(state):
            token = CONTINUATION if token in self.continuations else WORD
        return self.after_kind(state, token)

    def _open(self, met: int) -> list[tuple[int, int]]:
        """(requirement, alternative) of all phrases that may begin; the first only of equal requirements."""
        entries = []
        for number, phrases in enumerate(self.requirements):
            if met >> number & 1:
                continue
            if number and self.requirements[number - 1] == phrases and not met >> (number - 1) & 1:
                continue
            entries += [(number, other) for other in range(len(phrases))]
        return entries

    def _step(self, state: State, token: int) -> State:
        """The state after a token that is awaited, or after any token of the class WORD or CONTINUATION."""
        ways: set[Way] = set()
        goes_on = token == CONTINUATION or token in self.continuations
        for met, writing in state:
            if writing is not None:
                number, other, written = writing
                phrase = self.requirements[number][other]
                if written < len(phrase):
                    if phrase[written] == token:
                        ways.add(self._written(met, (number, other, written + 1)))
                    continue
                if goes_on:
                    continue  # the phrase is a prefix of a longer word
                met |= 1 << number
            ways.add((met, None))
            for number, other in self._open(met):
                if self.requirements[number][other][0] == token:
                    ways.add(self._written(met, (number, other, 1)))
        best = {
            (met, writing)
            for met, writing in ways
            if not any(writing == other and met | more == more != met for more, other in ways)
        }
        if len(best) > _MOST_WAYS:
            order = sorted(best, key=lambda way: (self._way_needs(*way), way[0], way[1] or ()))
            idle = [way for way in order if way[1] is None]  # without them, breaking off a phrase would end all ways
            best = {*idle[: _MOST_WAYS // 2], *order[: _MOST_WAYS // 2]}
        return frozenset(best)

    def _written(self, met: int, writing: tuple[int, int, int]) -> Way:
        """The way after one more token of a phrase; a complete phrase that nothing can continue is met at once."""
        number, other, written = writing
        if written == len(self.requirements[number][other]) and not self.continuations:
            return met | 1 << number, None
        return met, writing
