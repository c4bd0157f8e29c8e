"""Questions for a device, of questions.yaml: what each decides, the command that answers it, and what was predicted."""

import glob
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.measure.machine import ROOT, noisy
from benchmarks.measure.records import Record
from fasttfm.errors import UserError
from fasttfm.parsing import parse_yaml

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
    """What stood before the change that is asked about."""
    row: dict[str, Any] | None = None
    """Fields of the record, or of an item of its `measured`, that has the number; a mapping names a part of one."""
    over: dict[str, Any] | None = None
    """Fields of a second record: the number is its value over the first's, as of a peer's time over ours."""
    value: str = "time_us.p50"
    """Where a record has the number, names joined by dots."""
    line: str | None = None
    """In place of row: a regular expression whose group is the number, in the last line of the output that has it."""
    higher: bool = False
    """Whether more is better; so it is of a ratio (over)."""

    @property
    def more_is_better(self) -> bool:
        return self.higher or self.over is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    name: str
    decides: str
    command: str
    """Begins with python or a program on the PATH; {results} and {prepared} are folders."""
    seconds: int
    """The most that it may take."""
    measures: tuple[str, ...]
    """Patterns of the files that the answer is about: with none of them changed it need not be asked again."""
    answers: tuple[Expected, ...]
    compiles: str | None = None
    """A command for the stand-in that compiles what the question launches; None: its own; "": nothing of ours."""
    needs: str | None = None
    """A folder of what was prepared, without which it cannot be asked."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One number as it came out."""

    expected: Expected
    measured: float | None
    verdict: str
    why: str = ""

    def record(self) -> Record:
        """The outcome as the queue's record has it."""
        e = self.expected
        return {
            "what": e.what, "unit": e.unit, "before": e.before, "predicted": e.predicted,
            "measured": self.measured, "verdict": self.verdict, "why": self.why,
        }  # fmt: skip


def _made(kind: type, given: Any, where: str) -> Any:
    """A dataclass of a mapping. Raises UserError for a field that is missing, unknown or of another type."""
    if not isinstance(given, dict):
        raise UserError(f"{where} must be a mapping, not {type(given).__name__}")
    known = {field.name: field for field in fields(kind)}
    if unknown := sorted(set(given) - set(known)):
        raise UserError(f"{where}: {unknown[0]} is not a field; fields are {', '.join(known)}")
    try:
        return kind(**given)
    except TypeError as error:
        raise UserError(f"{where}: {str(error).partition(' ')[2] or error}") from None


def read(path: Path = FILE) -> list[Question]:
    """The questions of a file, most worth first. Raises UserError for one that cannot be asked."""
    given = parse_yaml(path.read_bytes())
    if not isinstance(given, dict) or not given:
        raise UserError(f"{path.name} must map names to questions")
    result = []
    for name, question in given.items():
        where = f"{path.name}: {name}"
        if not isinstance(question, dict):
            raise UserError(f"{where} must be a mapping, not {type(question).__name__}")
        answers = question.get("answers") or []
        expected = tuple(_made(Expected, each, f"{where}: answer {number}") for number, each in enumerate(answers, 1))
        measures = tuple(str(question.get("measures", "")).split())
        made = _made(Question, {**question, "name": name, "answers": expected, "measures": measures}, where)
        _check(made, where)
        result.append(made)
    return result


