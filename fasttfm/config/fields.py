"""The sections of a configuration (one frozen dataclass each) and their fields.

    model     TransformerConfig     data      DataConfig
    training  TrainingConfig        decoding  DecodingConfig

These are the sections of kind transformer; other kinds come from fasttfm.config.kinds. Field names are unique across
the sections of a kind, so `--d-model 128` sets model.d_model.
"""

import ast
import dataclasses
import difflib
import inspect
import textwrap
import typing
from collections.abc import Iterable
from functools import cache
from typing import Any

from fasttfm.config.data import DataConfig
from fasttfm.config.decoding import DecodingConfig
from fasttfm.config.kinds import TRANSFORMER, pretrained_kinds
from fasttfm.config.model import TransformerConfig
from fasttfm.config.training import TrainingConfig
from fasttfm.errors import UserError

SECTIONS: dict[str, type] = {
    "model": TransformerConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "decoding": DecodingConfig,
}
"""Section -> dataclass, for a Transformer."""
FROM_DATA = ("vocab_size", "source_vocab_size", "pad_id")
"""Model fields determined by the prepared data; no preset or flag sets them."""


def sections_of(kind: str = TRANSFORMER) -> dict[str, type]:
    """Section -> dataclass, for a kind of model."""
    return SECTIONS if kind == TRANSFORMER else pretrained_kinds()[kind].sections


class Values(dict[str, dict[str, Any]]):
    """Section -> field -> converted value, for explicitly set fields only."""

    kind: str
    """The kind of model."""
    origins: dict[str, str]
    """Field -> where its value was set: `my.yaml, line 3`, or the flag `--d-model`."""

    def __init__(self, kind: str = TRANSFORMER) -> None:
        super().__init__({section: {} for section in sections_of(kind)})
        self.kind = kind
        self.origins = {}

    def put(self, name: str, value: Any, location: str) -> None:
        self[section_of(name, self.kind)][name] = value
        self.origins[name] = location


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Field name -> type of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@cache
def field_help(cls: type) -> dict[str, str]:
    """Field name -> docstring below it in the source of the dataclass or its base."""
    sentences = {}
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and documented:
                sentences[field.target.id] = inspect.cleandoc(str(after.value.value)).replace("\n", " ")  # type: ignore[attr-defined]
    return sentences


@cache
def all_fields(kind: str = TRANSFORMER) -> dict[str, str]:
    """Field name -> section, over all sections of a kind. TypeError for duplicate names, which share a flag."""
    fields: dict[str, str] = {}
    for section, cls in sections_of(kind).items():
        for name in field_types(cls):
            if name in fields:
                raise TypeError(f"field {name} is in section {fields[name]} and in section {section}")
            fields[name] = section
    return fields


def section_of(name: str, kind: str = TRANSFORMER) -> str:
    """The section of a field; UserError with the closest name if it is unknown."""
    fields = all_fields(kind)
    if name not in fields:
        raise UserError(f"{name} is unknown: {nearest(name, fields)}")
    return fields[name]


def flag_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known one, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
