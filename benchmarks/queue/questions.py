"""Questions for a device: reads questions.yaml and finds the answers in records and output."""

import glob
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure.machine import ROOT, noisy
from benchmarks.measure.records import Record, problems
from fasttfm.errors import UserError
from fasttfm.system.parsing import Malformed, parse_yaml

FILE = Path(__file__).parent / "questions.yaml"
_REACHED = 1.1
"""Tolerance of a prediction: 10%."""
SHIP, TAKE_BACK, ASK_AGAIN = "ship", "take back", "ask again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """One number of a question, and its prediction."""

    what: str
    predicted: float
    unit: str = "us"
    before: float | None = None
    """Measurement before the change in question."""
    row: dict[str, Any] | None = None
    """Fields of the record with the number, or of an item of its `measured`; a mapping matches a part of a field."""
    over: dict[str, Any] | None = None
    """Fields of a second record: the number is its value over the first's, such as a peer's time over ours."""
    value: str = "time_us.p50"
    """Path of the number in a record, separated by dots."""
    line: str | None = None
    """Instead of row: a regular expression whose group is the number; the last match in the output counts. An empty
    group is 0."""
    higher: bool = False
    """Larger is better; always so for a ratio (over)."""

    def outcome(self, measured: float | None, verdict: str, why: str = "") -> Record:
        """The answer in the queue's record."""
        return {
            "what": self.what, "unit": self.unit, "before": self.before, "predicted": self.predicted,
            "measured": measured, "verdict": verdict, "why": why,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    name: str
    decides: str
    command: str
    """Starts with python or a program on the PATH; {results} and {prepared} are folders."""
    seconds: int
    """Time limit."""
    measures: str
    """Patterns of the measured files: an answer holds until one of them changes."""
    answers: tuple[Expected, ...]
    compiles: str | None = None
    """Command for the stand-in that compiles the question's kernels; None: `command`."""
    needs: str | None = None
    """Required subfolder of the prepared folder."""


def read(path: Path = FILE) -> list[Question]:
    """Questions of a file, most valuable first. Raises UserError for an invalid one."""
    try:
        questions = parse_yaml(path.read_bytes(), dict)
    except Malformed as error:
        raise UserError(f"{path.name} {error}") from error
    result = []
    for name, fields in questions.items():
        where = f"{path.name}: {name}"
        if wrong := problems(fields, "question"):
            raise UserError(f"{where}{wrong[0].removeprefix('record')}")
        if not fields["answers"]:
            raise UserError(f"{where} needs an answer")
        answers = tuple(Expected(**each) for each in fields["answers"])
        for expected in answers:
            _check(expected, where)
        for pattern in fields["measures"].split():
            if not glob.glob(pattern, root_dir=ROOT, recursive=True):
                raise UserError(f"{where}: measures has the pattern {pattern}, which matches no file of the checkout")
        result.append(Question(**{**fields, "name": name, "answers": answers}))
    return result


def _check(expected: Expected, where: str) -> None:
    if (expected.row is None) == (expected.line is None) or (expected.over is not None and expected.row is None):
        raise UserError(f"{where}: {expected.what} needs either row (and over for a ratio) or line")
    try:
        if expected.line is not None and re.compile(expected.line).groups != 1:
            raise UserError(f"{where}: line of {expected.what} needs one group, the number")
    except re.error as error:
        raise UserError(f"{where}: line of {expected.what} is not a regular expression: {error}") from None


def digest(question: Question) -> str:
    """Digest of a question's command and measured files."""
    patterns = question.measures.split()
    names = {name for pattern in patterns for name in glob.glob(pattern, root_dir=ROOT, recursive=True)}
    result = hashlib.sha256(question.command.encode())
    for path in sorted(ROOT / name for name in names):
        if path.is_file() and path.suffix != ".pyc":
            result.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return result.hexdigest()[:16]


def outcomes(question: Question, records: Iterable[Record], output: str) -> list[Record]:
    """The question's numbers, from the records and the output of its command."""
    rows = list(_rows(records))
    return [_outcome(expected, rows, output) for expected in question.answers]


def _rows(records: Iterable[Record]) -> Iterator[Record]:
    """The records, and the items of their `measured`."""
    for record in records:
        yield record
        yield from ({**item, "benchmark": record["benchmark"]} for item in record.get("measured", ()))


def _outcome(expected: Expected, rows: list[Record], output: str) -> Record:
    if expected.line is not None:
        matches = re.findall(expected.line, output)
        try:
            measured = float(matches[-1] or 0) if matches else None
        except ValueError:
            return expected.outcome(None, ASK_AGAIN, f"{matches[-1]!r} is not a number")
        return expected.outcome(measured, verdict(expected, measured), "" if matches else "no line of output matches")
    values = []
    for fields in filter(None, (expected.row, expected.over)):
        row = next((row for row in reversed(rows) if _fits(row, fields)), None)
        if row is None:
            return expected.outcome(None, ASK_AGAIN, "not measured")
        if row.get("status") == "wrong":
            why = f"{row['provider']} is wrong: {row['reason']}"
            return expected.outcome(None, TAKE_BACK if fields is expected.row else ASK_AGAIN, why)
        value = _at(row, expected.value)
        if not value:
            return expected.outcome(None, ASK_AGAIN, str(row.get("reason") or f"no {expected.value}"))
        if noisy(row):
            return expected.outcome(value, ASK_AGAIN, "noisy")
        values.append(value)
    measured = values[0] if len(values) == 1 else values[1] / values[0]
    return expected.outcome(measured, verdict(expected, measured))


def _fits(row: Any, fields: dict[str, Any]) -> bool:
    return isinstance(row, dict) and all(
        _fits(row.get(name), value) if isinstance(value, dict) else row.get(name) == value
        for name, value in fields.items()
    )


def _at(row: Any, path: str) -> float | None:
    for name in path.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return float(row) if isinstance(row, (int, float)) and not isinstance(row, bool) else None


def verdict(expected: Expected, measured: float | None) -> str:
    """ship if as predicted, or better than before; take back if worse than before (or than predicted, without one)."""
    if measured is None:
        return ASK_AGAIN
    sign = -1.0 if expected.higher or expected.over is not None else 1.0
    bound = expected.predicted * (_REACHED if sign > 0 else 1 / _REACHED)
    if sign * measured <= sign * bound:
        return SHIP
    return SHIP if expected.before is not None and sign * measured < sign * expected.before else TAKE_BACK
