"""JSON Schemas of the records, written out from schemas.yaml: what a line of benchmarks/results says.

python -c "import json, benchmarks.measure.schemas as s; print(json.dumps(s.SCHEMAS, indent=2))"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fasttfm.parsing import parse_yaml

Schema = dict[str, Any]
_SHORT = parse_yaml((Path(__file__).parent / "schemas.yaml").read_bytes())


def _schema(short: Any) -> Schema:
    """The JSON Schema of a type's name, of one that is written out, or of an object's fields."""
    if isinstance(short, str):
        return _fields(_SHORT["machine"], more=True) if short == "machine" else _SHORT["types"][short]
    first = next(iter(short))
    if first in ("type", "enum", "const") and not isinstance(short[first], dict):
        return short
    if first == "or null":
        return {"anyOf": [_schema(short[first]), {"type": "null"}]}
    if first == "array":
        return {"type": "array", "items": _schema(short[first])}
    return _fields(short)


def _fields(short: Schema, more: bool = False) -> Schema:
    if "..." in short:
        more, own = True, {name: kind for name, kind in short.items() if name != "..."}
        short = own | _SHORT["machine"]
    return {
        "type": "object",
        "properties": {name.rstrip("?"): _schema(kind) for name, kind in short.items()},
        "required": [name for name in short if not name.endswith("?")],
        "additionalProperties": more,
    }


SCHEMAS = {name: _schema(fields) for name, fields in _SHORT["kinds"].items()} | {
    name: _fields({"benchmark": {"const": name}, **fields, "machine": "machine"})
    for name, fields in _SHORT["programs"].items()
}
"""Kind of record -> its JSON Schema."""
BENCHMARK = SCHEMAS["benchmark"]
GROUPS, STATUSES = (tuple(BENCHMARK["properties"][name]["enum"]) for name in ("group", "status"))
