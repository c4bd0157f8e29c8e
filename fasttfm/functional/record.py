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


class _Kind(NamedTuple):
    """A type of tensor."""

    schema: str
    optional: bool = False
    dtypes: frozenset[torch.dtype] = REAL


_TENSORS: dict[Any, _Kind] = {
    Tensor: _Kind("Tensor"),
    Tensor | None: _Kind("Tensor?", optional=True),
    Overwritten: _Kind("Tensor(a!)"),
    Whole: _Kind("Tensor", dtypes=WHOLE),
    Whole | None: _Kind("Tensor?", optional=True, dtypes=WHOLE),
    Mask | None: _Kind("Tensor?", optional=True, dtypes=MASK),
}


class _Number(NamedTuple):
    """A type of what is no tensor."""

    schema: str
    words: str
    classes: tuple[type, ...]
    plain: frozenset[type] | None = None
    """The classes whose values a call may hold as they are; of others check() tells. None: all."""


_NONE = type(None)
_WHOLE_NUMBERS = (numbers.Integral, torch.SymInt)
NUMBERS: dict[Any, _Number] = {
    bool: _Number("bool", "True or False", (bool,), frozenset({bool})),
    int: _Number("int", "an int", _WHOLE_NUMBERS, frozenset({int})),
    int | None: _Number("int?", "an int or None", (*_WHOLE_NUMBERS, _NONE), frozenset({int, _NONE})),
    Size: _Number("SymInt", "an int", _WHOLE_NUMBERS, frozenset({int})),
    float: _Number("float", "a float", (numbers.Real, torch.SymFloat, torch.SymInt), frozenset({float, int})),
    str: _Number("str", "a string", (str,)),
    torch.dtype: _Number("ScalarType", "dtype", (torch.dtype,)),
    torch.dtype | None: _Number("ScalarType?", "dtype or None", (torch.dtype, _NONE)),
}


class Layout:
    """Order of the fields of a NamedTuple, and of those that it holds, one after the other."""

    def __init__(self, kind: type) -> None:
        self.fields = fields = list(_fields(kind))
        self._kinds: list[Any] = [(_TENSORS.get(field.type), NUMBERS.get(field.type)) for field in fields]
        self.positions = [i for i, (tensor, _) in enumerate(self._kinds) if tensor is not None]
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
        in_order = items([parts.index(i) for i in range(len(fields))])
        self.merge: Callable[[tuple, tuple], Any] = lambda tensors, others: build(in_order((*tensors, *others)))
        """The record from its tensors and what else it holds."""

    def present_tensors(self, types: Sequence[type], *, checked: bool) -> list[int] | None:
        """Return the places of the tensors that are not None among all fields, where fields of these types may be
        computed with as they are: plain tensors and, if checked, numbers; else None."""
        for type_, (tensor, number) in zip(types, self._kinds):
            if tensor is not None:
                plain = type_ in PLAIN_TENSORS or (tensor.optional and type_ is _NONE)
            else:
                plain = not checked or number.plain is None or type_ in number.plain
            if not plain:
                return None
        return [i for i in self.positions if types[i] is not _NONE]

    def reader(self, places: Sequence[int]) -> Callable[[Any], tuple]:
        """A function that reads these of all fields from a record, as a tuple."""
        return items([self.fields[i].path for i in places], attrgetter) if self.nested else items(places)

    def check(self, operator: str, values: tuple) -> None:
        """Raises, in one line, for the first of all fields that is not of its type, of another dtype than the schema
        means, or on another device than the first tensor: TypeError or ValueError."""
        first = values[self.positions[0]]
        for value, field, (kind, number) in zip(values, self.fields, self._kinds):
            if number is not None:
                _check_number(operator, field, number, value)
            elif value is not None or not kind.optional:
                _check_tensor(f"{operator}: {field.name}", value, kind)
                if value.device != first.device:
                    raise ValueError(
                        f"{operator}: {field.name} is on {value.device} and {self.fields[0].name} on {first.device}: "
                        "all tensors must be on one device"
                    )

    @property
    def schema(self) -> str:
        """The schema as torch writes it."""
        return ", ".join(f"{(_TENSORS | NUMBERS)[field.type].schema} {field.name}" for field in self.fields)


@functools.cache
def layout_of(kind: Any) -> Layout:
    """Made once for every kind of record."""
    return Layout(kind)


def _check_tensor(what: str, value: Any, kind: _Kind) -> None:
    if not isinstance(value, Tensor):
        alternative = " or None" if kind.optional else ""
        raise TypeError(f"{what} is {shown(value)}: a tensor{alternative} is needed")
    if value.dtype not in kind.dtypes:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in kind.dtypes)
        raise ValueError(f"{what} has dtype {value.dtype}: {', '.join(names[:-1])} or {names[-1]} is needed")
    if reason := unread(value):
        raise (ValueError if type(value) in PLAIN_TENSORS else TypeError)(f"{what} {reason}")


def _check_number(operator: str, field: _Field, number: _Number, value: Any) -> None:
    _, words, classes, plain = number
    if plain is not None and type(value) in plain and type(value) is not int:
        return
    if not isinstance(value, classes) or (isinstance(value, bool) and bool not in classes):
        raise TypeError(f"{operator}: {field.name} is {shown(value)}: {words} is needed")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{operator}: {field.name} is {value}: it must fit 64 bits")


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


def items(places: Sequence[Any], getter: Callable[..., Any] = itemgetter) -> Callable[[Any], tuple]:
    """A function that reads these items, or by attrgetter attributes, as a tuple."""
    read = getter(*places) if places else None
    if read is None or len(places) == 1:
        return lambda values: () if read is None else (read(values),)
    return read


def _builder(kind: Any) -> Callable[[Sequence[Any]], Any]:
    """A function that makes the record of all its fields, those of records that it holds in their place."""
    types = list(get_type_hints(kind, include_extras=True).values())
    inner = [
        (place, place + sum(1 for _ in _fields(type_)), _builder(type_))
        for place, type_ in enumerate(types)
        if _is_record(type_)
    ]
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
        if isinstance(value, tuple):
            values.extend(flat(value))
        else:
            values.append(value)
    return tuple(values)
