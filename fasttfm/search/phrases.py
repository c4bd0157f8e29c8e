"""State of an output towards the phrases that it must hold: an automaton over its tokens.

A requirement is a list of alternatives, each a sequence of tokens; an output meets all requirements when it holds one
alternative of each, at places that do not overlap. Which requirement an occurrence serves is left open as long as it
matters: a state is the set of all ways to count, as in the simulation of a nondeterministic automaton, less those
that another one is at least as good as. So no output that meets the requirements is taken for one that does not.
"""

from collections.abc import Sequence

from fasttfm.data.tokenizer import BOS, EOS, PAD

Phrases = Sequence[Sequence[int]]
"""Alternatives, each of token ids."""
Way = tuple[int, tuple[int, int, int] | None]
"""Requirements met as bits; the alternative that is being written: requirement, alternative, tokens of it so far."""
State = frozenset[Way]

WORD, CONTINUATION = -1, -2
"""Stand for all tokens that no phrase waits for: those that begin a word, and those that go on one."""
_MOST_WAYS = 128
"""More ways than this come of many equal phrases, or of one that repeats itself for long. Kept are half as
many of those that write no phrase now, and half as many of all, those that need least: that satisfies all the same."""


class Required:
    """The requirements of one sentence."""

    def __init__(self, requirements: Sequence[Phrases], continuations: frozenset[int] = frozenset()) -> None:
        """continuations: tokens that go on a word; a phrase that one follows at once does not count. One that a phrase
        begins with is none. ValueError for a requirement without alternatives, and for an alternative that is empty or
        holds padding, begin- or end-of-sentence."""
        if not all(requirements) or not all(len(each) for phrases in requirements for each in phrases):
            raise ValueError("a required phrase has no tokens: give at least one for each alternative")
        if any(token in (PAD, BOS, EOS) for phrases in requirements for each in phrases for token in each):
            raise ValueError("a required phrase holds padding, begin- or end-of-sentence: leave them out")
        self.requirements = sorted(tuple(sorted({tuple(each) for each in phrases})) for phrases in requirements)
        begins = {phrase[0] for phrases in self.requirements for phrase in phrases}
        self.continuations = continuations - begins
        self.all = (1 << len(self.requirements)) - 1
        self.shortest = [min(map(len, phrases)) for phrases in self.requirements]
        self.start: State = frozenset({(0, None)})
        self._after: dict[tuple[State, int], State] = {}
        self._needs: dict[State, int] = {}
        self._next: dict[State, tuple[int, ...]] = {}

    def needs(self, state: State) -> int:
        """The fewest tokens that complete the missing phrases."""
        known = self._needs.get(state)
        if known is None:
            known = self._needs[state] = min(self._way_needs(*way) for way in state)
        return known

    def least(self, prefix: Sequence[int]) -> int:
        """The fewest tokens of an output that begins with this prefix."""
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

    def awaited(self, state: State) -> tuple[int, ...]:
        """Tokens that start or continue a missing phrase."""
        known = self._next.get(state)
        if known is None:
            tokens = set()
            for met, writing in state:
                if writing is not None and writing[2] < len(self.requirements[writing[0]][writing[1]]):
                    tokens.add(self.requirements[writing[0]][writing[1]][writing[2]])
                    continue
                if writing is not None:
                    met |= 1 << writing[0]
                tokens |= {self.requirements[number][other][0] for number, other in self._open(met)}
            known = self._next[state] = tuple(sorted(tokens))
        return known

    def after(self, state: State, token: int) -> State:
        """The state once token is written."""
        if token not in self.awaited(state):
            token = CONTINUATION if token in self.continuations else WORD
        return self.after_kind(state, token)

    def after_kind(self, state: State, token: int) -> State:
        """The state once a token is written that is awaited, or any of those that WORD or CONTINUATION stands for."""
        known = self._after.get((state, token))
        if known is None:
            known = self._after[state, token] = self._step(state, token)
        return known

    def _open(self, met: int) -> list[tuple[int, int]]:
        """Requirement and alternative of all phrases that may begin; of equal requirements the first alone."""
        entries = []
        for number, phrases in enumerate(self.requirements):
            if met >> number & 1:
                continue
            if number and self.requirements[number - 1] == phrases and not met >> (number - 1) & 1:
                continue
            entries += [(number, other) for other in range(len(phrases))]
        return entries

    def _step(self, state: State, token: int) -> State:
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
                    continue  # the phrase was the beginning of a longer word
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
            idle = [way for way in order if way[1] is None]  # without one, a token that breaks a phrase ends all ways
            best = {*idle[: _MOST_WAYS // 2], *order[: _MOST_WAYS // 2]}
        return frozenset(best)

    def _written(self, met: int, writing: tuple[int, int, int]) -> Way:
        """A way with one more token; a whole phrase that nothing can go on with is met at once."""
        number, other, written = writing
        if written == len(self.requirements[number][other]) and not self.continuations:
            return met | 1 << number, None
        return met, writing
