"""Configuration files: sections of fields in YAML, every complaint with its line."""

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


def kind_of(path: str | Path) -> str:
    """The kind of model that a configuration file says it is of (`kind: gpt`), transformer where it does not say."""
    return _read(Path(path))[0] or TRANSFORMER


def read_yaml(path: str | Path, kind: str = TRANSFORMER) -> Values:
    """Read a configuration file of a kind of model. Every complaint names the file and the line."""
    path = Path(path)
    says, given, lines = _read(path)
    if says is not None and says != kind:
        command = "translate" if says == TRANSFORMER else pretrained_kinds()[says].command
        raise UserError(
            f"{path}: is of a model of kind {says}, where one of kind {kind} is needed: fasttfm {command} takes it"
        )
    values, sections = Values(kind), sections_of(kind)
    for section, fields in given.items():
        line = lines[(section,)]
        if section not in sections:
            raise UserError(f"{path}, line {line}: section {section!r} is unknown: {nearest(section, sections)}")
        known = field_types(sections[section])
        for name, value in _mapping(fields, f"{path}, line {line}: section {section}").items():
            location = f"{path}, line {lines[section, name]}"
            if name not in known:
                hint = nearest(name, all_fields(kind))
                if name in all_fields(kind):
                    hint = f"{name} belongs to section {section_of(name, kind)}"
                raise UserError(f"{location}: {section}.{name} is unknown: {hint}")
            values.put(name, convert(value, known[name], f"{location}: {section}.{name}"), location)
    return values


def _read(path: Path) -> tuple[str | None, dict[str, Any], Lines]:
    """The kind of model that a file names, if it does, its sections, and the lines of all."""
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
    """The fields of a file or a section; an empty one has none."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{what} must be a mapping (name: value), indented by two spaces")
    return value


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
