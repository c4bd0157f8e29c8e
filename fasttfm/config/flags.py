"""One command-line flag for every field of the configuration: names, help and types are those of the dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Iterable
from typing import Any, Literal

from fasttfm.config.fields import FROM_DATA, SECTIONS, all_fields, field_help, field_types, flag_name


def add_flags(parser: argparse.ArgumentParser, sections: Iterable[str] = tuple(SECTIONS)) -> None:
    """One flag for each field of `sections`, with the field's sentence as help; none is required or has a default."""
    for section in sections:
        cls = SECTIONS[section]
        group = parser.add_argument_group(f"{section} settings")
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        for name, kind in field_types(cls).items():
            if name in FROM_DATA:
                continue
            sentence = f"{field_help(cls).get(name, '')} [{_show_default(defaults[name])}]".replace("%", "%%")
            if kind is bool:
                action = argparse.BooleanOptionalAction
                group.add_argument(flag_name(name), dest=name, action=action, default=argparse.SUPPRESS, help=sentence)
            else:
                group.add_argument(
                    flag_name(name), dest=name, default=argparse.SUPPRESS, metavar=_placeholder(kind), help=sentence
                )


def flag_values(args: argparse.Namespace, sections: Iterable[str] = tuple(SECTIONS)) -> dict[str, Any]:
    """The fields of `sections` that were given on the command line."""
    given = vars(args)
    return {name: given[name] for name, section in all_fields().items() if section in tuple(sections) and name in given}


def _placeholder(kind: Any) -> str:
    """What stands for a value of this type in the help."""
    if typing.get_origin(kind) is Literal:
        return "|".join(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return ",".join("…" if each is ... else _placeholder(each) for each in typing.get_args(kind))
    names = {int: "N", float: "X", str: "TEXT"}
    return names.get(kind) or names[next(option for option in typing.get_args(kind) if option in names)]


def _show_default(value: Any) -> str:
    if isinstance(value, tuple):
        shown = ",".join(map(str, value)) or "none"
    else:
        shown = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    return f"default: {shown}"
