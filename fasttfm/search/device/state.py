"""Memory of searches on a device, of fixed shapes and addresses.

S slots of K rows search at once, a slot a sentence, each at its own position. Sentences stand in a store of Q places,
which the host fills and empties while the device searches: options, the encoder's keys and values, and what was found.
A slot whose sentence has ended takes the next one of a queue of places by itself. Nothing moves: tokens, parents, keys
and values are written once, and a row finds its past in a table of ancestors. Place Q is nobody's: idle slots search
it, and whatever must not be seen is written there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.data.tokenizer import BOS

NOTHING = -1
"""A position where any token may follow; the number of no sentence; the end of no hypothesis."""
NEVER = 1 << 40
"""So many hypotheses never end."""


class Sizes(NamedTuple):
    """Shapes of all that searches in one state."""

    slots: int
    beam: int
    """Rows of a slot, K."""
    nbest: int
    """Hypotheses that are kept of a sentence, N."""
    steps: int
    """Most tokens of an output, end-of-sentence counted, T."""
    sources: int
    """Most tokens of a source."""
    places: int
    """Sentences that the store holds, Q."""
    vocabulary: int

    @property
    def rows(self) -> int:
        """Rows of all slots, R."""
        return self.slots * self.beam


class Settings(NamedTuple):
    """Columns of State.settings: a sentence's options."""

    limit: int
    """Longest output."""
    least: int
    """Shortest output."""
    beam: int
    """Rows that it uses."""
    nbest: int
    """Hypotheses that are kept of it."""
    enough: int
    """Hypotheses that end its search when they have ended among its beam's best."""
    ranks: int
    """Of the best extensions of a step those that may be filed when they end: twice the beam; greedy search files the
    best alone."""
    source: int
    """Tokens of its source."""
    number: int
    """Its number, by which the host knows that it has ended and not the one before it."""


def column(name: str) -> int:
    """The column of a setting."""
    return Settings._fields.index(name)


class State:
    """Searches of S slots, and the store of their sentences. Integers are int64, scores float32."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        slots, beam, nbest, steps, _, places, _ = sizes

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # of slots
        self.sentence = zeros(slots)
        """(S,): the place of the sentence that each slot searches."""
        self.position = zeros(slots)
        """(S,): tokens that a slot's hypotheses hold."""
        self.ended = zeros(slots)
        """(S,): hypotheses that have ended among their beam's best."""
        self.scores = zeros(slots, beam, dtype=torch.float32)
        """(S, K): log-probability of each live hypothesis, -inf of a row without one."""
        self.newest = zeros(slots, beam)
        """(S, K): newest token."""
        self.ancestors = zeros(sizes.rows, steps)
        """(R, T): where the keys and values of each earlier position of a row are stored: row * T + position."""
        self.source_lengths = zeros(slots)
        """(S,): tokens of the sources."""
        # the queue
        self.queue = zeros(places)
        """(Q,): a ring of places, in the order in which slots take them."""
        self.head, self.tail = zeros(1), zeros(1)
        """(1,): sentences that slots have taken, and that the host has queued."""
        # of places
        self.settings = zeros(places + 1, len(Settings._fields))
        """(Q + 1, 8): see Settings."""
        self.forced = zeros(places + 1, steps)
        """(Q + 1, T): the token that must come at a position, NOTHING where any may."""
        self.divisors = zeros(places + 1, steps, dtype=torch.float32)
        """(Q + 1, T): the length penalty of a hypothesis that ends at a position."""
        self.found_scores = zeros(places + 1, nbest, dtype=torch.float32)
        """(Q + 1, N): scores of hypotheses that have ended, falling; -inf where there is none."""
        self.found_log_probabilities = zeros(places + 1, nbest, dtype=torch.float32)
        self.found_ends = zeros(places + 1, nbest)
        """(Q + 1, N): position * K + row after which they ended."""
        self.tokens, self.parents = zeros(places + 1, steps, beam), zeros(places + 1, steps, beam)
        """(Q + 1, T, K): the token of each row at a position, and the row before that it goes on from."""
        self.finished = zeros(places + 1)
        """(Q + 1,): the number of the sentence that has ended in a place, NOTHING before one has."""
        # constants
        self.first_scores = torch.full((beam,), -torch.inf, dtype=torch.float32, device=device)
        """(K,): at first all rows are the same, one of them counts."""
        self.reset()

    def reset(self) -> None:
        """Empty all slots and places."""
        nobody = self.sizes.places
        self.sentence.fill_(nobody)
        self.newest.fill_(BOS)
        self.scores.fill_(-torch.inf)
        for counts in (self.position, self.ended, self.head, self.tail):
            counts.zero_()
        self.source_lengths.fill_(1)
        self.first_scores[0] = 0.0
        self.finished.fill_(NOTHING)
        self.forced.fill_(NOTHING)
        self.divisors.fill_(1.0)
        self.found_scores.fill_(-torch.inf)
        self.found_ends.fill_(NOTHING)
        idle = Settings(0, 0, self.sizes.beam, self.sizes.nbest, NEVER, 2 * self.sizes.beam, 1, NOTHING)
        self.settings[:] = torch.tensor(idle, device=self.device)

    def setting(self, name: str) -> Tensor:
        """(S,): a setting of the sentence in each slot."""
        return self.settings[:, column(name)].index_select(0, self.sentence)
