"""Where the numbers of a run come from: preset < YAML files < command line, each checked against the same dataclasses.

A configuration has four sections, each of them one frozen dataclass:

    model     TransformerConfig     data      DataConfig
    training  TrainingConfig        decoding  DecodingConfig

Field names are unique over all sections, so `--d-model 128` says by itself that it means model.d_model. Flags, their
help and their types are made from the dataclass fields; nothing is listed twice.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import reprlib
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from fasttfm.data.config import DataConfig
from fasttfm.decoding.config import DecodingConfig
from fasttfm.errors import UserError
from fasttfm.models.config import TransformerConfig
from fasttfm.presets import preset_path
from fasttfm.training.config import TrainingConfig

SECTIONS: dict[str, type] = {
    "model": TransformerConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "decoding": DecodingConfig,
}
FROM_DATA = ("vocab_size", "source_vocab_size")
"""Model fields that the prepared data decide, so that no preset and no flag sets them."""

_SHOWN = reprlib.Repr()  # a value may be a whole file, or a few lines of YAML that stand for millions
_SHOWN.maxstring = _SHOWN.maxother = 200
_SHOWN.maxlevel = 1

Values = dict[str, dict[str, Any]]
"""Section -> field -> value, already of the field's type; only what was given, no defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All that a run is made of. Build it with `resolve`."""

    model: TransformerConfig
    data: DataConfig
    training: TrainingConfig
    decoding: DecodingConfig

    def to_values(self) -> Values:
        """Every field of every section as plain values."""
        return {section: dataclasses.asdict(getattr(self, section)) for section in SECTIONS}

    def to_yaml(self) -> str:
        """The whole configuration as a YAML text that `read_yaml` reads back to an equal one."""
        return dump_yaml(self.to_values())


def resolve(
    preset: str | None = None,
    files: Iterable[str | Path] = (),
    overrides: Mapping[str, Any] | None = None,
    from_data: Mapping[str, int | None] | None = None,
) -> Config:
    """Preset, then each YAML file, then `overrides` (field -> value); later ones win.

    from_data holds the fields that the prepared data decide (vocab_size, source_vocab_size).
    Raises UserError naming file, line and nearest known key for what is unknown, of a wrong type or out of range.
    """
    return build(gather(preset, files, overrides), from_data)


def gather(
    preset: str | None = None, files: Iterable[str | Path] = (), overrides: Mapping[str, Any] | None = None
) -> Values:
    """What preset, files and overrides say together, without defaults and without what the data decide."""
    values: Values = {section: {} for section in SECTIONS}
    sources = [preset_path(preset)] if preset else []
    for path in [*sources, *map(Path, files)]:
        for section, fields in read_yaml(path).items():
            values[section].update(fields)
    for name, value in (overrides or {}).items():
        section = section_of(name)
        values[section][name] = convert(value, field_types(SECTIONS[section])[name], f"--{name.replace('_', '-')}")
    return values


def build(values: Values, from_data: Mapping[str, int | None] | None = None) -> Config:
    """Construct the four sections; a value out of range becomes a UserError that names its section."""
    model = {**values["model"], **(from_data or {})}
    sections = {**values, "model": model}
    built = {}
    for section, cls in SECTIONS.items():
        try:
            built[section] = cls(**sections[section])
        except (ValueError, TypeError) as error:
            raise UserError(f"{section}: {error}") from error
    return Config(**built)


