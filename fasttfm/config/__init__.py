"""Configuration: one frozen dataclass per section, filled from presets, YAML and the command line by the loader."""

from fasttfm.config.convert import convert, to_float, to_int
from fasttfm.config.fields import (
    FROM_DATA,
    SECTIONS,
    TRANSFORMER,
    Values,
    all_fields,
    field_help,
    field_types,
    section_of,
    sections_of,
)
from fasttfm.config.flags import add_field_flags, add_flags, field_values, flag_values
from fasttfm.config.loader import RunConfig, build, check, gather, with_defaults
from fasttfm.config.yaml_file import dump_yaml, kind_of, read_yaml
