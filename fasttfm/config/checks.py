"""Field types with value ranges (`heads: Count = 8`), and validation of a section."""

import dataclasses
import math
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from fasttfm.errors import UserError


@dataclass(frozen=True, slots=True)
class Range:
    """The allowed range of a numeric field."""

    least: float = 0
    most: float = math.inf
    above: bool = False
    """Whether `least` is excluded."""
    below: bool = False
    """Whether `most` is excluded."""

    def refusal(self, value: Any, kind: type) -> str:
        """The violated requirement, such as `at most 3`; '' for an allowed value."""
        if kind is int and (type(value) is not int or value < self.least):
            return f"an integer of at least {self.least}"
        if kind is float and not (self.least <= value < math.inf and (value > self.least or not self.above)):
            return f"a finite number {'greater than' if self.above else 'of at least'} {self.least}"
        if self.below and value >= self.most:
            return f"below {self.most:,}"
        return f"at most {self.most:,}" if value > self.most else ""


Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range()]
Amount = Annotated[float, Range()]
Positive = Annotated[float, Range(above=True)]
Rate = Annotated[float, Range(0, 1, below=True)]
"""A rate of dropout, label smoothing or decay, below 1."""
Layers = Annotated[int, Range(1, 10_000)]
"""Number of layers; a file with more is damaged, and building a billion layers would take hours."""
Width = Annotated[int, Range(1, 1_000_000)]
"""Width of a layer; no tensor has the square of a larger number of elements."""
Seed = Annotated[int, Range(0, (1 << 63) - 1)]


def check_fields(config: Any) -> None:
    """Raise ValueError, starting with the field name, for a value that the field's type does not allow."""
    cls: type = type(config)
    for name, rule in _rules(cls).items():
        value, allowed = getattr(config, name), typing.get_args(rule)
        if typing.get_origin(rule) is Literal:
            if value not in allowed:
                raise ValueError(f"{name} {value!r} is unknown: choose {', '.join(allowed[:-1])} or {allowed[-1]}")
        elif value is not None and (refusal := allowed[1].refusal(value, allowed[0])):
            raise ValueError(f"{name} {value!r} must be {refusal}")


def check_flags(config: Any) -> None:
    """Raise UserError, starting with the field's flag, for a value that check_fields() refuses."""
    try:
        check_fields(config)
    except ValueError as error:
        name, _, refusal = str(error).partition(" ")
        raise UserError(f"--{name.replace('_', '-')} {refusal}") from None


def refuse_stopped(given: Collection[str], config: Any, stopped_by: Mapping[str, Callable[[Any], str | None]]) -> None:
    """Raise UserError for an option that has no effect because of another one.

    given: options set by the user; default values are always allowed. stopped_by: option -> function of config that
    returns the disabling option or None.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name, disabled_by in stopped_by.items():
        if name in given and getattr(config, name) != defaults[name] and (other := disabled_by(config)):
            now = str(getattr(config, other)).lower()
            raise UserError(f"{name} does nothing while {other} is {now}: omit it, or change {other}")


@cache
def _rules(cls: type) -> dict[str, Any]:
    """Field -> its Literal or Annotated type, inherited by classes that only change the default."""
    rules = {}
    for base in reversed(cls.__mro__):
        for name, kind in typing.get_type_hints(base, include_extras=True).items():
            for each in (kind, *typing.get_args(kind)):  # the type itself, or in a union with None
                if typing.get_origin(each) in (Literal, Annotated):
                    rules[name] = each
    return rules