def with_defaults(values: Values) -> Values:
    """`values` with every field that has a default filled in: what --dump-config prints."""
    filled: Values = {}
    for section, cls in SECTIONS.items():
        fields = {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
        filled[section] = {**fields, **values.get(section, {})}
    for name in FROM_DATA:
        filled["model"].pop(name, None)
    return filled


# YAML


def read_yaml(path: str | Path) -> Values:
    """Read a configuration file. Every complaint names the file and the line."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a YAML file with sections {', '.join(SECTIONS)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid UTF-8 at byte {error.start}; save the file as UTF-8") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise UserError(
            f"{path}: is nested too deeply; a section holds lines of `name: value` and nothing else"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    values: Values = {section: {} for section in SECTIONS}
    for section, section_node, line in _entries(root, path, "the file"):
        if section not in SECTIONS:
            raise UserError(f"{path}, line {line}: section {section!r} is unknown: {_nearest(section, SECTIONS)}")
        known = field_types(SECTIONS[section])
        for name, node, line in _entries(section_node, path, f"section {section}"):
            if name not in known:
                hint = _nearest(name, all_fields())
                if name in all_fields():
                    hint = f"{name} belongs to section {section_of(name)}"
                raise UserError(f"{path}, line {line}: {section}.{name} is unknown: {hint}")
            try:
                value = yaml.SafeLoader("").construct_object(node, deep=True)
            except (
                yaml.YAMLError,
                ValueError,
                TypeError,
                RecursionError,
            ) as error:  # a tag, a date such as 2020-13-45, a loop
                raise UserError(f"{path}, line {line}: {section}.{name} is no plain YAML value: {error}") from error
            values[section][name] = convert(value, known[name], f"{path}, line {line}: {section}.{name}")
    return values


def _entries(node: yaml.Node | None, path: Path, what: str) -> Iterable[tuple[str, yaml.Node, int]]:
    """(key, value node, line) of a YAML mapping; an empty one has none."""
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")):
        return
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1
        raise UserError(f"{path}, line {line}: {what} must be a mapping (name: value), indented by two spaces")
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:
            raise UserError(f"{path}, line {line}: {key} is given twice (first in line {seen[key]}); keep one")
        seen[key] = line
        yield key, value_node, line


def dump_yaml(values: Values) -> str:
    """Values as YAML, one field a line, in the order given; `read_yaml` reads them back equal."""
    lines = []
    for section, fields in values.items():
        lines.append(f"{section}:" if fields else f"{section}: {{}}")
        for name, value in fields.items():
            plain = list(value) if isinstance(value, tuple) else value
            text = yaml.safe_dump(plain, default_flow_style=True, width=1 << 20, allow_unicode=True)
            lines.append(f"  {name}: {text.removesuffix('...' + chr(10)).strip()}")
    return "\n".join(lines) + "\n"


# Types and names, from the dataclasses


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Field name -> type of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@cache
def field_help(cls: type) -> dict[str, str]:
    """Field name -> the sentence under it in the source of the dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    sentences = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and documented:
            sentences[field.target.id] = inspect.cleandoc(str(after.value.value)).replace("\n", " ")  # type: ignore[attr-defined]
    return sentences


@cache
def all_fields() -> dict[str, str]:
    """Field name -> section, over all sections. Two sections may not share a name: a flag could not tell them apart."""
    fields: dict[str, str] = {}
    for section, cls in SECTIONS.items():
        for name in field_types(cls):
            if name in fields:
                raise TypeError(f"field {name} is in section {fields[name]} and in section {section}")
            fields[name] = section
    return fields


def section_of(name: str) -> str:
    """The section that field `name` belongs to; UserError with the nearest known name when there is none."""
    if name not in all_fields():
        raise UserError(f"{name} is unknown: {_nearest(name, all_fields())}")
    return all_fields()[name]


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def convert(value: Any, kind: Any, where: str) -> Any:
    """`value` (from YAML, the command line or Python) as type `kind`; UserError starting with `where` if it cannot be.

    Strings are read as the type asks, because YAML 1.1 takes 5e-4 for a string.
    """
    options = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        (kind,) = [option for option in options if option is not types.NoneType]
        return convert(value, kind, where)
    plain = not isinstance(value, (list, dict, set))  # str() of one may be endless
    if typing.get_origin(kind) is Literal:
        if plain and str(value) in options:
            return str(value)
        raise UserError(f"{where}: {_SHOWN.repr(value)} was given, allowed are {', '.join(map(str, options))}")
    if typing.get_origin(kind) is tuple:
        items = value.strip("()[] ").split(",") if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or (options[-1] is not ... and len(items) != len(options)):
            raise UserError(
                f"{where}: {_SHOWN.repr(value)} was given, it must be {len(options)} values such as 0.9,0.98"
            )
        kinds = [options[0]] * len(items) if options[-1] is ... else options
        return tuple(convert(item, kind, where) for item, kind in zip(items, kinds, strict=True))
    try:
        if kind is bool and plain:
            return _to_bool(value)
        if kind is int:
            return _to_int(value)
        if kind is float and not isinstance(value, bool):
            return float(value)
        if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return str(value)
    except (TypeError, ValueError):
        pass
    names = {bool: "true or false", int: "a whole number below 2^63", float: "a number", str: "a text"}
    raise UserError(f"{where}: {_SHOWN.repr(value)} was given, it must be {names.get(kind, kind)}")


def _to_bool(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def _to_int(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    number = float(value) if isinstance(value, str) and not value.strip().lstrip("+-").isdigit() else value
    if isinstance(number, float) and not number.is_integer():
        raise ValueError
    whole = int(number)
    if abs(whole) >= 1 << 63:
        raise ValueError
    return whole


# Command line


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
            flag = f"--{name.replace('_', '-')}"
            if kind is bool:
                action = argparse.BooleanOptionalAction
                group.add_argument(flag, dest=name, action=action, default=argparse.SUPPRESS, help=sentence)
            else:
                group.add_argument(
                    flag, dest=name, default=argparse.SUPPRESS, metavar=_placeholder(kind), help=sentence
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
        return ",".join(map(_placeholder, typing.get_args(kind)))
    names = {int: "N", float: "X", str: "TEXT"}
    return names.get(kind) or names[next(option for option in typing.get_args(kind) if option in names)]


def _show_default(value: Any) -> str:
    if isinstance(value, tuple):
        shown = ",".join(map(str, value))
    else:
        shown = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    return f"default: {shown}"
