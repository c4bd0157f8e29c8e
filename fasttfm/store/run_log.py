"""Reads train.log.jsonl, the log of a run; fasttfm.training.log writes it and documents the records."""

from pathlib import Path
from typing import Any

from fasttfm.system.parsing import Malformed, parse_json

LOG_FILE = "train.log.jsonl"


def read_log(model_dir: str | Path) -> list[dict[str, Any]]:
    """All records of a model directory, oldest first; skips lines damaged by a kill or power cut.

    A record has a string `kind` and an integer `step`; other values are numbers, booleans, null or lists of integers.
    """
    path = Path(model_dir) / LOG_FILE
    records = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            record = parse_json(line, dict)
        except Malformed:
            continue
        if _is_record(record):
            records.append(record)
    return records


def _is_record(record: dict[str, Any]) -> bool:
    kind, step = record.get("kind"), record.get("step")
    others = (value for name, value in record.items() if name not in ("kind", "step"))
    return isinstance(kind, str) and type(step) is int and all(map(_is_plain, others))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(type(each) is int for each in value)
    return value is None or isinstance(value, int | float)
