"""Converts values from YAML, the command line and Python to a field's type, with the same rules for all.

Numbers follow JSON, plus a leading + and a bare decimal point. Text that only Python or only YAML 1.1 reads as a number
is refused as ambiguous: 1_0 (ten), 010 (ten or eight), 1:30 (ninety).
"""

import math
import types
import typing
from typing import Any, Literal

from fasttfm.errors import UserError
from fasttfm.system.parsing import NUMBER, WHOLE_NUMBER, shown

_TRUTH = {"true": True, "false": False}
_RULES = {
    bool: "true or false",
    int: "an integer below 2^63, such as 64 or 1e5",
    float: "a number such as 0.1 or 5e-4",
    str: "a string",
}


def convert(value: Any, kind: Any, where: str) -> Any:
    """Convert `value` to type `kind`; UserError, starting with `where`, if that is not possible."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        (kind,) = [option for option in options if option is not types.NoneType]
        return convert(value, kind, where)
    plain = not isinstance(value, (list, dict, set))  # str() of one may be huge
    if typing.get_origin(kind) is Literal:
        if plain and str(value) in options:
            return str(value)
        raise UserError(f"{where}: {shown(value)} must be one of {', '.join(map(str, options))}")
    if typing.get_origin(kind) is tuple:
        items = _items(value, any_number=options[-1] is ...) if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or (options[-1] is not ... and len(items) != len(options)):
            raise UserError(f"{where}: {shown(value)} must be {len(options)} values such as 0.9,0.98")
        kinds = [options[0]] * len(items) if options[-1] is ... else options
        return tuple(convert(item, kind, where) for item, kind in zip(items, kinds, strict=True))
    try:
        if kind is bool and plain:
            return _TRUTH[str(value).lower()]
        if kind is int:
            return to_int(value)
        if kind is float:
            return to_float(value)
        if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return str(value)
    except (KeyError, TypeError, ValueError):
        pass
    raise UserError(f"{where}: {shown(value)} must be {_RULES.get(kind, kind)}")


def _items(text: str, *, any_number: bool) -> list[str]:
    """Split the text of a tuple. any_number: of strings, which may begin with a bracket; none is the empty tuple."""
    if not any_number:
        return text.strip("()[] ").split(",")
    return [] if text.strip().lower() in ("", "none") else [item.strip() for item in text.split(",")]


def to_int(value: Any) -> int:
    """An integer, including 1e5 and 64.0; ValueError or TypeError for anything else."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if WHOLE_NUMBER.fullmatch(text) else to_float(text)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{value} is not an integer")
    number = int(value)
    if abs(number) >= 1 << 63:
        raise ValueError(f"{number} has more than 64 bits")
    return number


def to_float(value: Any) -> float:
    """A finite number; ValueError or TypeError for anything else."""
    if isinstance(value, bool) or (isinstance(value, str) and not NUMBER.fullmatch(value.strip())):
        raise ValueError(f"{value!r} is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    return number
