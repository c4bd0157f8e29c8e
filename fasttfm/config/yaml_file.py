"""Configuration files: YAML sections of fields; every error names the line."""

from pathlib import Path
from typing import Any

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
from fasttfm.config.kinds import pretrained_kinds, refuse_unknown
from fasttfm.errors import UserError
from fasttfm.system.parsing import Lines, Malformed, parse_yaml_lines, shown, write_yaml

_REMOVED = "if another version of fasttfm wrote the file, delete the line"


def kind_of(path: str | Path) -> str:
    """The kind of model of a configuration file (`kind: gpt`); transformer if it has none."""
    return _read(Path(path))[0] or TRANSFORMER


def read_yaml(path: str | Path, kind: str = TRANSFORMER, into: Values | None = None) -> Values:
    """Read a configuration file for a kind of model; into: values that it overrides.

    Raises UserError with file and line for invalid content.
    """
    path = Path(path)
    file_kind, content, lines = _read(path)
    if file_kind is not None and file_kind != kind:
        command = "translate" if file_kind == TRANSFORMER else pretrained_kinds()[file_kind].command
        raise UserError(f"{path}: is for a model of kind {file_kind}, but kind {kind} is needed: use fasttfm {command}")
    values, sections = Values(kind) if into is None else into, sections_of(kind)
    for section, fields in content.items():
        line = lines[(section,)]
        if section not in sections:
            hint = f"{nearest(section, sections)} ({_REMOVED} with its fields)"
            raise UserError(f"{path}, line {line}: section {section!r} is unknown: {hint}")
        known = field_types(sections[section])
        for name, value in _mapping(fields, f"{path}, line {line}: section {section}").items():
            location = f"{path}, line {lines[section, name]}"
            if name not in known:
                hint = f"{nearest(name, all_fields(kind))} ({_REMOVED})"
                if name in all_fields(kind):
                    hint = f"{name} belongs to section {section_of(name, kind)}"
                raise UserError(f"{location}: {section}.{name} is unknown: {hint}")
            values.put(name, convert(value, known[name], f"{location}: {section}.{name}"), location)
    return values


def _read(path: Path) -> tuple[str | None, dict[str, Any], Lines]:
    """A file's kind of model (or None), its sections, and the lines of all fields."""
    try:
        value, lines = parse_yaml_lines(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a YAML file with sections {', '.join(SECTIONS)}") from error
    except Malformed as error:
        where = f"{path}, line {error.line}" if error.line else str(path)
        raise UserError(f"{where}: {error}: write lines of `name: value`, in UTF-8") from None
    sections = _mapping(value, f"{path}, line {lines[()]}: the file")
    if "kind" not in sections:
        return None, sections, lines
    kind = sections.pop("kind")
    kind = kind if isinstance(kind, str) else shown(kind)
    if kind != TRANSFORMER:
        refuse_unknown(kind, f"{path}, line {lines[('kind',)]}")
    return kind, sections, lines


def _mapping(value: Any, what: str) -> dict[str, Any]:
    """The fields of a file or section, {} if it is empty; UserError for anything but a mapping."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{what} must be a mapping (name: value), indented by two spaces")
    return value


def dump_yaml(values: dict[str, dict[str, Any]], kind: str = TRANSFORMER) -> str:
    """Values as YAML for read_yaml(), one field per line, in the same order."""
    lines = [f"kind: {kind}"]
    for section, fields in values.items():
        lines.append(f"{section}:" if fields else f"{section}: {{}}")
        for name, value in fields.items():
            plain = list(value) if isinstance(value, tuple) else value
            text = write_yaml(plain, default_flow_style=True, width=1 << 20)
            lines.append(f"  {name}: {text.removesuffix('...' + chr(10)).strip()}")
    return "\n".join(lines) + "\n"
