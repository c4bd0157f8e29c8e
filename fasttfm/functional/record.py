"""Records, which are NamedTuples of tensors, numbers and other records, as the flat arguments of a torch operator.

What takes records apart and puts them together runs in every call of an operator, so it is compiled once a kind of
record, from the expression that one would write for it by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, get_type_hints

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
        numbers = range(len(fields))
        self.positions = [i for i in numbers if _is_tensor(fields[i].type)]
        """Of the tensors among all fields."""
        self.names = [fields[i].name for i in self.positions]
        """Of the tensors."""
        self._fields = fields
        others = [i for i in numbers if i not in self.positions]
        tensors_in, others_in = (_tuple([f"r{fields[i].path}" for i in part]) for part in (self.positions, others))
        from_parts = {i: f"t[{n}]" for n, i in enumerate(self.positions)} | {i: f"o[{n}]" for n, i in enumerate(others)}
        self.parted: Callable[[Any], tuple[tuple, tuple]] = _compiled(f"lambda r: ({tensors_in}, {others_in})")
        """The tensors of a record and what else it holds."""
        self.merge: Callable[[tuple, tuple], Any] = _builder(kind, "t, o", [from_parts[i] for i in numbers])
        """The record from what parted() gave."""
        self.build: Callable[[tuple], Any] = _builder(kind, "a", [f"a[{i}]" for i in numbers])
        """The record from all its fields, one after the other."""

    def in_a_call(self, kind: Any) -> dict[str, str]:
        """Python of a function that has the fields of the record as parameters.

        fields: their names; first: that of the first one; plain: whether every tensor is plain memory; then follow
        gradient: whether one of them requires a gradient, and tensors: all of them; tensors_cast: those of _call.
        """
        names = list(get_type_hints(kind))
        tensors, plain, gradient = [], [], []
        for number, field in enumerate(self._fields[i] for i in self.positions):
            index, _, inner = field.path[1:].partition("]")
            read = name = names[int(index)]
            if inner:
                name = f"_tensor{number}"
                read = f"({name} := {read}{inner})"
            optional = field.type == Tensor | None
            kind_of = f"type({name})" if optional else f"type({read})"
            check = f"((_type := {kind_of}) is Tensor or _type is Parameter) and not {name}.is_neg()"
            plain.append(f"({read} is None or {check})" if optional else check)
            gradient.append(f"({name} is not None and {name}.requires_grad)" if optional else f"{name}.requires_grad")
            tensors.append(name)
        return {
            "fields": ", ".join(names),
            "first": names[0],
            "plain": " and ".join(plain),
            "gradient": " or ".join(gradient),
            "tensors": ", ".join(tensors),
            "tensors_cast": ", ".join(f"_call{self._fields[i].path}" for i in self.positions),
        }

    @property
    def schema(self) -> str:
        """As torch writes it."""
        return ", ".join(f"{_SCHEMA_TYPES[field.type]} {field.name}" for field in self._fields)


@functools.cache
def layout_of(kind: Any) -> Layout:
    """Made once for every kind of record."""
    return Layout(kind)


def _is_tensor(type_: Any) -> bool:
    return type_ in (Tensor, Tensor | None, Overwritten)


def _is_record(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, tuple)


class _Field(NamedTuple):
    name: str
    type: Any
    path: str
    """[1][0]: where in the record it is."""


def _fields(kind: type, path: str = "") -> Iterator[_Field]:
    """Every field, those of nested records in their place."""
    for i, (name, type_) in enumerate(get_type_hints(kind, include_extras=True).items()):
        if _is_record(type_):
            yield from _fields(type_, f"{path}[{i}]")
        else:
            yield _Field(name, type_, f"{path}[{i}]")


def _tuple(values: list[str]) -> str:
    return f"({''.join(f'{value}, ' for value in values)})"


def _compiled(source: str, names: dict[str, Any] | None = None) -> Any:
    return eval(source, names or {})


def _builder(kind: type, parameters: str, values: list[str]) -> Any:
    """A function that makes the record of these values, which are expressions in the parameters."""
    names: dict[str, Any] = {"new": tuple.__new__}
    left = iter(values)

    def expression(kind: type) -> str:
        name = f"record{len(names)}"
        names[name] = kind
        types = get_type_hints(kind).values()
        return f"new({name}, {_tuple([expression(t) if _is_record(t) else next(left) for t in types])})"

    return _compiled(f"lambda {parameters}: {expression(kind)}", names)


def flat(call: tuple) -> tuple:
    """The fields of a record and of those that it holds; torch.compile reads this, so it is plain."""
    values: list[Any] = []
    for value in call:
        if isinstance(value, tuple):
            values.extend(flat(value))
        else:
            values.append(value)
    return tuple(values)
