"""Records, which are NamedTuples of tensors, numbers and other records, as the flat arguments of a torch operator.

What takes records apart runs in every call of an operator, so it is done by attrgetter and itemgetter, in C.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from fasttfm.functional.subclasses import PLAIN_TENSORS, unread

_new: Any = tuple.__new__  # a NamedTuple's own is three times as slow, and Python

Size = Annotated[int, "may be symbolic"]
"""A number that torch.compile may leave open."""
Overwritten = Annotated[Tensor, "written to"]
"""A tensor that the operator writes to."""
Whole = Annotated[Tensor, "whole numbers"]
Mask = Annotated[Tensor, "bool, or floats to add"]

REAL = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
"""The dtypes of a tensor of which nothing else is said."""
WHOLE = frozenset({torch.int32, torch.int64})
MASK = REAL | {torch.bool}
_NONE = type(None)


class _Type(NamedTuple):
    """Values that a field of this type may hold."""

    schema: str
    words: str
    """For errors."""
    classes: tuple[type, ...]
    plain: frozenset[type] | None = None
    """Classes whose values a plan may read as they are, None for all; of others check() tells."""
    dtypes: frozenset[torch.dtype] | None = None
    """Of a tensor; None for a number."""


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
"""Of what is only saved, and in no schema."""


class Layout:
    """Order of the fields of a NamedTuple, and of those that it holds, one after the other."""

    def __init__(self, kind: type) -> None:
        self.fields = fields = list(_fields(kind))
        self.types = [TYPES.get(field.type, _OTHER) for field in fields]
        self.schema = ", ".join(f"{type_.schema} {field.name}" for type_, field in zip(self.types, fields))
        """As torch writes it."""
        self.positions = [i for i, type_ in enumerate(self.types) if type_.dtypes is not None]
        """Of the tensors among all fields."""
        self.names = [fields[i].name for i in self.positions]
        """Of the tensors."""
        self.count = len(self.names)
        others = [i for i in range(len(fields)) if i not in self.positions]
        self.nested = any("." in field.path for field in fields)
        """Whether the record holds records; where it does not, a plain tuple of its fields reads like it."""
        self.flat: Callable[[Any], tuple] = self.reader(range(len(fields))) if self.nested else tuple
        """All fields of a record, one after the other."""
        self.tensors = self.reader(self.positions)
        """The tensors of a record."""
        self.others = self.reader(others)
        """What else a record holds."""
        self.build = build = _builder(kind)
        """The record from all its fields, one after the other."""
        parts = [*self.positions, *others]
        self.in_order = in_order = items([parts.index(i) for i in range(len(fields))])
        """All fields from the tensors and what else a record holds."""
        self.merge: Callable[[tuple, tuple], Any] = lambda tensors, others: build(in_order((*tensors, *others)))
        """The record from its tensors and what else it holds."""

    def reader(self, places: Sequence[int]) -> Callable[[Any], tuple]:
        """A function that reads these of all fields from a record, as a tuple."""
        if not self.nested:
            return items(places)
        paths = [self.fields[i].path for i in places]
        return attrgetter(*paths) if len(paths) > 1 else lambda record: tuple([attrgetter(p)(record) for p in paths])

    def check(self, operator: str, values: tuple) -> None:
        """Raises, in one line, for the first of all fields that is not of its type, of another dtype than the schema
        means, or on another device than the first tensor: TypeError or ValueError."""
        first = values[self.positions[0]]
        for value, field, (_, words, classes, plain, dtypes) in zip(values, self.fields, self.types):
            what, kind = f"{operator}: {field.name}", type(value)
            if dtypes is None and plain is not None and kind in plain and kind is not int:
                continue
            if not issubclass(kind, classes) or (kind is bool and bool not in classes):
                raise TypeError(f"{what} is {shown(value)}: {words} is needed")
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"{what} is {value}: it must fit 64 bits")
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
"""Made once for every kind of record."""


def shown(value: Any) -> str:
    """A wrong value in an error, in one line."""
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
    """dropout.seed: where in the record it is."""


def _fields(kind: type, path: str = "") -> Iterator[_Field]:
    """Every field, those of nested records in their place."""
    for name, type_ in get_type_hints(kind, include_extras=True).items():
        if _is_record(type_):
            yield from _fields(type_, f"{path}{name}.")
        else:
            yield _Field(name, type_, f"{path}{name}")


def items(places: Sequence[int]) -> Callable[[Any], tuple]:
    """A function that reads these items of a tuple, as a tuple."""
    first = places[0] if places else 0
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(first, first + len(places)))


def _builder(kind: Any) -> Callable[[Sequence[Any]], Any]:
    """A function that makes the record of all its fields, those of records that it holds in their place."""
    types = enumerate(get_type_hints(kind, include_extras=True).values())
    inner = [(n, n + sum(1 for _ in _fields(type_)), _builder(type_)) for n, type_ in types if _is_record(type_)]
    if not inner:
        return functools.partial(_new, kind)

    def build(values: Sequence[Any]) -> Any:
        values = list(values)
        for start, stop, built in inner:  # from the first: what stands behind it moves to the place in its record
            values[start:stop] = (built(values[start:stop]),)
        return _new(kind, values)

    return build


def flat(call: tuple) -> tuple:
    """The fields of a record and of those that it holds; torch.compile reads this, so it is plain."""
    values: list[Any] = []
    for value in call:
        values += flat(value) if isinstance(value, tuple) else [value]
    return tuple(values)
