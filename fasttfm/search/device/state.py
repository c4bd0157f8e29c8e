"""Device state of a search, with fixed shapes and addresses.

S slots of K rows search at once, one sentence per slot, each at its own position. Sentences live in a store of Q places
that the host fills and empties while the device searches: options, encoder keys and values, results. A slot whose
sentence has ended takes the next place from a queue without the host. Nothing moves: tokens, parents, keys and values
are written once, and a row finds its past through a table of ancestors. Place Q is a dummy: idle slots search it, and
masked writes go there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.data.tokenizer import BOS

NOTHING = -1
"""No forced token at a position; no sentence number; no end of a hypothesis."""
NEVER = 1 << 40
"""A number of ended hypotheses that is never reached."""


class Sizes(NamedTuple):
    """Sizes of a State."""

    slots: int
    beam: int
    """Rows per slot, K."""
    nbest: int
    """Hypotheses kept per sentence, N."""
    steps: int
    """Maximum output length, end-of-sentence included, T."""
    sources: int
    """Maximum source length."""
    places: int
    """Capacity of the store, Q."""
    vocabulary: int

    @property
    def rows(self) -> int:
        """Total rows, R."""
        return self.slots * self.beam


class Settings(NamedTuple):
    """Columns of State.settings: options of a sentence."""

    limit: int
    """Maximum output length."""
    least: int
    """Minimum output length."""
    beam: int
    """Rows in use."""
    nbest: int
    """Hypotheses kept."""
    enough: int
    """Number of hypotheses ended within the beam that ends the search."""
    ranks: int
    """Best extensions of a step that may be filed when they end: twice the beam; 1 for greedy search."""
    source: int
    """Source length."""
    number: int
    """Sequence number; the host tells by it that this sentence has ended, not its predecessor."""


def column(name: str) -> int:
    """Column index of a setting."""
    return Settings._fields.index(name)


class State:
    """Buffers of S slots and of the store of sentences. Integers are int64, scores float32."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        slots, beam, nbest, steps, _, places, _ = sizes

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # slots
        self.sentence = zeros(slots)
        """(S,): place of the sentence in each slot."""
        self.position = zeros(slots)
        """(S,): length of the live hypotheses."""
        self.ended = zeros(slots)
        """(S,): hypotheses ended within the beam."""
        self.scores = zeros(slots, beam, dtype=torch.float32)
        """(S, K): log-probability of each live hypothesis, -inf for unused rows."""
        self.newest = zeros(slots, beam)
        """(S, K): newest token."""
        self.ancestors = zeros(sizes.rows, steps)
        """(R, T): storage index (row * T + position) of the keys and values of each earlier position of a row."""
        self.source_lengths = zeros(slots)
        """(S,): source lengths."""
        # the queue
        self.queue = zeros(places)
        """(Q,): ring buffer of places, in the order in which slots take them."""
        self.head, self.tail = zeros(1), zeros(1)
        """(1,): sentences taken by slots, and queued by the host."""
        # places
        self.settings = zeros(places + 1, len(Settings._fields))
        """(Q + 1, 8): see Settings."""
        self.forced = zeros(places + 1, steps)
        """(Q + 1, T): forced token at each position, or NOTHING."""
        self.divisors = zeros(places + 1, steps, dtype=torch.float32)
        """(Q + 1, T): length penalty of a hypothesis that ends at each position."""
        self.found_scores = zeros(places + 1, nbest, dtype=torch.float32)
        """(Q + 1, N): scores of finished hypotheses, descending; -inf where there is none."""
        self.found_log_probabilities = zeros(places + 1, nbest, dtype=torch.float32)
        self.found_ends = zeros(places + 1, nbest)
        """(Q + 1, N): position * K + row after which they ended"""
        self.tokens, self.parents = zeros(places + 1, steps, beam), zeros(places + 1, steps, beam)
        """(Q + 1, T, K): token of each row at each position, and the previous row that it continues."""
        self.finished = zeros(places + 1)
        """(Q + 1,): number of the sentence that ended in each place, or NOTHING."""
        # constants
        self.first_scores = torch.full((beam,), -torch.inf, dtype=torch.float32, device=device)
        """(K,): initial scores; all rows are equal at first, so only one counts."""
        self.first_scores[0] = 0.0
        self.reset()

    def reset(self) -> None:
        """Clear all slots and places."""
        nobody = self.sizes.places
        self.sentence.fill_(nobody)
        self.newest.fill_(BOS)
        self.scores.fill_(-torch.inf)
        for counts in (self.position, self.ended, self.head, self.tail):
            counts.zero_()
        self.source_lengths.fill_(1)
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

    @property
    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """Finished hypotheses by place, (Q + 1, N) each: scores, log-probabilities, ends."""
        return self.found_scores, self.found_log_probabilities, self.found_ends
