"""Reads, writes and validates files of records, by the JSON Schemas in schemas.yaml.

A record is one JSON line per case and provider, or per run of a program, whose name is in the field `benchmark`. All
have the machine they were measured on, except counts of machine code.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.measure.machine import machine_name, slug
from fasttfm.errors import UserError
from fasttfm.system.files import replace_file
from fasttfm.system.parsing import parse_json, parse_yaml

Schema = dict[str, Any]
_SHORT = parse_yaml((Path(__file__).parent / "schemas.yaml").read_bytes())


def _schema(short: Any) -> Schema:
    """JSON Schema for an abbreviated one: the name of a type, a full schema, or the fields of an object."""
    if isinstance(short, str):
        return _SHORT["types"][short]
    first = next(iter(short))
    if first in ("type", "enum", "const") and not isinstance(short[first], dict):
        return short
    if first == "or null":
        return {"anyOf": [_schema(short[first]), {"type": "null"}]}
    if first == "array":
        return {"type": "array", "items": _schema(short[first])}
    return _fields(short)


def _fields(short: Schema, more: bool = False) -> Schema:
    return {
        "type": "object",
        "properties": {name.rstrip("?"): _schema(kind) for name, kind in short.items()},
        "required": [name for name in short if not name.endswith("?")],
        "additionalProperties": more,
    }


_SHORT["types"]["machine"] = _fields(_SHORT["machine"], more=True)
BENCHMARK = _fields({**_SHORT["row"], "machine": "machine"})
COUNTED = tuple(_SHORT["counted"])
"""Kinds of records without a machine: they are validated, but not reported."""
SCHEMAS = {
    "benchmark": BENCHMARK,
    **{
        name: _fields({"benchmark": {"const": name}, **fields, "machine": "machine"})
        for name, fields in _SHORT["programs"].items()
    },
    **{name: _fields({"benchmark": {"const": name}, **fields}) for name, fields in _SHORT["counted"].items()},
}
"""Kind of record -> its JSON Schema."""
GROUPS, STATUSES = (tuple(BENCHMARK["properties"][name]["enum"]) for name in ("group", "status"))

Record = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results"
ENDING = ".jsonl"
"""Suffix of files of records; other files in the folder are ignored."""


def kind(record: Record) -> str:
    """Name of a record's schema in SCHEMAS. Raises ValueError if there is none."""
    if not isinstance(record, dict):
        raise ValueError(f"the line must be a JSON object, not {type(record).__name__}")
    if "schema" in record:
        return "benchmark"
    if record.get("benchmark") in SCHEMAS:
        return record["benchmark"]
    raise ValueError(f"unknown kind, fields {sorted(record)[:5]}...: see benchmarks/measure/schemas.yaml")


def _finite(_: Any, value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("number", _finite),
)
_VALIDATORS = {
    name: _Validator(schema) for name, schema in [*SCHEMAS.items(), ("question", _fields(_SHORT["question"]))]
}


def problems(record: Record, name: str) -> list[str]:
    """Violations of the schema of that name, a sentence each."""
    errors = (jsonschema.exceptions.best_match([error]) for error in _VALIDATORS[name].iter_errors(record))
    return sorted(f"record{error.json_path[1:]}: {error.message}"[:300] for error in errors)


def validate(record: Record) -> None:
    """Raises ValueError with all violations of the schema, and of the relations between status, time and error."""
    name = kind(record)
    result = problems(record, name)
    if name == "benchmark" and not result:
        time, timed, error = record["time_us"], record["status"] == "timed", record["error"]
        if timed != (time is not None):
            result.append(f"record.status is {record['status']} but record.time_us is {time}")
        if timed == bool(record["reason"]):
            result.append(f"record.status is {record['status']} but record.reason is {record['reason']!r}")
        if time is not None and not time["p20"] <= time["p50"] <= time["p80"]:
            result.append(f"record.time_us is not in order: p20 {time['p20']}, p50 {time['p50']}, p80 {time['p80']}")
        if timed and error and not error["value"] <= error["allowed"]:
            result.append("record.error is larger than allowed, but the status is timed")
    if result:
        raise ValueError("; ".join(result))


def rounded(value: float | None) -> float | None:
    """Round to four significant digits; infinities and NaN become 1e308."""
    if value is None:
        return None
    if value != value or value in (float("inf"), float("-inf")):
        return 1e308
    return float(f"{value:.4g}")


def key(record: Record) -> str:
    """Identity of a row: group, case, shape, dtype, pass and provider."""
    return json.dumps([record[f] for f in ("group", "case", "shape", "dtype", "pass", "provider")], sort_keys=True)


def read(path: Path) -> list[Record]:
    """Records of a file, in order. Raises UserError if it is not a file of valid records."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: a file of records is JSON lines") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
            validate(record)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}, is not a record of this suite: {error}") from error
        records.append(record)
    return records


def write(path: Path, records: list[Record], own: Callable[[Record], object] | None = None) -> None:
    """Replace records with equal key(), or own(record), in a file and keep the others; the file is replaced atomically.

    An interrupted or partial run therefore loses nothing. With `own`, replaced records keep their line.
    """
    of = own or key
    for record in records:
        validate(record)
    kept = {of(record): record for record in read(path)} if path.exists() else {}
    for record in () if own else records:  # keeps the rows of a case together, in the order of the last run
        kept.pop(of(record), None)
    kept |= {of(record): record for record in records}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(json.dumps(record) + "\n" for record in kept.values()).encode())


def append(path: Path, record: Record) -> None:
    validate(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


def file_name(group: str, machine: Record) -> str:
    """One file per group and machine: kernels-nvidia-h200.jsonl, kernels-amd-epyc-avx-512-2-cores.jsonl."""
    return f"{group}-{slug(machine_name(machine))}{ENDING}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A record and its location."""

    file: str
    """File name in the folder."""
    line: int
    record: Record

    @property
    def kind(self) -> str:
        return kind(self.record)

    @property
    def machine(self) -> dict[str, Any]:
        return self.record["machine"]

    @property
    def location(self) -> str:
        return f"{self.file}:{self.line}"


def load(path: Path = RESULTS) -> list[Entry]:
    """All records of a folder or file with a machine, by file name and line.

    Raises UserError if there are none, or with file and line for an invalid one.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: give a file or folder of records")
    files = [path] if path.is_file() else sorted(path.glob(f"*{ENDING}"))
    entries = [Entry(file.name, line, record) for file in files for line, record in enumerate(read(file), 1)]
    entries = [entry for entry in entries if entry.kind not in COUNTED]
    if not entries:
        raise UserError(f"{path} holds no records (lines in files named *.jsonl): run python -m benchmarks")
    return entries
