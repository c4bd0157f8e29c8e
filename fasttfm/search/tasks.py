"""Sentences of a search: the request (Waiting) and the host's state while it is searched (Task)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
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
    """A sentence to search."""

    key: Hashable
    """Identifies the sentence in results."""
    source: Sequence[int]
    """Ids with end-of-sentence."""
    prefix: Sequence[int] = ()
    """Ids that the output must begin with."""
    number: int = 0
    """Seed of sampling, beside config.sampling_seed."""
    allowed: Sequence[int] | None = None
    """Allowed ids besides end-of-sentence and forced ones; None: all."""
    required: Sequence[Phrases] = ()
    """Phrases that the output must contain; ignored by DeviceSearch."""
    config: DecodingConfig | None = None
    """Options of this sentence; None: those of the search."""

    @property
    def tokens(self) -> int:
        """Source tokens charged to the budget (config.batch_tokens)."""
        return max(round_length(len(self.source), LENGTHS), SHORTEST)


@dataclass(slots=True, eq=False)
class Task:
    """A sentence with its resolved options, and its state in a search on the host."""

    waiting: Waiting
    config: DecodingConfig
    limit: int
    """Maximum output length."""
    allowed: Tensor | None
    """Allowed tokens, int64; None: all."""
    required: Required | None = None
    """Phrases that the output must contain."""
    written: int = 0
    """Length of its live hypotheses."""
    ended: int = 0
    """Hypotheses that ended among the K best of their step, for early stopping."""
    cancelled: bool = False
    """Whether it was cancelled: it ends with the next step, without results."""
    finished: list[Finished] = field(default_factory=list)
    """Finished hypotheses of each group of the beam."""
    states: list[State | None] = field(default_factory=list)
    """Per row: state of the required phrases; None for a row without hypothesis."""
    _draws: np.ndarray | None = None
    _excluded: Tensor | None = None

    def uniform(self, steps: int, rows: int) -> np.ndarray:
        """Random numbers (steps, rows) float32 for sampling; they depend on the seed and number alone."""
        generator = np.random.default_rng([self.config.sampling_seed, self.waiting.number])
        return generator.random((steps, rows)).astype(np.float32)

    def draws(self) -> np.ndarray:
        """Random numbers (nbest,) float32 of the next step."""
        if self._draws is None:
            self._draws = self.uniform(self.limit + 1, self.config.nbest)
        return self._draws[self.written]

    def excluded(self, vocabulary: int, device: torch.device) -> Tensor:
        """(V,) bool: tokens that are not allowed."""
        if self._excluded is None:
            self._excluded = torch.ones(vocabulary, dtype=torch.bool, device="cpu")
            self._excluded[self.allowed] = False
            self._excluded = self._excluded.to(device)
        return self._excluded

    def best(self) -> list[Hypothesis]:
        """Results, best first; outputs found by several groups are merged."""
        if len(self.finished) == 1:
            return self.finished[0].hypotheses
        return distinct((each for group in self.finished for each in group.hypotheses), self.config.nbest)


def tasks_of(
    model: Any, members: Sequence[Waiting], config: DecodingConfig, continuations: frozenset[int] = frozenset()
) -> list[Task]:
    """Tasks of sentences that are searched together. continuations: see search_ids().

    Raises UserError for a sentence that is longer than the model's positions.
    """
    required = [Required(each.required, continuations) if each.required else None for each in members]
    forced = [len(m.prefix) if needs is None else needs.least(m.prefix) for m, needs in zip(members, required)]
    limits = [max(config.longest_output(len(each.source) - 1), least) for each, least in zip(members, forced)]
    if (most := positions_of(model)) is not None:  # begin-of-sentence takes one of them
        refuse_longer(model, (len(each.source) for each in members), (least + 1 for least in forced))
        limits = [min(limit, most - 1) for limit in limits]
    phrases = [[token for some in each.required for phrase in some for token in phrase] for each in members]
    lists = allowed_tokens([each.allowed for each in members], [each.prefix for each in members], phrases)
    allowed: Sequence[Tensor | None] = lists or [None] * len(members)
    return [
        Task(each, config, limit, some, needs) for each, limit, some, needs in zip(members, limits, allowed, required)
    ]


def allowed_tokens(allowed: Sequence[Sequence[int] | None], *forced: Iterable[Sequence[int]]) -> list[Tensor] | None:
    """Allowed tokens of each sentence, (n,) int64 ascending: its own list, end-of-sentence and forced tokens.

    forced: lists with one token sequence per sentence. Returns None if no sentence has a list; raises ValueError if
    only some have one.
    """
    lists = [tokens for tokens in allowed if tokens is not None]
    if not lists:
        return None
    if len(lists) < len(allowed):
        raise ValueError("some sources have a list of allowed tokens and some have none: give one for each")
    tokens = (sorted({EOS, *chain.from_iterable(each)}) for each in zip(lists, *forced, strict=True))
    return [torch.tensor(each, device="cpu") for each in tokens]
