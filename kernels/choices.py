"""Choices that depend on the chip: the tile of a kernel, or the route (backend) of an operator.

A Choice is a pure function of chip and size class, usually a table (tiles/table.py), with alternatives to measure:

    LAYER_NORM = Choice("layer_norm.tile", Table(...), lambda chip, columns, direction: ...)

The function returns the shipped answer. `fasttfm tune` measures the alternatives on the user's device and stores the
faster ones (choice_cache.py), which then override it. Nothing else measures.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from fasttfm.kernels.chip import Chip

Answer = TypeVar("Answer")
Decision = tuple[str, tuple]
"""Name of a choice, and size class."""

CHOICES: dict[str, Choice] = {}
"""Every choice of the imported kernel files, by name."""

_kept: dict[Chip, dict[Decision, str]] = {}

version = 0
"""Number of keep() calls; plans made under an earlier version are stale."""


class Choice(Generic[Answer]):
    """A decision between tiles or names; answers are stored and compared as str()."""

    def __init__(
        self, name: str, shipped: Callable[..., Answer], alternatives: Callable[..., Sequence[Answer]]
    ) -> None:
        """shipped: (chip, *size class) -> the shipped answer; alternatives: the same -> other valid answers."""
        if name in CHOICES:
            raise ValueError(f"there are two choices named {name}")
        self.name, self.shipped, self.alternatives = name, shipped, alternatives
        self._answers: dict[tuple, Answer] = {}
        CHOICES[name] = self

    def __call__(self, chip: Chip, *size_class: Any) -> Answer:
        # By name, not by chip: hashing a dataclass is too slow for a launch.
        key = (chip.name, chip.processors, *size_class)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._kept_answer(chip, size_class) or self.shipped(chip, *size_class)
        return answer

    def answers(self, chip: Chip, *size_class: Any) -> dict[str, Answer]:
        """Return the shipped answer and its alternatives, by str()."""
        return {str(each): each for each in (self.shipped(chip, *size_class), *self.alternatives(chip, *size_class))}

    def _kept_answer(self, chip: Chip, size_class: tuple) -> Answer | None:
        tuned = kept(chip).get((self.name, size_class))
        if tuned is None:
            return None
        answers = self.answers(chip, *size_class)
        if tuned not in answers:
            keep(chip, {})
            error = f"{tuned} is not an answer of {self.name} for {size_class} on {chip.name}"
            message = f"the tuned choices are ignored: {error}; run `fasttfm tune` again"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        return answers.get(tuned)


def keep(chip: Chip, answers: Mapping[Decision, str]) -> None:
    """Override the shipped answers on a chip, given as str(), and drop earlier overrides."""
    global version
    version += 1
    _kept[chip] = dict(answers)
    for choice in CHOICES.values():
        choice._answers.clear()


def kept(chip: Chip) -> dict[Decision, str]:
    """Return the current overrides on a chip."""
    return _kept.get(chip, {})


def asked(chip: Chip) -> list[Decision]:
    """Return the decisions made on a chip since the last keep()."""
    device = (chip.name, chip.processors)
    return [(name, key[2:]) for name, choice in CHOICES.items() for key in choice._answers if key[:2] == device]
