"""Questions for a device, of questions.yaml: what each decides, the command that answers it, and what was predicted."""

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
"""A prediction is reached within a tenth."""
SHIP, TAKE_BACK, ASK_AGAIN = "ship", "take back", "ask again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """One number that a question asks for, and what was predicted of it."""

    what: str
    predicted: float
    unit: str = "us"
    before: float | None = None
    """Measurement before the change in question."""
    row: dict[str, Any] | None = None
    """Fields of the record, or of an item of its `measured`, that has the number; a mapping names a part of one."""
    over: dict[str, Any] | None = None
    """Fields of a second record: the number is its value over the first's, as of a peer's time over ours."""
    value: str = "time_us.p50"
    """Path of the number in a record, names joined by dots."""
    line: str | None = None
    """In place of row: a regular expression whose group is the number, in the last line of the output that has it.
    A group that takes no part is 0."""
    higher: bool = False
    """Whether more is better; so it is of a ratio (over)."""

    def outcome(self, measured: float | None, verdict: str, why: str = "") -> Record:
        """The answer as the queue's record has it."""
        return {
            "what": self.what, "unit": self.unit, "before": self.before, "predicted": self.predicted,
            "measured": measured, "verdict": verdict, "why": why,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    name: str
    decides: str
    command: str
    """Begins with python or a program on the PATH; {results} and {prepared} are folders."""
    seconds: int
    """The most that it may take."""
    measures: str
    """Patterns of the files that the answer is about: with none of them changed it need not be asked again."""
    answers: tuple[Expected, ...]
    compiles: str | None = None
    """A command for the stand-in that compiles what the question launches; None: its own."""
    needs: str | None = None
    """A folder of what was prepared, without which it cannot be asked."""


def read(path: Path = FILE) -> list[Question]:
    """The questions of a file, most worth first. Raises UserError for one that cannot be asked."""
    try:
        given = parse_yaml(path.read_bytes(), dict)
    except Malformed as error:
        raise UserError(f"{path.name} {error}") from error
    result = []
    for name, fields in given.items():
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
                raise UserError(f"{where}: measures names {pattern}, and no file of the checkout is called so")
        result.append(Question(**{**fields, "name": name, "answers": answers}))
    return result


def _check(expected: Expected, where: str) -> None:
    if (expected.row is None) == (expected.line is None) or (expected.over is not None and expected.row is None):
        raise UserError(f"{where}: {expected.what} needs either row, and over if it is a ratio, or line")
    try:
        if expected.line is not None and re.compile(expected.line).groups != 1:
            raise UserError(f"{where}: line of {expected.what} needs one group, the number")
    except re.error as error:
        raise UserError(f"{where}: line of {expected.what} is no regular expression: {error}") from None


def digest(question: Question) -> str:
    """The state of what a question measures: its command and the content of the files."""
    found = {name for each in question.measures.split() for name in glob.glob(each, root_dir=ROOT, recursive=True)}
    result = hashlib.sha256(question.command.encode())
    for path in sorted(ROOT / name for name in found):
        if path.is_file() and path.suffix != ".pyc":
            result.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return result.hexdigest()[:16]


def outcomes(question: Question, records: Iterable[Record], output: str) -> list[Record]:
    """The question's numbers in the records that its command wrote, and in its output."""
    rows = list(_rows(records))
    return [_outcome(expected, rows, output) for expected in question.answers]


def _rows(records: Iterable[Record]) -> Iterator[Record]:
    """The records, and each item of those that hold several."""
    for record in records:
        yield record
        yield from ({**item, "benchmark": record["benchmark"]} for item in record.get("measured", ()))


def _outcome(expected: Expected, rows: list[Record], output: str) -> Record:
    if expected.line is not None:
        found = re.findall(expected.line, output)
        try:
            measured = float(found[-1] or 0) if found else None
        except ValueError:
            return expected.outcome(None, ASK_AGAIN, f"{found[-1]!r} is no number")
        return expected.outcome(measured, verdict(expected, measured), "" if found else "its output has no such line")
    values = []
    for wanted in filter(None, (expected.row, expected.over)):
        row = next((each for each in reversed(rows) if _fits(each, wanted)), None)
        if row is None:
            return expected.outcome(None, ASK_AGAIN, "not measured")
        if row.get("status") == "wrong":
            said = f"{row['provider']} is wrong: {row['reason']}"
            return expected.outcome(None, TAKE_BACK if wanted is expected.row else ASK_AGAIN, said)
        value = _at(row, expected.value)
        if not value:
            return expected.outcome(None, ASK_AGAIN, str(row.get("reason") or f"no {expected.value}"))
        if noisy(row):
            return expected.outcome(value, ASK_AGAIN, "noisy")
        values.append(value)
    measured = values[0] if len(values) == 1 else values[1] / values[0]
    return expected.outcome(measured, verdict(expected, measured))


def _fits(row: Any, wanted: dict[str, Any]) -> bool:
    return isinstance(row, dict) and all(
        _fits(row.get(name), value) if isinstance(value, dict) else row.get(name) == value
        for name, value in wanted.items()
    )


def _at(row: Any, place: str) -> float | None:
    for name in place.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return float(row) if isinstance(row, (int, float)) and not isinstance(row, bool) else None


def verdict(expected: Expected, measured: float | None) -> str:
    """ship: as predicted, or better than what was; take back: worse than what was, or than predicted if nothing was."""
    if measured is None:
        return ASK_AGAIN
    sign = -1.0 if expected.higher or expected.over is not None else 1.0
    bound = expected.predicted * (_REACHED if sign > 0 else 1 / _REACHED)
    if sign * measured <= sign * bound:
        return SHIP
    return SHIP if expected.before is not None and sign * measured < sign * expected.before else TAKE_BACK
