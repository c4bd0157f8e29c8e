"""Operator arguments as NamedTuples: their schema, their flat form and the checks of their types.

A record holds tensors, numbers and other records. Records are taken apart in every call of an operator, so attrgetter
and itemgetter do it, in C.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from fasttfm.functional.subclasses import PLAIN_TENSORS, unread

_new: Any = tuple.__new__  # a NamedTuple's own is three times as slow, and Python

Size = Annotated[int, "may be symbolic"]
"""An int that may be dynamic under torch.compile."""
Overwritten = Annotated[Tensor, "written to"]
"""A tensor that the operator mutates."""
Whole = Annotated[Tensor, "whole numbers"]
Mask = Annotated[Tensor, "bool, or floats to add"]

REAL = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
"""Dtypes of a field annotated as a plain Tensor."""
WHOLE = frozenset({torch.int32, torch.int64})
MASK = REAL | {torch.bool}
_NONE = type(None)


class _Type(NamedTuple):
    """Values allowed in a field of one annotated type."""

    schema: str
    words: str
    """Description for error messages."""
    classes: tuple[type, ...]
    plain: frozenset[type] | None = None
    """Exact classes that need no check before planning; None for any class."""
    dtypes: frozenset[torch.dtype] | None = None
    """Allowed dtypes of a tensor; None for a number."""


def _tensor(schema: str, dtypes: frozenset[torch.dtype] = REAL) -> _Type:
    if schema != "Tensor?":
        return _Type(schema, "a tensor", (Tensor,), PLAIN_TENSORS, dtypes)
    return _Type(schema, "a tensor or None", (Tensor, _NONE), PLAIN_TENSORS | {_NONE}, dtypes)


_INTEGERS = (numbers.Integral, torch.SymInt)
TYPES: dict[Any, _Type] = {
    Tensor: _tensor("Tensor"),
    Tensor | None: _tensor("Tensor?"),
    Overwritten: _tensor("Tensor(a!)"),
    Whole: _tensor("Tensor", WHOLE),
    Whole | None: _tensor("Tensor?", WHOLE),
    Mask | None: _tensor("Tensor?", MASK),
    bool: _Type("bool", "True or False", (bool,), frozenset({bool})),
    int: _Type("int", "an int", _INTEGERS, frozenset({int})),
    int | None: _Type("int?", "an int or None", (*_INTEGERS, _NONE), frozenset({int, _NONE})),
    Size: _Type("SymInt", "an int", _INTEGERS, frozenset({int})),
    float: _Type("float", "a float", (numbers.Real, torch.SymFloat, torch.SymInt), frozenset({float, int})),
    str: _Type("str", "a string", (str,)),
    torch.dtype: _Type("ScalarType", "dtype", (torch.dtype,)),
    torch.dtype | None: _Type("ScalarType?", "dtype or None", (torch.dtype, _NONE)),
}
_OTHER = _Type("", "", (object,))
"""A field that is saved for the backward pass but is in no schema."""


class Layout:
    """Flat layout of a record type: its fields in order, nested records expanded in place."""

    def __init__(self, kind: type) -> None:
        self.fields = fields = list(_fields(kind))
        self.types = [TYPES.get(field.type, _OTHER) for field in fields]
        self.schema = ", ".join(f"{type_.schema} {field.name}" for type_, field in zip(self.types, fields))
        """Argument list in torch's schema language."""
        self.positions = [i for i, type_ in enumerate(self.types) if type_.dtypes is not None]
        """Indices of the tensor fields."""
        self.names = [fields[i].name for i in self.positions]
        self.count = len(self.names)
        others = [i for i in range(len(fields)) if i not in self.positions]
        self.nested = any("." in field.path for field in fields)
        """Whether the record holds records; if not, a plain tuple of its fields reads like it."""
        self.flat: Callable[[Any], tuple] = self.reader(range(len(fields))) if self.nested else tuple
        self.tensors, self.others = self.reader(self.positions), self.reader(others)
        """Read the tensor fields of a record, and all other fields."""
        self.build = build = _builder(kind)
        """Builds a record from its flat fields."""
        parts = [*self.positions, *others]
        self.in_order = in_order = items([parts.index(i) for i in range(len(fields))])
        """Puts (*tensors, *others) into the order of the flat fields."""
        self.merge: Callable[[tuple, tuple], Any] = lambda tensors, others: build(in_order((*tensors, *others)))
        """Builds a record from its tensors and its other fields."""

    def reader(self, places: Sequence[int]) -> Callable[[Any], tuple]:
        """Return a function that reads the flat fields at these places from a record, as a tuple."""
        if not self.nested:
            return items(places)
        paths = [self.fields[i].path for i in places]
        return attrgetter(*paths) if len(paths) > 1 else lambda record: tuple([attrgetter(p)(record) for p in paths])

    def check(self, operator: str, values: tuple) -> None:
        """Check the type, dtype and device of each flat field; the first tensor's device is the reference.

        Raises TypeError or ValueError, in one line that names the first wrong field.
        """
        first = values[self.positions[0]]
        for value, field, (_, words, classes, plain, dtypes) in zip(values, self.fields, self.types):
            what, kind = f"{operator}: {field.name}", type(value)
            if dtypes is None and plain is not None and kind in plain and kind not in (int, float):
                continue
            if not issubclass(kind, classes) or (kind is bool and bool not in classes):
                raise TypeError(f"{what} is {shown(value)}: {words} is needed")
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"{what} is {value}: it must fit 64 bits")
            if isinstance(value, numbers.Real) and not math.isfinite(value):
                raise ValueError(f"{what} is {value}: a finite number is needed")
            if dtypes is None or value is None:
                continue
            if value.dtype not in dtypes:
                names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise ValueError(f"{what} has dtype {value.dtype}: {', '.join(names[:-1])} or {names[-1]} is needed")
            if reason := unread(value):
                raise (ValueError if kind in PLAIN_TENSORS else TypeError)(f"{what} {reason}")
            if value.device != first.device:
                raise ValueError(
                    f"{what} is on {value.device} and {self.fields[0].name} on {first.device}: "
                    "all tensors must be on one device"
                )


