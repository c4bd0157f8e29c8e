"""Decisions that depend on the chip: which tile a kernel takes, which route an operator goes.

Such a decision is a pure function of the chip and a size class, most often a table (tiles/table.py), with the
alternatives that are worth measuring, and is called like the function:

    LAYER_NORM = Choice("layer_norm.tile", Table(...), lambda chip, columns, direction: ...)

The function's own answer is what ships. `fasttfm tune` measures the alternatives on the user's device and keeps what
was faster (choice_cache.py); that then goes before the shipped answer. Nothing is measured behind the user's back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from fasttfm.kernels.chip import Chip

Answer = TypeVar("Answer")
Decision = tuple[str, tuple]
"""Choice and size class."""

CHOICES: dict[str, Choice] = {}
"""Every choice of the kernel files that have been imported, by name."""

_kept: dict[Chip, dict[Decision, str]] = {}

version = 0
"""Counts the calls of keep(): what was decided before holds no longer."""


class Choice(Generic[Answer]):
    """One decision, whose answers are tiles or names; kept and compared as the text that str() makes of them."""

    def __init__(
        self, name: str, shipped: Callable[..., Answer], alternatives: Callable[..., Sequence[Answer]]
    ) -> None:
        """shipped: (chip, *size class) -> the answer that ships; alternatives: -> what may be taken instead."""
        if name in CHOICES:
            raise ValueError(f"two choices are called {name}")
        self.name, self.shipped, self.alternatives = name, shipped, alternatives
        self._answers: dict[tuple, Answer] = {}
        CHOICES[name] = self

    def __call__(self, chip: Chip, *size_class: Any) -> Answer:
        # By name, not by chip: hashing a dataclass costs more than a launch can spare for this.
        key = (chip.name, chip.processors, *size_class)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._kept_answer(chip, size_class) or self.shipped(chip, *size_class)
        return answer

    def answers(self, chip: Chip, *size_class: Any) -> dict[str, Answer]:
        """The shipped answer and its alternatives, by their text."""
        return {str(each): each for each in (self.shipped(chip, *size_class), *self.alternatives(chip, *size_class))}

    def _kept_answer(self, chip: Chip, size_class: tuple) -> Answer | None:
        written = kept(chip).get((self.name, size_class))
        if written is None:
            return None
        answers = self.answers(chip, *size_class)
        if written not in answers:
            keep(chip, {})
            error = f"{written} is no answer that {self.name} can give for {size_class} on {chip.name}"
            said = f"what was tuned is of no use: {error}; run `fasttfm tune` again"
            warnings.warn(said, RuntimeWarning, stacklevel=3)
        return answers.get(written)


def keep(chip: Chip, answers: Mapping[Decision, str]) -> None:
    """From now on answers so on this chip, with text; what is not listed is answered as shipped."""
    global version
    version += 1
    _kept[chip] = dict(answers)
    for known in CHOICES.values():
        known._answers.clear()


def kept(chip: Chip) -> dict[Decision, str]:
    """Return what keep() was last told for a chip."""
    return _kept.get(chip, {})


def asked(chip: Chip) -> list[Decision]:
    """The decisions that were asked for on a chip since the last keep()."""
    device = (chip.name, chip.processors)
    return [(name, key[2:]) for name, known in CHOICES.items() for key in known._answers if key[:2] == device]
