"""Configuration files: YAML, plain scalars read as YAML 1.2's core schema has them, every complaint with its line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from fasttfm.config.convert import NUMBER, WHOLE_NUMBER, convert
from fasttfm.config.fields import KINDS, SECTIONS, TRANSFORMER, Values, all_fields, field_types, nearest, section_of
from fasttfm.errors import UserError

_COMMANDS = {
    TRANSFORMER: "fasttfm translate and its neighbours take it",
    "gpt": "fasttfm lm takes it",
    **dict.fromkeys(("bert", "albert", "electra"), "fasttfm mlm takes it"),
    "student": "fasttfm distill bert takes it, and its folder student is a BERT",
    **dict.fromkeys(
        ("squad", "choices", "classify", "gpt-choices", "gpt-classify"), "fasttfm finetune predict takes it"
    ),
}
"""Kind of model -> which commands take one."""


class _CoreLoader(yaml.SafeLoader):
    """PyYAML reads YAML 1.1: 010 is eight, 1:30 is ninety, `no` is false and 5e-4 a text. Here they are what they say.

    A plain scalar that is neither null, true, false nor a number is a text, which the field's type then refuses.
    """

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (not those that all safe loaders share)


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
    """A scalar with the tag int or float, which may stand in the file (!!int 010)."""
    text = str(loader.construct_scalar(node))
    if WHOLE_NUMBER.fullmatch(text):
        return int(text)
    if NUMBER.fullmatch(text):
        return float(text)
    raise ValueError(f"{text!r} is no number")


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", WHOLE_NUMBER.pattern, "-+0123456789"),
    ("float", NUMBER.pattern, "-+.0123456789"),
):
    _regexp = re.compile(rf"(?:{_pattern})\Z", re.ASCII)
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _regexp, list(_first))
for _tag in ("int", "float"):
    _CoreLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _number)


def kind_of(path: str | Path) -> str:
    """The kind of model that a configuration file says it is of (`kind: gpt`), transformer where it does not say."""
    path = Path(path)
    return _kind(list(_entries(_compose(path), path, "the file")), path)


def _kind(entries: list[tuple[str, yaml.Node, int]], path: Path) -> str:
    for name, node, line in entries:
        if name == "kind":
            if not isinstance(node, yaml.ScalarNode) or node.value not in KINDS:
                given = node.value if isinstance(node, yaml.ScalarNode) else "a list"
                raise UserError(f"{path}, line {line}: kind {given!r} is unknown: there are {', '.join(KINDS)}")
            return str(node.value)
    return TRANSFORMER


def read_yaml(path: str | Path, kind: str = TRANSFORMER) -> Values:
    """Read a configuration file of a kind of model. Every complaint names the file and the line."""
    path = Path(path)
    entries = list(_entries(_compose(path), path, "the file"))
    says = _kind(entries, path)
    if says != kind and (says != TRANSFORMER or any(name == "kind" for name, *_ in entries)):
        raise UserError(f"{path}: is of a model of kind {says}, where one of kind {kind} is needed: {_COMMANDS[says]}")
    values, sections = Values(kind), KINDS[kind]
    for section, section_node, line in entries:
        if section == "kind":
            continue
        if section not in sections:
            raise UserError(f"{path}, line {line}: section {section!r} is unknown: {nearest(section, sections)}")
        known = field_types(sections[section])
        for name, node, line in _entries(section_node, path, f"section {section}"):
            if name not in known:
                hint = nearest(name, all_fields(kind))
                if name in all_fields(kind):
                    hint = f"{name} belongs to section {section_of(name, kind)}"
                raise UserError(f"{path}, line {line}: {section}.{name} is unknown: {hint}")
            try:
                value = _CoreLoader("").construct_object(node, deep=True)
            except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # a tag, a loop
                raise UserError(f"{path}, line {line}: {section}.{name} is no plain YAML value: {error}") from error
            location = f"{path}, line {line}"
            values.put(name, convert(value, known[name], f"{location}: {section}.{name}"), location)
    return values


def _compose(path: Path) -> yaml.Node | None:
    """The nodes of a file, which know their lines."""
    try:
        text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a YAML file with sections {', '.join(SECTIONS)}") from error
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise UserError(
            f"{path}, line {line}: not valid UTF-8 (byte 0x{error.object[error.start]:02x} at byte {column} of the "
            "line): save the file as UTF-8"
        ) from error
    try:
        return yaml.compose(text, Loader=_CoreLoader)
    except RecursionError:
        raise UserError(
            f"{path}: is nested too deeply; a section holds lines of `name: value` and nothing else"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line_told = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line_told}: not valid YAML: {getattr(error, 'problem', None) or error}") from error


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


def dump_yaml(values: dict[str, dict[str, Any]], kind: str = TRANSFORMER) -> str:
    """Values as YAML, one field a line, in the order given; `read_yaml` reads them back equal."""
    lines = [f"kind: {kind}"]
    for section, fields in values.items():
        lines.append(f"{section}:" if fields else f"{section}: {{}}")
        for name, value in fields.items():
            plain = list(value) if isinstance(value, tuple) else value
            text = yaml.safe_dump(plain, default_flow_style=True, width=1 << 20, allow_unicode=True)
            lines.append(f"  {name}: {text.removesuffix('...' + chr(10)).strip()}")
    return "\n".join(lines) + "\n"