layout_of = functools.cache(Layout)
"""Cached layout of a record type."""


def shown(value: Any) -> str:
    """A wrong value as an error message shows it, in one line."""
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {tuple(value.shape)}"
    text = repr(value) if isinstance(value, str | int | float | complex | bool | None) else f"a {type(value).__name__}"
    return text if len(text) < 60 else f"a {type(value).__name__}"


def _is_record(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, tuple)


class _Field(NamedTuple):
    name: str
    type: Any
    path: str
    """Attribute path in the record, such as dropout.seed."""


def _fields(kind: type, path: str = "") -> Iterator[_Field]:
    for name, type_ in get_type_hints(kind, include_extras=True).items():
        if _is_record(type_):
            yield from _fields(type_, f"{path}{name}.")
        else:
            yield _Field(name, type_, f"{path}{name}")


def items(places: Sequence[int]) -> Callable[[Any], tuple]:
    """itemgetter() that always returns a tuple, for no place or one as well."""
    first = places[0] if places else 0
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(first, first + len(places)))


def _builder(kind: Any) -> Callable[[Sequence[Any]], Any]:
    """Return a function that builds a record from its flat fields."""
    types = enumerate(get_type_hints(kind, include_extras=True).values())
    inner = [(n, n + sum(1 for _ in _fields(type_)), _builder(type_)) for n, type_ in types if _is_record(type_)]
    if not inner:
        return functools.partial(_new, kind)

    def build(values: Sequence[Any]) -> Any:
        values = list(values)
        for start, stop, built in inner:  # in order: each replacement moves the fields behind it to their places
            values[start:stop] = (built(values[start:stop]),)
        return _new(kind, values)

    return build


def flat(call: tuple) -> tuple:
    """Flatten a record; plain Python, because torch.compile traces it."""
    values: list[Any] = []
    for value in call:
        values += flat(value) if isinstance(value, tuple) else [value]
    return tuple(values)
