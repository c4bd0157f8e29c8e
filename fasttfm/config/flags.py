"""One command-line flag for every field of the configuration: names, help and types are those of the dataclasses."""

import argparse
import dataclasses
import typing
from collections.abc import Iterable
from typing import Any, Literal

from fasttfm.config.convert import convert
from fasttfm.config.fields import FROM_DATA, TRANSFORMER, all_fields, field_help, field_types, flag_name, sections_of


def add_flags(
    parser: argparse.ArgumentParser, sections: Iterable[str] | None = None, *, kind: str = TRANSFORMER
) -> None:
    """One flag for each field of `sections` (None: all of the kind), with the field's sentence as help.

    None is required or has a default.
    """
    for section in sections_of(kind) if sections is None else sections:
        cls = sections_of(kind)[section]
        names = [name for name in field_types(cls) if name not in FROM_DATA]
        add_field_flags(parser.add_argument_group(f"{section} settings"), cls, names)


def add_field_flags(group: Any, cls: type, names: Iterable[str]) -> None:
    """A flag for each of these fields of a dataclass, to a parser or a group of one, as add_flags()."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for name in names:
        value_type = field_types(cls)[name]
        sentence = f"{field_help(cls).get(name, '')} (default: {written(defaults[name])})".replace("%", "%%")
        is_switch = value_type is bool
        form = {"action": argparse.BooleanOptionalAction} if is_switch else {"metavar": _placeholder(value_type)}
        group.add_argument(flag_name(name), dest=name, default=argparse.SUPPRESS, help=sentence, **form)


def field_values(args: argparse.Namespace, cls: type, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields that were given on the command line, each of its type; UserError for what is of another."""
    types, given = field_types(cls), vars(args)
    return {name: convert(given[name], types[name], flag_name(name)) for name in names if name in given}


def flag_values(
    args: argparse.Namespace, sections: Iterable[str] | None = None, *, kind: str = TRANSFORMER
) -> dict[str, Any]:
    """The fields of `sections` (None: all of the kind) that were given on the command line."""
    given, wanted = vars(args), tuple(sections_of(kind) if sections is None else sections)
    return {name: given[name] for name, section in all_fields(kind).items() if section in wanted and name in given}


def _placeholder(kind: Any) -> str:
    """Return the word that stands for a value of this type in the help."""
    if typing.get_origin(kind) is Literal:
        return "|".join(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return ",".join("…" if each is ... else _placeholder(each) for each in typing.get_args(kind))
    names = {int: "N", float: "X", str: "TEXT"}
    return names.get(kind) or names[next(option for option in typing.get_args(kind) if option in names)]


def written(value: Any) -> str:
    """A field's value as a flag takes it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
