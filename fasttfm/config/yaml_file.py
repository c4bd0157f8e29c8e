"""Configuration files: sections of fields in YAML, every complaint with its line."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from fasttfm.config.convert import convert
from fasttfm.config.fields import (
    SECTIONS,
    TRANSFORMER,
    Values,
    all_fields,
    field_types,
    nearest,
    section_of,
    sections_of,
)
from fasttfm.errors import UserError
from fasttfm.kinds import pretrained_kinds, refuse_unknown
from fasttfm.parsing import Malformed, compose_yaml, construct_yaml, write_yaml


def kind_of(path: str | Path) -> str:
    """The kind of model that a configuration file says it is of (`kind: gpt`), transformer where it does not say."""
    return _read(Path(path))[0] or TRANSFORMER


def read_yaml(path: str | Path, kind: str = TRANSFORMER) -> Values:
    """Read a configuration file of a kind of model. Every complaint names the file and the line."""
    path = Path(path)
    says, entries = _read(path)
    if says is not None and says != kind:
        command = "translate" if says == TRANSFORMER else pretrained_kinds()[says].command
        raise UserError(
            f"{path}: is of a model of kind {says}, where one of kind {kind} is needed: fasttfm {command} takes it"
        )
    values, sections = Values(kind), sections_of(kind)
    for section, section_node, line in entries:
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
                value = construct_yaml(node)
            except Malformed as error:
                raise UserError(f"{path}, line {line}: {section}.{name} is not a plain YAML value: {error}") from None
            location = f"{path}, line {line}"
            values.put(name, convert(value, known[name], f"{location}: {section}.{name}"), location)
    return values


_Entry = tuple[str, yaml.Node, int]
"""Key, value and line."""


def _read(path: Path) -> tuple[str | None, list[_Entry]]:
    """The kind of model that a file names, if it does, and its sections."""
    try:
        entries = list(_entries(compose_yaml(path.read_bytes()), path, "the file"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a YAML file with sections {', '.join(SECTIONS)}") from error
    except Malformed as error:
        where = f"{path}, line {error.line}" if error.line else str(path)
        raise UserError(f"{where}: {error}: write lines of `name: value`, in UTF-8") from None
    kind = None
    for name, node, line in entries:
        if name == "kind":
            kind = str(node.value) if isinstance(node, yaml.ScalarNode) else "a list"
            if kind != TRANSFORMER:
                refuse_unknown(kind, f"{path}, line {line}")
    return kind, [entry for entry in entries if entry[0] != "kind"]


def _entries(node: yaml.Node | None, path: Path, what: str) -> Iterable[_Entry]:
    """The entries of a YAML mapping; an empty one has none."""
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
            text = write_yaml(plain, default_flow_style=True, width=1 << 20)
            lines.append(f"  {name}: {text.removesuffix('...' + chr(10)).strip()}")
    return "\n".join(lines) + "\n"
