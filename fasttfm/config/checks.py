"""Checks that several sections make of their fields: each raises ValueError, whose message begins with the field."""

import math
import typing
from functools import cache
from typing import Any, Literal

MOST_LAYERS = 10_000
"""Of a stack: a file that tells of more is damaged, and to build a thousand million of them takes hours."""
MOST_WIDTH = 1_000_000
"""Of a layer: the square of a larger number is the size of no tensor."""


def require_choices(config: Any) -> None:
    """Every field of a Literal type has one of its values."""
    cls: type = type(config)
    for name, allowed in _choices(cls).items():
        value = getattr(config, name)
        if value not in allowed:
            choices = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
            raise ValueError(f"{name} {value!r} is unknown: choose {choices}")


def require_whole(config: Any, least: int, *names: str, most: float = math.inf) -> None:
    """Each of these fields is None or a whole number of at least `least` and at most `most`."""
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} {value!r} must be a whole number of at least {least}")
        if value > most:
            raise ValueError(f"{name} {value!r} must be at most {most:,}")


def require_finite(config: Any, *names: str) -> None:
    """Each of these fields is a finite number of at least 0."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} {value!r} must be a finite number of at least 0")


def require_positive(config: Any, *names: str) -> None:
    """Each of these fields is a finite number above 0."""
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{name} {value!r} must be a finite number greater than 0")


@cache
def _choices(cls: type) -> dict[str, tuple[str, ...]]:
    kinds = typing.get_type_hints(cls).items()
    return {name: typing.get_args(kind) for name, kind in kinds if typing.get_origin(kind) is Literal}
