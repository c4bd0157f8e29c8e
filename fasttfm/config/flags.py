"""One command-line flag for every field of the configuration: names, help and types are those of the dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Iterable
from typing import Any, Literal

from fasttfm.config.fields import FROM_DATA, KINDS, TRANSFORMER, all_fields, field_help, field_types, flag_name


def add_flags(
    parser: argparse.ArgumentParser, sections: Iterable[str] | None = None, *, kind: str = TRANSFORMER
) -> None:
    """One flag for each field of `sections` (None: all of the kind), with the field's sentence as help.

    None is required or has a default.
    """
    for section in KINDS[kind] if sections is None else sections:
        cls = KINDS[kind][section]
        group = parser.add_argument_group(f"{section} settings")
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        for name, value_type in field_types(cls).items():
            if name in FROM_DATA:
                continue
            sentence = f"{field_help(cls).get(name, '')} ({_show_default(defaults[name])})".replace("%", "%%")
            is_switch = value_type is bool
            form = {"action": argparse.BooleanOptionalAction} if is_switch else {"metavar": _placeholder(value_type)}
            group.add_argument(flag_name(name), dest=name, default=argparse.SUPPRESS, help=sentence, **form)


def flag_values(
    args: argparse.Namespace, sections: Iterable[str] | None = None, *, kind: str = TRANSFORMER
) -> dict[str, Any]:
    """The fields of `sections` (None: all of the kind) that were given on the command line."""
    given, wanted = vars(args), tuple(KINDS[kind] if sections is None else sections)
    return {name: given[name] for name, section in all_fields(kind).items() if section in wanted and name in given}


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
