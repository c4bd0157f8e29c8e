"""Loads the configuration of a run: preset < YAML files < command line, checked against the same dataclasses.

Vocabulary sizes and the padding id come from the prepared data; a file may repeat them, as the config.yaml of every
model does, but not change them.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttfm.config.checks import refuse_stopped
from fasttfm.config.convert import convert
from fasttfm.config.fields import FROM_DATA, TRANSFORMER, Values, field_types, flag_name, section_of, sections_of
from fasttfm.config.presets import preset_path
from fasttfm.config.training import STOPPED_BY, TrainingConfig
from fasttfm.config.yaml_file import dump_yaml, read_yaml
from fasttfm.errors import UserError

_ANY_VOCABULARY = 8000


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The complete configuration of a run, for any kind of model; created by build()."""

    kind: str
    """The kind of model, which determines the sections."""
    model: Any
    data: Any
    training: TrainingConfig
    decoding: Any = None
    """None for kinds without this section."""

    def to_values(self) -> Values:
        """All fields as plain values, from which build() restores the configuration."""
        values = Values(self.kind)
        for section in values:
            values[section].update(dataclasses.asdict(getattr(self, section)))
        return values

    def to_yaml(self) -> str:
        """The complete configuration as YAML for read_yaml()."""
        return dump_yaml(self.to_values(), self.kind)


def gather(
    preset: str | None = None,
    files: Iterable[str | Path] = (),
    overrides: Mapping[str, Any] | None = None,
    *,
    kind: str = TRANSFORMER,
) -> Values:
    """Merge preset, files and overrides (field -> value), later ones first, without defaults.

    Raises UserError with file, line and the closest name for unknown fields and wrong types.
    """
    values = Values(kind)
    sources = [preset_path(preset, kind)] if preset else []
    for path in [*sources, *map(Path, files)]:
        read_yaml(path, kind, values)
    for name, value in (overrides or {}).items():
        value_type = field_types(sections_of(kind)[section_of(name, kind)])[name]
        values.put(name, convert(value, value_type, flag_name(name)), flag_name(name))
    return values


def build(values: Values, from_data: Mapping[str, int | None] | None = None) -> RunConfig:
    """Construct the sections; UserError with the origin of a value that is out of range.

    from_data: vocab_size of prepared data and, for separate vocabularies, source_vocab_size; contradicting values are
    refused. Without it, `values` determine them, as in the config.yaml of a model.
    """
    sections: dict[str, dict[str, Any]] = dict(values)
    if from_data is not None:
        defaults = _defaults(sections_of(values.kind)["model"])
        fixed = {**{name: defaults[name] for name in FROM_DATA if name in defaults}, **from_data}
        _refuse_other_than(fixed, values)
        sections["model"] = {**values["model"], **fixed}
    built = {}
    for section, cls in sections_of(values.kind).items():
        try:
            built[section] = cls(**sections[section])
        except (ValueError, TypeError) as error:
            raise UserError(_with_origins(str(error), section, values)) from error
    flags = {name for name, where in values.origins.items() if where in (flag_name(name), f"--resume-with {name}")}
    refuse_stopped(flags, built["training"], STOPPED_BY)
    return RunConfig(kind=values.kind, **built)


def check(values: Values) -> None:
    """Raise UserError for values that are out of range whatever the data."""
    sizes = {name: size for name, size in values["model"].items() if name in ("vocab_size", "source_vocab_size")}
    build(values, {"vocab_size": _ANY_VOCABULARY, **sizes})


def with_defaults(values: Values) -> dict[str, dict[str, Any]]:
    """`values` completed with defaults, as printed by --dump-config."""
    sections = sections_of(values.kind).items()
    filled = {section: {**_defaults(cls), **values.get(section, {})} for section, cls in sections}
    for name in FROM_DATA:
        filled["model"].pop(name, None)
    return filled


def _defaults(cls: Any) -> dict[str, Any]:
    """Field -> default, for fields that have one."""
    return {field.name: field.default for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}


def _refuse_other_than(fixed: Mapping[str, int | None], values: Values) -> None:
    """Raise UserError if a file contradicts a value from the data."""
    for name, size in fixed.items():
        value = values["model"].get(name)
        if name == "source_vocab_size" and size is None:
            size = fixed.get("vocab_size")  # joint vocabulary
        if value is not None and value != size:
            raise UserError(
                f"{values.origins.get(name, 'model')}: model.{name} is {value:,}, but {size:,} in the data: omit it"
            )


def _with_origins(message: str, section: str, values: Values) -> str:
    """Replace field names in a dataclass's message by their origin: flag, or file and line."""
    known = field_types(sections_of(values.kind)[section])
    lines = []
    flags = False
    for name in dict.fromkeys(re.findall(r"\w+", message)):
        location = values.origins.get(name) if name in known else None
        if location is None:
            continue
        flag = location == flag_name(name)
        message = re.sub(rf"(?<![\w-]){name}\b", location if flag else f"{section}.{name}", message)
        flags |= flag
        if not flag and location not in lines:
            lines.append(location)
    if lines:
        return f"{' and '.join(lines)}: {message}"
    return message if flags else f"{section}: {message}"
