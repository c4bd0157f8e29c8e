"""Records, which are NamedTuples of tensors, numbers and other records, as the flat arguments of a torch operator.

What takes records apart and puts them together runs in every call of an operator, so it is compiled once a kind of
record, from the expression that one would write for it by hand.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

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
    dtypes: str = "REAL"


_TENSORS: dict[Any, _Kind] = {
    Tensor: _Kind("Tensor"),
    Tensor | None: _Kind("Tensor?", optional=True),
    Overwritten: _Kind("Tensor(a!)"),
    Whole: _Kind("Tensor", dtypes="WHOLE"),
    Whole | None: _Kind("Tensor?", optional=True, dtypes="WHOLE"),
    Mask | None: _Kind("Tensor?", optional=True, dtypes="MASK"),
}
_SCHEMA_TYPES: dict[Any, str] = {
    **{type_: kind.schema for type_, kind in _TENSORS.items()},
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
    """Order of the fields of a NamedTuple, and of those that it holds, one after the other."""

    def __init__(self, kind: type) -> None:
        fields = list(_fields(kind))
        numbers = range(len(fields))
        self.positions = [i for i in numbers if _is_tensor(fields[i].type)]
        """Of the tensors among all fields."""
        self.names = [fields[i].name for i in self.positions]
        """Of the tensors."""
        self.fields = fields
        others = [i for i in numbers if i not in self.positions]
        tensors_in, others_in = (_tuple([f"r{fields[i].path}" for i in part]) for part in (self.positions, others))
        from_parts = {i: f"t[{n}]" for n, i in enumerate(self.positions)} | {i: f"o[{n}]" for n, i in enumerate(others)}
        self.parted: Callable[[Any], tuple[tuple, tuple]] = _compiled(f"lambda r: ({tensors_in}, {others_in})")
        """The tensors of a record and what else it holds."""
        self.merge: Callable[[tuple, tuple], Any] = _builder(kind, "t, o", [from_parts[i] for i in numbers])
        """The record from what parted() gave."""
        self.build: Callable[[tuple], Any] = _builder(kind, "a", [f"a[{i}]" for i in numbers])
        """The record from all its fields, one after the other."""

    def in_a_call(self, kind: Any, *, checked: bool) -> dict[str, str]:
        """Python of a function that has the fields of the record as parameters.

        fields: their names; first: that of the first one; plain: whether every tensor is plain memory and, if checked,
        every field as check() wants it, devices and numbers apart; on_cpu, on_gpu: whether every tensor is there; then
        follow gradient: whether one of them requires a gradient, and tensors: all of them; tensors_cast: those of
        _call.
        """
        names = list(get_type_hints(kind))
        tensors, plain, gradient, on_cpu, on_gpu = [], [], [], [], []
        for number, field in enumerate(self.fields[i] for i in self.positions):
            index, _, inner = field.path[1:].partition("]")
            read = name = names[int(index)]
            if inner:
                name = f"_tensor{number}"
                read = f"({name} := {read}{inner})"
            _, optional, dtypes = _TENSORS[field.type]
            kind_of = f"type({name})" if optional else f"type({read})"
            check = f"((_type := {kind_of}) is Tensor or _type is Parameter) and not {name}.is_neg()"
            if checked:
                check += f" and {name}.dtype in {dtypes}"
            elif not inner:  # a gradient: is_grads_batched=True gives tensors without memory, for all outputs at once
                check += f" and _has_storage({name})"
            there = f"{name} is None or " if optional else ""
            plain.append(f"({read} is None or {check})" if optional else check)
            gradient.append(f"({name} is not None and {name}.requires_grad)" if optional else f"{name}.requires_grad")
            on_cpu.append(f"({there}{name}.is_cpu)")
            on_gpu.append(f"({there}{name}.get_device() == _device)")
            tensors.append(name)
        for field in self.fields if checked else ():
            index, _, inner = field.path[1:].partition("]")
            if field.type in _PLAIN and field.name != "route":
                plain.append(_PLAIN[field.type].format(f"{names[int(index)]}{inner}"))
        return {
            "on_cpu": " and ".join(on_cpu),
            "on_gpu": " and ".join(on_gpu),
            "fields": ", ".join(names),
            "first": names[0],
            "plain": " and ".join(plain),
            "gradient": " or ".join(gradient),
            "tensors": ", ".join(tensors),
            "tensors_cast": ", ".join(f"_call{self.fields[i].path}" for i in self.positions),
        }

    def check(self, operator: str, values: tuple) -> None:
        """Raises, in one line, for the first of all fields that is not of its type, of another dtype than the schema
        means, or on another device than the first tensor: TypeError or ValueError."""
        first = next(value for value, field in zip(values, self.fields) if field.type in _TENSORS)
        for value, field in zip(values, self.fields):
            kind = _TENSORS.get(field.type)
            if kind is None:
                _check_number(operator, field, value)
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
        return ", ".join(f"{_SCHEMA_TYPES[field.type]} {field.name}" for field in self.fields)


@functools.cache
def layout_of(kind: Any) -> Layout:
    """Made once for every kind of record."""
    return Layout(kind)


def _check_tensor(what: str, value: Any, kind: _Kind) -> None:
    if not isinstance(value, Tensor):
        alternative = " or None" if kind.optional else ""
        raise TypeError(f"{what} is {shown(value)}: a tensor{alternative} is needed")
    allowed = globals()[kind.dtypes]
    if value.dtype not in allowed:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"{what} has dtype {value.dtype}: {', '.join(names[:-1])} or {names[-1]} is needed")
    if value.layout is not torch.strided:
        raise ValueError(f"{what} has layout {value.layout}: a strided tensor is needed")


_PLAIN: dict[Any, str] = {
    bool: "type({0}) is bool",
    int: "type({0}) is int",
    Size: "type({0}) is int",
    int | None: "({0} is None or type({0}) is int)",
    float: "(type({0}) is float or type({0}) is int)",
}
"""Python that tells the numbers that a call may hold as they are; of others check() tells."""
_WHOLE_NUMBERS = (numbers.Integral, torch.SymInt)
_NUMBERS: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("True or False", (bool,)),
    int: ("an int", _WHOLE_NUMBERS),
    int | None: ("an int or None", (*_WHOLE_NUMBERS, type(None))),
    Size: ("an int", _WHOLE_NUMBERS),
    float: ("a float", (numbers.Real, torch.SymFloat, torch.SymInt)),
    str: ("a string", (str,)),
}
"""What a field of this type must be, in words, and the classes that are."""


def _check_number(operator: str, field: _Field, value: Any) -> None:
    words, kinds = _NUMBERS.get(field.type, ("", (object,)))
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds and object not in kinds):
        raise TypeError(f"{operator}: {field.name} is {shown(value)}: {words} is needed")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{operator}: {field.name} is {value}: it must fit 64 bits")


def shown(value: Any) -> str:
    """A wrong value in an error, in one line."""
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {tuple(value.shape)}"
    text = repr(value) if isinstance(value, str | int | float | complex | bool | None) else f"a {type(value).__name__}"
    return text if len(text) < 60 else f"a {type(value).__name__}"


def _is_tensor(type_: Any) -> bool:
    return type_ in _TENSORS


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
