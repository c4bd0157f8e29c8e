"""Tables with a header: CSV, TSV and JSON lines, plain or compressed; rows know their line."""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttfm.data.corpus import TextFile
from fasttfm.errors import UserError
from fasttfm.system.parsing import Malformed, parse_json, type_name

_FORMS = {".csv": "csv", ".tsv": "tsv", ".txt": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
PACKED = (".gz", ".bz2", ".xz", ".zst")
csv.field_size_limit(1 << 24)


@dataclass(frozen=True, slots=True)
class Row:
    """One row."""

    values: dict[str, str]
    """Column -> text."""
    where: str
    """File and line, for messages."""


def read_table(path: Path, needed: Sequence[str] = ()) -> list[Row]:
    """Read all rows of a file by its extension: .csv, .tsv (no quotes) or .jsonl (one object per line).

    needed: columns that every row must have. Raises UserError with the line for a row with more or fewer fields than
    the header, a line that is not a JSON object, and a file without rows.
    """
    rows = list(_rows(path))
    if not rows:
        raise UserError(f"{path}: has no rows: give a header and at least one row")
    for row in rows:
        if missing := [name for name in needed if name not in row.values]:
            raise UserError(f"{row.where}: has no column {missing[0]}; it has {', '.join(row.values)}")
    return rows


def columns_of(path: Path) -> list[str]:
    """Return the columns of a file's first row; none if it has no row. Raises UserError as read_table() does."""
    return list(next((row.values for row in _rows(path)), ()))


def _rows(path: Path) -> Iterator[Row]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    form = _FORMS.get(suffixes[-1] if suffixes else "")
    if form is None:
        raise UserError(
            f"{path}: its name must end in .csv, .tsv or .jsonl (and .gz, .bz2, .xz or .zst if packed): rename it"
        )
    return _objects(path) if form == "jsonl" else _separated(path, form)


def _separated(path: Path, form: str) -> Iterator[Row]:
    lines = (f"{line}\n" for line in TextFile(path))
    if form == "csv":
        reader = csv.reader(lines, strict=True)
    else:
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for fields in reader:
            where = f"{path}: line {line:,}"
            line = reader.line_num + 1
            if header is None:
                header = fields
                if len(set(header)) < len(header):
                    twice = next(name for name in header if header.count(name) > 1)
                    raise UserError(f"{where}: two columns are named {twice!r}: rename one")
            elif fields:
                if len(fields) != len(header):
                    raise UserError(
                        f"{where}: has {len(fields)} fields, the header has {len(header)} ({', '.join(header)}): is it "
                        "truncated, or is a separator in a text?"
                    )
                yield Row(dict(zip(header, fields)), where)
    except csv.Error as error:
        raise UserError(f"{path}: line {line:,}: {error}: the row that begins there is truncated or wrong") from None


def _objects(path: Path) -> Iterator[Row]:
    for number, line in enumerate(TextFile(path), start=1):
        where = f"{path}: line {number:,}"
        if not line.strip():
            continue
        try:
            given = parse_json(line, dict)
        except Malformed as error:
            raise UserError(f"{where}: {error}: write one object a line") from None
        yield Row({str(name): _text(value, str(name), where) for name, value in given.items()}, where)


def _text(value: Any, name: str, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):  # a label; true and false as JSON writes them
        return json.dumps(value)
    raise UserError(f"{where}: {name} is {type_name(value)}, it must be a text or a number")
