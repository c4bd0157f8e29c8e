"""What a line of benchmarks/results says: its schema, how a file of them is written, read and checked.

One JSON line per case and provider. The kinds that are older than the suite and are written by programs of their own
(end_to_end, operator_overhead, launch_overhead, launch_counts, executed, compile_matrix, workers, int8_products,
preparing, pretraining, gpt_and_bert, finetuning, students, encoders, serving, curves, padding_epoch, speedrun,
continuous, precisions, reuse, the examples) keep their fields and have schemas of their own; kind(record) tells them
apart. The schemas are JSON Schema, to be read:

    python -c "import json, benchmarks.measure.records as r; print(json.dumps(r.SCHEMAS, indent=2))"
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

try:
    import jsonschema
except ModuleNotFoundError:
    raise SystemExit('benchmarks: jsonschema is not installed: pip install "fasttfm[bench]"') from None

from benchmarks.measure.proof_schemas import COMPILE_MATRIX, EXECUTED
from benchmarks.measure.schema_parts import AT_LEAST_ONE as _AT_LEAST_ONE
from benchmarks.measure.schema_parts import COUNT as _COUNT
from benchmarks.measure.schema_parts import MACHINE
from benchmarks.measure.schema_parts import MACHINE_FIELDS as _MACHINE_FIELDS
from benchmarks.measure.schema_parts import MAYBE as _MAYBE
from benchmarks.measure.schema_parts import POSITIVE as _POSITIVE
from benchmarks.measure.schema_parts import RATE as _RATE
from benchmarks.measure.schema_parts import SCALAR as _SCALAR
from benchmarks.measure.schema_parts import TEXT as _TEXT
from benchmarks.measure.schema_parts import fields as _object
from benchmarks.measure.schema_parts import or_null as _or_null
from fasttfm.errors import UserError

Record = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results"
GROUPS = ("kernels", "blocks", "training_step", "decoding", "padding", "end_to_end")
STATUSES = ("timed", "refused", "absent", "wrong")

BENCHMARK = _object(
    {
        "schema": {"const": 1},
        "group": {"enum": list(GROUPS)},
        "case": _TEXT,
        "shape": {"type": "object", "additionalProperties": _SCALAR},
        "dtype": {"enum": ["float32", "float16", "bfloat16"]},
        "pass": _TEXT,
        "provider": _TEXT,
        "status": {"enum": list(STATUSES)},
        "reason": {"type": ["string", "null"]},
        "clock": _TEXT,
        "time_us": _or_null(_object({"p20": _POSITIVE, "p50": _POSITIVE, "p80": _POSITIVE, "runs": _AT_LEAST_ONE})),
        "throughput": _or_null(_object({"value": _RATE, "unit": _TEXT})),
        "tflop_per_s": _MAYBE,
        "gb_per_s": _MAYBE,
        "roofline": _or_null(
            _object(
                {
                    "floor_us": _RATE,
                    "share": _RATE,
                    "ceilings": _object({"gb_per_s": _POSITIVE, "tflop_per_s": _POSITIVE}),
                }
            )
        ),
        "peak_bytes": {"type": ["integer", "null"], "minimum": 0},
        "launches": {"type": ["integer", "null"], "minimum": 0},
        "compile_s": _MAYBE,
        "error": _or_null(_object({"value": {"type": "number"}, "allowed": _RATE, "measure": _TEXT})),
        "seed": {"type": "integer"},
        "level": {"enum": ["smoke", "quick", "standard", "full"]},
        "threads": _COUNT,
        "details": {"type": "object"},
        "machine": MACHINE,
    },
    optional=["details"],
)
"""Times in microseconds, memory in bytes, compile_s (the first call) in seconds. throughput: useful units a second."""

END_TO_END = _object(
    {
        "benchmark": {"const": "end_to_end"},
        "corpus": _TEXT,
        "train_command": _TEXT,
        "training_minutes": _RATE,
        "updates": _COUNT,
        "target_tokens": _COUNT,
        "target_tokens_per_second": _RATE,
        "padding": _RATE,
        "translate_seconds": _RATE,
        "lines": _COUNT,
        "bleu": _RATE,
        "bleu_signature": _TEXT,
        "chrf": _RATE,
        "chrf_signature": _TEXT,
        "training_curve": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "validation_curve": {"type": "array", "items": {"type": "object"}},
        **_MACHINE_FIELDS,
    },
    more=True,
)
"""From raw text to BLEU, written by `python -m benchmarks.end_to_end`."""

_OVERHEAD = {"type": "object", "additionalProperties": {"type": "object"}}
OPERATOR_OVERHEAD = _object(
    {
        "benchmark": {"const": "operator_overhead"},
        "measured": {"type": "object", "required": ["computation_us", "fasttfm"]},
        "machine": MACHINE,
    }
)
"""Microseconds of the host for one operator call, written by `python -m benchmarks.operator_overhead`."""

LAUNCH_OVERHEAD = _object(
    {"benchmark": {"const": "launch_overhead"}, "chip": _TEXT, "measured": _OVERHEAD, "machine": MACHINE}
)
"""Microseconds of the host for one launch, written by `python -m benchmarks.launch_overhead`."""

LAUNCH_COUNTS = _object(
    {
        "benchmark": {"const": "launch_counts"},
        "launches": {"type": "array", "items": {"type": "object", "required": ["route", "launches"]}},
        "machine": MACHINE,
    }
)
"""Launches of a training step by route of attention, written by `python -m benchmarks.launch_counts`."""

_ROWS = {"type": "array", "items": {"type": "object"}, "minItems": 1}
WORKERS = _object(
    {"benchmark": {"const": "workers"}, "minutes": _POSITIVE, "nice": _COUNT, "measured": _ROWS, "machine": MACHINE}
)
"""Target tokens a second by workers and busy neighbours, written by `python -m benchmarks.workers`."""

INT8_PRODUCTS = _object(
    {"benchmark": {"const": "int8_products"}, "threads": _COUNT, "measured": _ROWS, "machine": MACHINE}
)
"""Microseconds of a product by rows, shape and operator, written by `python -m benchmarks.int8_products`."""

PREPARING = _object({"benchmark": {"const": "preparing"}, "measured": _ROWS, "machine": MACHINE})
"""Seconds and peak memory by pairs, written by `python -m benchmarks.preparing`."""

CURVES = _object(
    {
        "benchmark": {"const": "curves"},
        "comparison": _TEXT,
        "runs": {"type": "object", "additionalProperties": _ROWS, "minProperties": 2},
        "machine": MACHINE,
    }
)
"""Losses by update of trainings that differ in one choice, written by `python -m benchmarks.curves`."""

PADDING_EPOCH = _object(
    {
        "benchmark": {"const": "padding_epoch"},
        "corpus": _TEXT,
        "pairs": _AT_LEAST_ONE,
        "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "max_tokens": _AT_LEAST_ONE,
        "threads": _AT_LEAST_ONE,
        "measured": _ROWS,
        "published": _ROWS,
        "machine": MACHINE,
    }
)
"""Seconds of (a share of) an epoch by order of the pairs, written by `python -m benchmarks.padding_epoch`."""

PRETRAINING = _object(
    {
        "benchmark": {"const": "pretraining"},
        "kind": _TEXT,
        "preset": _TEXT,
        "text": {"type": "array", "items": _TEXT, "minItems": 1},
        "vocab_size": _AT_LEAST_ONE,
        "minutes": _POSITIVE,
        "measured": _ROWS,
        "machine": MACHINE,
    }
)
"""Tokens/s and held-out bits per byte by provider, written by `python -m benchmarks.pretraining`."""

GPT_AND_BERT = _object(
    {
        "benchmark": {"const": "gpt_and_bert"},
        "text": {"type": "array", "items": _TEXT, "minItems": 2},
        "vocab_size": _AT_LEAST_ONE,
        "minutes": _POSITIVE,
        "measured": {**_ROWS, "minItems": 2, "maxItems": 2},
        "machine": MACHINE,
    }
)
"""What both tell of held-out text after equal minutes, written by `python -m benchmarks.gpt_and_bert`."""

SPEEDRUN = _object(
    {
        "benchmark": {"const": "speedrun"},
        "seed": _COUNT,
        "train_command": _TEXT,
        "minutes": _RATE,
        "minutes_of": {"type": "object", "additionalProperties": _RATE},
        "bleu": _RATE,
        "bleu_signature": _TEXT,
        "updates": _AT_LEAST_ONE,
        "target_tokens": _AT_LEAST_ONE,
        "training_curve": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "note": _TEXT,
        "machine": MACHINE,
    },
    optional=("note",),
)
"""Minutes from text to BLEU on Multi30k's validation set, written by `python -m benchmarks.speedrun`."""

