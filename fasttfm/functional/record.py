"""Records, which are NamedTuples of tensors, numbers and other records, as the flat arguments of a torch operator."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_type_hints

import torch
from torch import Tensor

Size = Annotated[int, "may be symbolic"]
"""A number that torch.compile may leave open."""
Overwritten = Annotated[Tensor, "written to"]
"""A tensor that the operator writes to."""
_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Overwritten: "Tensor(a!)",
    bool: "bool",
    int: "int",
    int | None: "int?",
    Size: "SymInt",
    float: "float",
    str: "str",
    torch.dtype: "ScalarType",
    torch.dtype | None: "ScalarType?",
}


class Layout:
    """How the fields of a NamedTuple, and of those that it holds, lie one after the other."""

    def __init__(self, kind: type) -> None:
        fields = list(_fields(kind))
        paths = [path for path, _ in fields]
        tensors = [path for path, type_ in fields if _is_tensor(type_)]
        others = [path for path, type_ in fields if not _is_tensor(type_)]
        self.names = [path.rpartition(".")[2] for path in tensors]
        """Of the tensors."""
        self.places = [paths.index(path) for path in tensors]
        self.tensors, self.others = _getter(tensors), _getter(others)
        self._order = [(tensors + others).index(path) for path in paths]
        self._build = _builder(kind)
        self._kind, self._fields = kind, fields

    @property
    def schema(self) -> str:
        return ", ".join(f"{_SCHEMA_TYPES[type_]} {path.rpartition('.')[2]}" for path, type_ in self._fields)

    def build(self, args: tuple) -> Any:
        """The NamedTuple from its fields."""
        return self._build(iter(args))

    def merge(self, tensors: tuple, others: tuple) -> Any:
        """The NamedTuple from what tensors() and others() gave."""
        values = tensors + others
        return self._build(iter([values[i] for i in self._order]))


@functools.cache
def layout_of(kind: Any) -> Layout:
    """Made once for every kind of record."""
    return Layout(kind)


def _is_tensor(type_: Any) -> bool:
    return type_ in (Tensor, Tensor | None, Overwritten)


def _is_record(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, tuple)


def _fields(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and the type of every field, those of nested records in their place."""
    for name, type_ in get_type_hints(kind, include_extras=True).items():
        if _is_record(type_):
            yield from _fields(type_, f"{prefix}{name}.")
        else:
            yield prefix + name, type_


def _getter(paths: list[str]) -> Callable[[Any], tuple]:
    if not paths:
        return lambda call: ()
    get: Any = operator.attrgetter(*paths)
    return get if len(paths) > 1 else lambda call: (get(call),)


def _builder(kind: Any) -> Callable[[Iterator], Any]:
    """Takes what a record needs from an iterator over its fields."""
    inner = [_builder(type_) if _is_record(type_) else None for type_ in get_type_hints(kind).values()]
    if not any(inner):
        count = len(inner)
        return lambda values: kind._make(itertools.islice(values, count))
    return lambda values: kind._make([next(values) if build is None else build(values) for build in inner])


def flat(call: tuple) -> tuple:
    """The fields of a record and of those that it holds; torch.compile reads this, so it is plain."""
    values: list[Any] = []
    for value in call:
        if isinstance(value, tuple):
            values.extend(flat(value))
        else:
            values.append(value)
    return tuple(values)
