"""What the schemas of records are made of (JSON Schema)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def fields(properties: dict[str, Any], *, optional: Iterable[str] = (), more: bool = False) -> dict[str, Any]:
    required = [name for name in properties if name not in set(optional)]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
AT_LEAST_ONE: dict[str, Any] = {"type": "integer", "minimum": 1}
POSITIVE: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0}
RATE: dict[str, Any] = {"type": "number", "minimum": 0}
MAYBE: dict[str, Any] = {"type": ["number", "null"], "minimum": 0}
SCALAR: dict[str, Any] = {"type": ["string", "number", "boolean", "null"]}
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT}
ROWS: dict[str, Any] = {"type": "array", "items": {"type": "object"}, "minItems": 1}
RUNS: dict[str, Any] = {"type": "object", "additionalProperties": ROWS, "minProperties": 2}
OBJECTS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "object"}}
CURVE: dict[str, Any] = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}

MACHINE_FIELDS: dict[str, Any] = {
    "time": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d$"},
    "command": TEXT,
    "commit": {"type": ["string", "null"], "pattern": "^[0-9a-f]{40}$"},
    "uncommitted_changes": {"type": "boolean"},
    "python": TEXT,
    "system": TEXT,
    "processor": TEXT,
    "cores": COUNT,
    "fasttfm": {"type": ["string", "null"]},
    "torch": TEXT,
    "triton": {"type": ["string", "null"]},
}
MACHINE = fields(MACHINE_FIELDS, more=True)
"""machine.describe(); on a GPU also device, chip, driver, cuda, clocks and more."""