ENCODERS = _object(
    {
        "benchmark": {"const": "encoders"},
        "comparison": {"enum": ["albert", "electra"]},
        "text": {"type": "array", "items": _TEXT, "minItems": 1},
        "vocab_size": _AT_LEAST_ONE,
        "threads": _AT_LEAST_ONE,
        "measured": _ROWS,
        "runs": {"type": "object", "additionalProperties": _ROWS, "minProperties": 2},
        "machine": MACHINE,
    },
    optional=("measured", "runs"),
)
"""Rows by way of sharing, or a probe by minutes of training, written by `python -m benchmarks.encoders`."""

FINETUNING = _object(
    {
        "benchmark": {"const": "finetuning"},
        "preset": _TEXT,
        "text": {"type": "array", "items": _TEXT},
        "body": _or_null(_TEXT),
        "minutes": _or_null(_POSITIVE),
        "epochs": _AT_LEAST_ONE,
        "vocab_size": _or_null(_AT_LEAST_ONE),
        "measured": _ROWS,
        "machine": MACHINE,
    }
)
"""F1 and exact match with and without pre-training, written by `python -m benchmarks.finetuning`."""

STUDENTS = _object(
    {
        "benchmark": {"const": "students"},
        "text": _TEXT,
        "sentences": _AT_LEAST_ONE,
        "measured": _ROWS,
        "machine": MACHINE,
    }
)
"""BLEU and sentences/s of a teacher and its student, written by `python -m benchmarks.students`."""

