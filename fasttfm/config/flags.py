"""Command-line flags for the configuration, with names, help and types from the dataclasses."""

import argparse
import dataclasses
import typing
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from fasttfm.config.convert import convert
from fasttfm.config.fields import FROM_DATA, TRANSFORMER, all_fields, field_help, field_types, flag_name, sections_of


def add_flags(
    parser: argparse.ArgumentParser, sections: Iterable[str] | None = None, *, kind: str = TRANSFORMER
) -> None:
    """Add a flag for each field of `sections` (default: all of the kind), with its docstring as help.

    No flag is required or has a default. With all sections, validation and decoding settings form one group.
    """
    groups: dict[str, Any] = {}

    def group_of(section: str, name: str) -> Any:
        validates = sections is None and (section == "decoding" or name.startswith("valid_"))
        title = "validation settings" if validates else f"{section} settings"
        if title not in groups:
            about = _OF_VALIDATION if validates and "decoding" in sections_of(kind) else None
            groups[title] = parser.add_argument_group(title, about)
        return groups[title]

    for section in sections_of(kind) if sections is None else sections:
        cls = sections_of(kind)[section]
        for name in field_types(cls):
            if name not in FROM_DATA:
                add_field_flags(group_of(section, name), cls, [name])


_OF_VALIDATION = "Settings for translating the validation set, and the defaults of fasttfm translate for this model."


def add_field_flags(group: Any, cls: type, names: Iterable[str], prefix: str = "") -> None:
    """Add flags for some fields of a dataclass to a parser or argument group. prefix: of the flag names."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for name in names:
        kind, flag = field_types(cls)[name], flag_name(prefix + name)
        sentence = f"{field_help(cls).get(name, '')} (default: {written(defaults[name])})".replace("%", "%%")
        form: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if kind is not bool:
            form = {"type": partial(convert, kind=kind, where=flag), "metavar": _placeholder(kind)}
        group.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=sentence, **form)


def field_values(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The fields set on the command line."""
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def flag_values(
    args: argparse.Namespace, sections: Iterable[str] | None = None, *, kind: str = TRANSFORMER
) -> dict[str, Any]:
    """The fields of `sections` (default: all of the kind) set on the command line."""
    selected = tuple(sections_of(kind) if sections is None else sections)
    return field_values(args, [name for name, section in all_fields(kind).items() if section in selected])


def _placeholder(kind: Any) -> str:
    """The metavar for values of a type."""
    if typing.get_origin(kind) is Literal:
        return "|".join(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return ",".join("…" if each is ... else _placeholder(each) for each in typing.get_args(kind))
    names = {int: "N", float: "X", str: "TEXT"}
    return names.get(kind) or names[next(option for option in typing.get_args(kind) if option in names)]


def written(value: Any) -> str:
    """A field's value as written on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
