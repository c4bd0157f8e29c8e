"""Files of records: written, read and checked; schemas.yaml has what a record holds, in short for JSON Schemas.

One JSON line per case and provider, or per run of a program, which says its name under `benchmark`. Every record has
the machine that it is of, except those of what is counted and not measured.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.measure.machine import machine_name, slug
from fasttfm.errors import UserError
from fasttfm.system.parsing import parse_json, parse_yaml

Schema = dict[str, Any]
_SHORT = parse_yaml((Path(__file__).parent / "schemas.yaml").read_bytes())


def _schema(short: Any) -> Schema:
    """The JSON Schema of a type's name, of one that is written out, or of an object's fields."""
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
"""Kinds of records that no machine has a part in: they are checked, and stand in no report of measurements."""
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
"""Of files of records: what else lies beside them is left out."""


def kind(record: Record) -> str:
    """Return the name in SCHEMAS that a record is meant to follow. Raises ValueError for none."""
    if not isinstance(record, dict):
        raise ValueError(f"a line that is no JSON object but {type(record).__name__}")
    if "schema" in record:
        return "benchmark"
    if record.get("benchmark") in SCHEMAS:
        return record["benchmark"]
    raise ValueError(
        f"a record with the fields {sorted(record)[:5]}... is of no known kind: see benchmarks/measure/schemas.yaml"
    )


def _finite(_: Any, value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("number", _finite),
)
_VALIDATORS = {name: _Validator(schema) for name, schema in SCHEMAS.items()}


def problems(record: Record, name: str) -> list[str]:
    """Say what is wrong with a record under the schema of that name, a sentence each."""
    errors = (jsonschema.exceptions.best_match([error]) for error in _VALIDATORS[name].iter_errors(record))
    return sorted(f"record{error.json_path[1:]}: {error.message}"[:300] for error in errors)


def validate(record: Record) -> None:
    """Raises ValueError with everything that is wrong with a record, beyond its schema too: no time without reason."""
    name = kind(record)
    result = problems(record, name)
    if name == "benchmark" and not result:
        if (record["status"] == "timed") != (record["time_us"] is not None):
            result.append(f"record.status is {record['status']} but record.time_us is {record['time_us']}")
        if (record["status"] == "timed") == bool(record["reason"]):
            result.append(f"record.status is {record['status']} but record.reason is {record['reason']!r}")
        time = record["time_us"]
        if time is not None and not time["p20"] <= time["p50"] <= time["p80"]:
            result.append(f"record.time_us is not in order: p20 {time['p20']}, p50 {time['p50']}, p80 {time['p80']}")
        if (
            record["status"] == "timed"
            and record["error"]
            and not record["error"]["value"] <= record["error"]["allowed"]
        ):
            result.append("record.error is larger than allowed, and yet there is a time")
    if result:
        raise ValueError("; ".join(result))


def rounded(value: float | None) -> float | None:
    """To four significant digits, which is more than a measurement is good for; infinite and undefined become 1e308."""
    if value is None:
        return None
    if value != value or value in (float("inf"), float("-inf")):
        return 1e308
    return float(f"{value:.4g}")


def key(record: Record) -> str:
    """The same for two measurements of the same thing."""
    return json.dumps([record[f] for f in ("group", "case", "shape", "dtype", "pass", "provider")], sort_keys=True)


def read(path: Path) -> list[Record]:
    """The records of a file, in order. Raises UserError where it is not one that this suite wrote."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8: a file of records is JSON lines") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
            validate(record)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}, is no record of this suite: {error}") from error
        records.append(record)
    return records


def write(path: Path, records: list[Record], own: Callable[[Record], object] | None = None) -> None:
    """Puts records in the place of those of the same case, shape, dtype, pass and provider; other lines stay.

    So an interrupted run, or one of a part of the cases, loses nothing. The file is replaced as a whole. own: what
    tells records of another kind apart, each of which keeps its line.
    """
    of = own or key
    for record in records:
        validate(record)
    kept = {of(record): record for record in read(path)} if path.exists() else {}
    for record in () if own else records:  # a case's rows stay together and in the order of the last run
        kept.pop(of(record), None)
    kept |= {of(record): record for record in records}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept.values()), encoding="utf-8")
    temporary.replace(path)


def append(path: Path, record: Record) -> None:
    """Adds a record as a line."""
    validate(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


def file_name(group: str, machine: Record) -> str:
    """kernels-nvidia-h200.jsonl, kernels-amd-epyc-avx-512-2-cores.jsonl: one file a group and machine."""
    return f"{group}-{slug(machine_name(machine))}{ENDING}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One record where it stands."""

    file: str
    """Name in the folder."""
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
    """Every record of a folder, or of one file, in the order of file names and lines, without those of no machine.

    Raises UserError, naming file and line, where there are none or a bad one.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: give a folder of records or one file of them")
    files = [path] if path.is_file() else sorted(path.glob(f"*{ENDING}"))
    entries = [Entry(file.name, line, record) for file in files for line, record in enumerate(read(file), 1)]
    entries = [entry for entry in entries if entry.kind not in COUNTED]
    if not entries:
        raise UserError(f"{path} holds no records (lines in files named *.jsonl): run python -m benchmarks")
    return entries
