"""Decisions that depend on the chip: which tile a kernel takes, which route an operator goes.

Such a decision is a pure function of the chip and a size class, most often a table (tiles/table.py), with the
alternatives that are worth measuring, and is called like the function:

    LAYER_NORM = Choice("layer_norm.tile", Table(...), lambda chip, columns, direction: ...)

The function's own answer is what ships. `fasttfm tune` measures the alternatives on the user's device and keeps what
was faster (choice_cache.py); that then goes before the shipped answer. Nothing is measured behind the user's back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from fasttfm.kernels.chip import Chip

Answer = TypeVar("Answer")

CHOICES: dict[str, Choice] = {}
"""Every choice of the kernel files that have been imported, by name."""

_kept: dict[Chip, dict[tuple[str, tuple], str]] = {}


class Choice(Generic[Answer]):
    """One decision, whose answers are tiles or names; kept and compared as the text that str() makes of them."""

    def __init__(
        self, name: str, shipped: Callable[..., Answer], alternatives: Callable[..., Sequence[Answer]]
    ) -> None:
        if name in CHOICES:
            raise ValueError(f"two choices are called {name}")
        self.name = name
        self.shipped = shipped
        """(chip, *size class) -> the answer that ships."""
        self.alternatives = alternatives
        """(chip, *size class) -> what may be taken instead."""
        self._answers: dict[tuple, Answer] = {}
        CHOICES[name] = self

    def __call__(self, chip: Chip, *size_class: Any) -> Answer:
        # By name, not by chip: hashing a dataclass costs more than a launch can spare for this.
        key = (chip.name, chip.processors, *size_class)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._kept_answer(chip, size_class) or self.shipped(chip, *size_class)
        return answer

    def _kept_answer(self, chip: Chip, size_class: tuple) -> Answer | None:
        written = _kept.get(chip, {}).get((self.name, size_class))
        if written is None:
            return None
        try:
            return self.parse(chip, size_class, written)
        except ValueError as error:
            keep(chip, {})
            warnings.warn(
                f"what was tuned is of no use: {error}; run `fasttfm tune` again", RuntimeWarning, stacklevel=3
            )
            return None

    def parse(self, chip: Chip, size_class: tuple, written: str) -> Answer:
        """The answer of this text. Raises ValueError when it is none of shipped answer and alternatives."""
        for answer in (self.shipped(chip, *size_class), *self.alternatives(chip, *size_class)):
            if str(answer) == written:
                return answer
        raise ValueError(f"{written} is no answer that {self.name} can give for {size_class} on {chip.name}")


def keep(chip: Chip, answers: dict[tuple[str, tuple], str]) -> None:
    """From now on answers so on this chip: (choice, size class) -> answer as text. What is not listed is answered as
    shipped."""
    _kept[chip] = dict(answers)
    for known in CHOICES.values():
        known._answers.clear()


def kept(chip: Chip) -> dict[tuple[str, tuple], str]:
    """Return what keep() was last told for a chip."""
    return _kept.get(chip, {})


def asked(chip: Chip) -> list[tuple[str, tuple]]:
    """The decisions that were asked for on a chip since the last keep()."""
    device = (chip.name, chip.processors)
    return [(name, key[2:]) for name, known in CHOICES.items() for key in known._answers if key[:2] == device]