SERVING = _object({"benchmark": {"const": "serving"}, "text": _TEXT, "measured": _ROWS, "machine": MACHINE})
"""Sentences a second and what clients wait (p50_ms, p99_ms), written by `python -m benchmarks.serving`."""

CONTINUOUS = _object(
    {
        "benchmark": {"const": "continuous"},
        "text": _TEXT,
        "precision": _TEXT,
        "lines": _COUNT,
        "measured": _ROWS,
        "machine": MACHINE,
    }
)
"""Tokens a second with sentences that join a running search and without, by `python -m benchmarks.continuous`."""

REUSE = _object(
    {"benchmark": {"const": "reuse"}, "length": _COUNT, "threads": _COUNT, "measured": _ROWS, "machine": MACHINE}
)
"""What is won by keeping more between two tokens, written by `python -m benchmarks.reuse`."""

PRECISIONS = _object({"benchmark": {"const": "precisions"}, "measured": _ROWS, "machine": MACHINE})
"""BLEU by test set and precision, written by `python -m benchmarks.precisions`."""

EXAMPLE = _object(
    {"example": _TEXT, "seed": {"type": "integer"}, "updates": _COUNT, "errors": _OVERHEAD, **_MACHINE_FIELDS},
    more=True,
)
"""What a program of examples/ found."""

SCHEMAS = {
    "benchmark": BENCHMARK,
    "end_to_end": END_TO_END,
    "operator_overhead": OPERATOR_OVERHEAD,
    "launch_overhead": LAUNCH_OVERHEAD,
    "launch_counts": LAUNCH_COUNTS,
    "executed": EXECUTED,
    "compile_matrix": COMPILE_MATRIX,
    "workers": WORKERS,
    "int8_products": INT8_PRODUCTS,
    "preparing": PREPARING,
    "serving": SERVING,
    "curves": CURVES,
    "speedrun": SPEEDRUN,
    "padding_epoch": PADDING_EPOCH,
    "pretraining": PRETRAINING,
    "gpt_and_bert": GPT_AND_BERT,
    "finetuning": FINETUNING,
    "students": STUDENTS,
    "continuous": CONTINUOUS,
    "precisions": PRECISIONS,
    "reuse": REUSE,
    "encoders": ENCODERS,
    "example": EXAMPLE,
}


def kind(record: Record) -> str:
    """Which of SCHEMAS a record is meant to follow. Raises ValueError for none."""
    if not isinstance(record, dict):
        raise ValueError(f"a line that is no JSON object but {type(record).__name__}")
    if "schema" in record:
        return "benchmark"
    if record.get("benchmark") in SCHEMAS:
        return record["benchmark"]
    if "example" in record:
        return "example"
    raise ValueError(f"a record with the fields {sorted(record)[:5]}... is of no known kind: see SCHEMAS in records.py")


def _finite(_: Any, value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("number", _finite),
)
_VALIDATORS = {name: _Validator(schema) for name, schema in SCHEMAS.items()}


def problems(record: Record, name: str) -> list[str]:
    """What is wrong with a record under the schema of that name, a sentence each."""
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


def rounded(value: float | None, digits: int = 4) -> float | None:
    """To significant digits, which is more than a measurement is good for; infinite and undefined become 1e308."""
    if value is None:
        return None
    if value != value or value in (float("inf"), float("-inf")):
        return 1e308
    return float(f"{value:.{digits}g}")


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
            record = json.loads(line)
            validate(record)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}, is no record of this suite: {error}") from error
        records.append(record)
    return records


def write(path: Path, records: list[Record]) -> None:
    """Puts records in the place of those of the same case, shape, dtype, pass and provider; other lines stay.

    So an interrupted run, or one of a part of the cases, loses nothing. The file is replaced as a whole.
    """
    for record in records:
        validate(record)
    kept = {key(record): record for record in read(path)} if path.exists() else {}
    # a case's rows stay together and in the order of the last run
    for record in records:
        kept.pop(key(record), None)
    kept |= {key(record): record for record in records}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept.values()), encoding="utf-8")
    temporary.replace(path)


def file_name(group: str, machine: Record) -> str:
    """kernels-nvidia-h200.jsonl: one file a group and machine."""
    name = machine.get("device") or f"{machine['processor']} {machine['cores']} cores"
    return f"{group}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.jsonl"
