"""Sentences on their way through a search: what is asked for, and what a search has noted about each."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.shapes import round_length
from fasttfm.data.tokenizer import EOS
from fasttfm.search.batches import LENGTHS, SHORTEST
from fasttfm.search.decoder import positions_of, refuse_longer
from fasttfm.search.hypotheses import Finished, Hypothesis, distinct
from fasttfm.search.phrases import Phrases, Required, State


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sentence that is to be searched."""

    key: Hashable
    """Returned with its hypotheses."""
    source: Sequence[int]
    """Ids with end-of-sentence."""
    prefix: Sequence[int] = ()
    """Ids that its output must begin with."""
    number: int = 0
    """Second source, beside the seed, of sampling's random numbers."""
    allowed: Sequence[int] | None = None
    """Ids that its output may hold besides end-of-sentence and what is forced; None for all."""
    required: Sequence[Phrases] = ()
    """Phrases that its output must hold, for which a DeviceSearch does not look."""
    config: DecodingConfig | None = None
    """Its options, None for those of the search."""

    @property
    def tokens(self) -> int:
        """Tokens of the budget that it takes."""
        return max(round_length(len(self.source), LENGTHS), SHORTEST)


@dataclass(slots=True, eq=False)
class Task:
    """A sentence with all that its search depends on, and the notes of a search on the host."""

    waiting: Waiting
    config: DecodingConfig
    limit: int
    """Its longest output."""
    allowed: Tensor | None
    """The tokens that it may write, int64; None: all."""
    required: Required | None = None
    """Phrases that its output must hold."""
    written: int = 0
    """Tokens that its hypotheses hold."""
    ended: int = 0
    """Hypotheses that ended among the best of their step, for early stopping."""
    leaves: bool = False
    """Whether it ends with the next step and without results."""
    found: list[Finished] = field(default_factory=list)
    """Hypotheses that have ended, of each group of the beam."""
    states: list[State | None] = field(default_factory=list)
    """Of each row: where it stands towards the required phrases; None for a row without hypothesis."""
    _draws: np.ndarray | None = None
    _excluded: Tensor | None = None

    def uniform(self, steps: int, rows: int) -> np.ndarray:
        """(steps, rows) float32: the random numbers that it is sampled by, which no other sentence decides."""
        drawn = np.random.default_rng([self.config.sampling_seed, self.waiting.number])
        return drawn.random((steps, rows)).astype(np.float32)

    def draws(self) -> np.ndarray:
        """(nbest,) float32: the random numbers of the next step."""
        if self._draws is None:
            self._draws = self.uniform(self.limit + 1, self.config.nbest)
        return self._draws[self.written]

    def excluded(self, vocabulary: int, device: torch.device) -> Tensor:
        """(V,) bool: the tokens that are not allowed."""
        if self._excluded is None:
            self._excluded = torch.ones(vocabulary, dtype=torch.bool, device="cpu")
            self._excluded[self.allowed] = False
            self._excluded = self._excluded.to(device)
        return self._excluded

    def best(self) -> list[Hypothesis]:
        """The results, best first; of several groups each output once."""
        if len(self.found) == 1:
            return self.found[0].hypotheses
        return distinct((each for group in self.found for each in group.hypotheses), self.config.nbest)


def tasks_of(
    model: Any, members: Sequence[Waiting], config: DecodingConfig, continuations: frozenset[int] = frozenset()
) -> list[Task]:
    """The tasks of sentences that are searched together; continuations: as of search_ids.

    Raises UserError for a sentence that the model has no positions for.
    """
    required = [Required(each.required, continuations) if each.required else None for each in members]
    forced = [len(m.prefix) if needs is None else needs.least(m.prefix) for m, needs in zip(members, required)]
    limits = [max(config.longest_output(len(each.source) - 1), least) for each, least in zip(members, forced)]
    if (most := positions_of(model)) is not None:  # the begin of an output has one of them
        refuse_longer(model, (len(each.source) for each in members), (least + 1 for least in forced))
        limits = [min(limit, most - 1) for limit in limits]
    held = [[token for some in each.required for phrase in some for token in phrase] for each in members]
    lists = allowed_tokens([each.allowed for each in members], [each.prefix for each in members], held)
    allowed: Sequence[Tensor | None] = lists or [None] * len(members)
    return [
        Task(each, config, limit, some, needs) for each, limit, some, needs in zip(members, limits, allowed, required)
    ]


def allowed_tokens(allowed: Sequence[Sequence[int] | None], *forced: Iterable[Sequence[int]]) -> list[Tensor] | None:
    """Allowed tokens of each sentence, (n,) int64 and rising: its own, end-of-sentence and forced ones.

    forced: lists with a sequence of tokens for each sentence. None where no sentence has a list of its own; a sentence
    without one beside others that have is a ValueError.
    """
    if all(tokens is None for tokens in allowed):
        return None
    if any(tokens is None for tokens in allowed):
        raise ValueError("some sources have a list of allowed tokens and some have none: give one for each")
    parts = zip(allowed, *forced, strict=True)
    return [torch.from_numpy(np.unique(np.concatenate([[EOS], *map(_ids, each)]))) for each in parts]


def _ids(tokens: Sequence[int] | None) -> np.ndarray:
    return np.asarray(() if tokens is None else tokens, dtype=np.int64)
