"""The records of a folder with the file and line that each stands in, and how they are named for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.measure import records
from benchmarks.measure.machine import machine_name
from benchmarks.measure.records import ENDINGS, RESULTS, Record
from fasttfm.errors import UserError


@dataclass(frozen=True, slots=True)
class Entry:
    """One record where it stands."""

    file: str
    """Name in the folder."""
    line: int
    record: Record

    @property
    def kind(self) -> str:
        return records.kind(self.record)

    @property
    def machine(self) -> dict[str, Any]:
        """Older kinds of records keep these fields beside their own."""
        return self.record.get("machine", self.record)

    @property
    def timed(self) -> bool:
        return self.record.get("status") == "timed"

    @property
    def provider(self) -> str:
        return self.record["provider"]

    @property
    def p50(self) -> float:
        """The median of a timed row, microseconds."""
        return self.record["time_us"]["p50"]

    @property
    def location(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Every record of a folder, or of one file, in the order of file names and lines."""

    folder: Path
    entries: tuple[Entry, ...]

    @property
    def suite(self) -> tuple[Entry, ...]:
        """Those that the suite's harness wrote: a case, a provider and a status each."""
        return tuple(entry for entry in self.entries if entry.kind == "benchmark")

    @property
    def machines(self) -> list[str]:
        """Every machine that a record names, CPUs called so."""
        return sorted({machine_name(entry.machine) for entry in self.entries})

    def of_kind(self, kind: str) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.kind == kind)


def load(path: Path = RESULTS) -> Loaded:
    """The records of a folder or file. Raises UserError, naming file and line, where there are none or a bad one."""
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in ENDINGS)
    else:
        raise UserError(f"{path} does not exist: give a folder of records or one file of them")
    entries = tuple(
        Entry(file.name, line, record)
        for file in files
        for line, record in enumerate(records.read(file), 1)
        if records.kind(record) not in records.COUNTED
    )
    if not entries:
        raise UserError(f"{path} holds no records (lines in files named *.jsonl or *.json): run python -m benchmarks")
    return Loaded(path, entries)


Key = TypeVar("Key")


def grouped(entries: Iterable[Entry], key: Callable[[Entry], Key]) -> dict[Key, list[Entry]]:
    """Entries by key, in order of appearance."""
    result: dict[Key, list[Entry]] = {}
    for entry in entries:
        result.setdefault(key(entry), []).append(entry)
    return result


def shape_text(shape: dict[str, Any]) -> str:
    """B=2 H=8 L=27 causal; a flag that is off, and dropout 0, go without saying."""
    words = []
    for name, value in shape.items():
        if value is True:
            words.append(name)
        elif value is not False and value is not None and not (name == "dropout" and value == 0):
            words.append(f"{name}={value:,}" if isinstance(value, int) else f"{name}={value}")
    return " ".join(words)


_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def short_dtype(dtype: str) -> str:
    return _DTYPES.get(dtype, dtype)
