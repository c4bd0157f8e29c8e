"""Sources of a run's numbers: preset < YAML files < command line, each checked against the same dataclasses.

What the prepared data decide (the sizes of the vocabularies, the padding's id) comes from them alone: a file may say it
too, as the config.yaml of every model does, but not otherwise.
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
    """All that a run is made of, of any kind of model. Make it with `build`."""

    kind: str
    """The kind of model, which says what the sections are."""
    model: Any
    data: Any
    training: TrainingConfig
    decoding: Any = None
    """None for the kinds that have no such section."""

    def to_values(self) -> Values:
        """Every field of every section as plain values, which `build` makes an equal configuration of."""
        values = Values(self.kind)
        for section in values:
            values[section].update(dataclasses.asdict(getattr(self, section)))
        return values

    def to_yaml(self) -> str:
        """The whole configuration as a YAML text that `read_yaml` reads back to an equal one."""
        return dump_yaml(self.to_values(), self.kind)


def gather(
    preset: str | None = None,
    files: Iterable[str | Path] = (),
    overrides: Mapping[str, Any] | None = None,
    *,
    kind: str = TRANSFORMER,
) -> Values:
    """Join preset, files and overrides (field -> value), without defaults and without what the data decide.

    Later ones win. kind: of the model. Raises UserError naming file, line and the nearest known name
    for what is unknown or of a wrong type.
    """
    values = Values(kind)
    sources = [preset_path(preset, kind)] if preset else []
    for path in [*sources, *map(Path, files)]:
        given = read_yaml(path, kind)
        for fields in given.values():
            for name, value in fields.items():
                values.put(name, value, given.origins[name])
    for name, value in (overrides or {}).items():
        value_type = field_types(sections_of(kind)[section_of(name, kind)])[name]
        values.put(name, convert(value, value_type, flag_name(name)), flag_name(name))
    return values


def build(values: Values, from_data: Mapping[str, int | None] | None = None) -> RunConfig:
    """Construct the sections. A value out of range becomes a UserError with the place where it was given.

    from_data: vocab_size and, where the sides have a vocabulary each, source_vocab_size of prepared data. A value that
    says otherwise is refused. Without from_data the values decide, as in the config.yaml of a model.
    """
    sections: dict[str, dict[str, Any]] = dict(values)
    if from_data is not None:
        defaults = _defaults(sections_of(values.kind)["model"])
        decided = {**{name: defaults[name] for name in FROM_DATA if name in defaults}, **from_data}
        _refuse_other_than(decided, values)
        sections["model"] = {**values["model"], **decided}
    built = {}
    for section, cls in sections_of(values.kind).items():
        try:
            built[section] = cls(**sections[section])
        except (ValueError, TypeError) as error:
            raise UserError(_with_origins(str(error), section, values)) from error
    flags = {name for name, location in values.origins.items() if location == flag_name(name)}
    refuse_stopped(flags, built["training"], STOPPED_BY)
    return RunConfig(kind=values.kind, **built)


def check(values: Values) -> None:
    """Raise UserError for what is out of range, whatever the data will be."""
    sizes = {name: size for name, size in values["model"].items() if name in ("vocab_size", "source_vocab_size")}
    build(values, {"vocab_size": _ANY_VOCABULARY, **sizes})


def with_defaults(values: Values) -> dict[str, dict[str, Any]]:
    """`values` with every field that has a default filled in: what --dump-config prints."""
    filled = {}
    for section, cls in sections_of(values.kind).items():
        filled[section] = {**_defaults(cls), **values.get(section, {})}
    for name in FROM_DATA:
        filled["model"].pop(name, None)
    return filled


def _defaults(cls: Any) -> dict[str, Any]:
    """Field -> default of a section's fields that have one."""
    return {field.name: field.default for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}


def _refuse_other_than(decided: Mapping[str, int | None], values: Values) -> None:
    """Raise UserError when a file gives a field that the data decide another value than theirs."""
    for name, size in decided.items():
        given = values["model"].get(name)
        if name == "source_vocab_size" and size is None:
            size = decided.get("vocab_size")  # a joint vocabulary is that of both sides
        if given is not None and given != size:
            raise UserError(
                f"{values.origins.get(name, 'model')}: model.{name} is {given:,}, but {size:,} in the data: leave it "
                "out, the data decide it"
            )


def _with_origins(message: str, section: str, values: Values) -> str:
    """A dataclass's message with its fields as the user gave them: by flag, or by file and line."""
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
