"""Types of fields that say which numbers are allowed, and the check of a whole section: `heads: Count = 8`."""

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
    """The numbers that a field may have, besides None where its type has it."""

    least: float = 0
    most: float = math.inf
    above: bool = False
    """Whether `least` itself is refused."""
    below: bool = False
    """Whether `most` itself is refused."""

    def refusal(self, value: Any, kind: type) -> str:
        """Say what a value must be, where it is something else; '' for one that is allowed."""
        if kind is int and (type(value) is not int or value < self.least):
            return f"a whole number of at least {self.least}"
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
"""Of dropout, smoothing or decay: 1 would leave nothing."""
Layers = Annotated[int, Range(1, 10_000)]
"""Of a stack: a file that tells of more is damaged, and to build a thousand million of them takes hours."""
Width = Annotated[int, Range(1, 1_000_000)]
"""Of a layer: the square of a larger number is the size of no tensor."""
Seed = Annotated[int, Range(0, (1 << 63) - 1)]


def check_fields(config: Any) -> None:
    """Raise ValueError, which begins with the field, for a value that the field's type does not allow."""
    cls: type = type(config)
    for name, rule in _rules(cls).items():
        value, allowed = getattr(config, name), typing.get_args(rule)
        if typing.get_origin(rule) is Literal:
            if value not in allowed:
                raise ValueError(f"{name} {value!r} is unknown: choose {', '.join(allowed[:-1])} or {allowed[-1]}")
        elif value is not None and (refusal := allowed[1].refusal(value, allowed[0])):
            raise ValueError(f"{name} {value!r} must be {refusal}")


def check_flags(config: Any) -> None:
    """Raise UserError, which begins with the field's flag, for a value that check_fields() refuses."""
    try:
        check_fields(config)
    except ValueError as error:
        name, _, refusal = str(error).partition(" ")
        raise UserError(f"--{name.replace('_', '-')} {refusal}") from None


def refuse_stopped(given: Collection[str], config: Any, stopped_by: Mapping[str, Callable[[Any], str | None]]) -> None:
    """Raise UserError for a setting among those given that another one of config leaves without effect.

    stopped_by: setting -> function of config that names that other one, or None. A default may always be given.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name, named in stopped_by.items():
        if name in given and getattr(config, name) != defaults[name] and (other := named(config)):
            now = str(getattr(config, other)).lower()
            raise UserError(f"{name} does nothing while {other} is {now}: leave it out, or change {other}")


@cache
def _rules(cls: type) -> dict[str, Any]:
    """Field -> its Literal or Annotated type; a class that gives a field another default keeps its base's."""
    rules = {}
    for base in reversed(cls.__mro__):
        for name, kind in typing.get_type_hints(base, include_extras=True).items():
            for each in (kind, *typing.get_args(kind)):  # the type itself, or beside None
                if typing.get_origin(each) in (Literal, Annotated):
                    rules[name] = each
    return rules