def _check(question: Question, where: str) -> None:
    if not isinstance(question.command, str) or not question.command.strip():
        raise UserError(f"{where}: command must be a line of text, not {question.command!r}")
    if not isinstance(question.seconds, int) or question.seconds < 1:
        raise UserError(f"{where}: seconds must be a whole number of at least 1, not {question.seconds!r}")
    if not question.answers:
        raise UserError(f"{where}: answers is empty: write down what is predicted, before it is asked")
    for expected in question.answers:
        for name, of in (("predicted", expected.predicted), ("before", expected.before)):
            if isinstance(of, bool) or not (isinstance(of, (int, float)) or (of is None and name == "before")):
                raise UserError(f"{where}: {name} of {expected.what} must be a number, not {of!r}")
        for name, kind in (("row", dict), ("over", dict), ("line", str), ("value", str)):
            if not isinstance(getattr(expected, name), (kind, type(None))):
                raise UserError(f"{where}: {name} of {expected.what} must be a {kind.__name__}")
        if (expected.row is None) == (expected.line is None):
            raise UserError(f"{where}: {expected.what} needs either row or line")
        if expected.line is not None:
            try:
                groups = re.compile(expected.line).groups
            except re.error as error:
                raise UserError(f"{where}: line of {expected.what} is no regular expression: {error}") from None
            if groups != 1:
                raise UserError(f"{where}: line of {expected.what} needs one group, the number")
    for pattern in question.measures:
        if not glob.glob(pattern, root_dir=ROOT, recursive=True):
            raise UserError(f"{where}: measures names {pattern}, and no file of the checkout is called so")


def digest(question: Question) -> str:
    """The state of what a question measures: its command and the content of the files."""
    found = {name for pattern in question.measures for name in glob.glob(pattern, root_dir=ROOT, recursive=True)}
    result = hashlib.sha256(question.command.encode())
    for path in sorted(ROOT / name for name in found):
        if path.is_file() and path.suffix != ".pyc":
            result.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return result.hexdigest()[:16]


def outcomes(question: Question, records: Iterable[Record], output: str) -> list[Outcome]:
    """The question's numbers in the records that its command wrote, and in its output."""
    rows = list(_rows(records))
    return [_outcome(expected, rows, output) for expected in question.answers]


def _rows(records: Iterable[Record]) -> Iterable[Record]:
    """The records, and each item of those that hold several."""
    for record in records:
        yield record
        items = record.get("measured")
        for item in items if isinstance(items, list) else ():
            yield {**item, "benchmark": record["benchmark"]}


def _outcome(expected: Expected, rows: list[Record], output: str) -> Outcome:
    if expected.line is not None:
        found = re.findall(expected.line, output)
        try:
            measured = float(found[-1]) if found else None
        except ValueError:
            return Outcome(expected, None, ASK_AGAIN, f"{found[-1]!r} is no number")
        return Outcome(expected, measured, verdict(expected, measured), "" if found else "its output has no such line")
    values = []
    for wanted in (expected.row, expected.over):
        if wanted is None:
            continue
        row = next((each for each in reversed(rows) if _fits(each, wanted)), None)
        if row is None:
            return Outcome(expected, None, ASK_AGAIN, "not measured")
        if row.get("status") == "wrong":
            said = f"{row['provider']} is wrong: {row['reason']}"
            return Outcome(expected, None, TAKE_BACK if wanted is expected.row else ASK_AGAIN, said)
        value = _at(row, expected.value)
        if value is None:
            return Outcome(expected, None, ASK_AGAIN, str(row.get("reason") or f"no {expected.value}"))
        if noisy(row):
            return Outcome(expected, value, ASK_AGAIN, "noisy")
        values.append(value)
    measured = values[0] if len(values) == 1 else values[1] / values[0]
    return Outcome(expected, measured, verdict(expected, measured))


def _fits(row: Any, wanted: dict[str, Any]) -> bool:
    return isinstance(row, dict) and all(
        _fits(row.get(name), value) if isinstance(value, dict) else row.get(name) == value
        for name, value in wanted.items()
    )


def _at(row: Any, place: str) -> float | None:
    for name in place.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return None if row is None or isinstance(row, (str, bool, dict)) else float(row)


def verdict(expected: Expected, measured: float | None) -> str:
    """ship: as predicted, or better than what was; take back: worse than what was, or than predicted if nothing was."""
    if measured is None:
        return ASK_AGAIN
    sign = -1.0 if expected.more_is_better else 1.0
    bound = expected.predicted * (_REACHED if sign > 0 else 1 / _REACHED)
    if sign * measured <= sign * bound:
        return SHIP
    return SHIP if expected.before is not None and sign * measured < sign * expected.before else TAKE_BACK
