"""Questions for a device, of questions.yaml: what each decides, the command that answers it, and what was predicted."""

import glob
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.measure.machine import ROOT, noisy
from benchmarks.measure.records import Record
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
    """What stood before the change that is asked about."""
    row: dict[str, Any] | None = None
    """Fields of the record, or of an item of its `measured`, that has the number; a mapping names a part of one."""
    over: dict[str, Any] | None = None
    """Fields of a second record: the number is its value over the first's, as of a peer's time over ours."""
    value: str = "time_us.p50"
    """Where a record has the number, names joined by dots."""
    line: str | None = None
    """In place of row: a regular expression whose group is the number, in the last line of the output that has it.
    A group that takes no part is 0."""
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


_TEXT, _NUMBER, _OBJECT = {"type": "string", "minLength": 1}, {"type": "number"}, {"type": "object"}
_EXPECTED = {
    "what": _TEXT, "predicted": _NUMBER, "unit": _TEXT, "before": _NUMBER, "row": _OBJECT, "over": _OBJECT,
    "value": _TEXT, "line": _TEXT, "higher": {"type": "boolean"},
}  # fmt: skip
_ANSWER = {"type": "object", "properties": _EXPECTED, "required": ["what", "predicted"], "additionalProperties": False}
_QUESTION = {
    "type": "object",
    "properties": {
        **dict.fromkeys(("decides", "command", "measures", "needs"), _TEXT),
        "compiles": {"type": "string"},
        "seconds": {"type": "integer", "minimum": 1},
        "answers": {"type": "array", "items": _ANSWER, "minItems": 1},
    },
    "required": ["decides", "command", "measures", "seconds", "answers"],
    "additionalProperties": False,
}
_VALIDATOR = jsonschema.Draft202012Validator(_QUESTION)


def read(path: Path = FILE) -> list[Question]:
    """The questions of a file, most worth first. Raises UserError for one that cannot be asked."""
    try:
        given = parse_yaml(path.read_bytes())
    except Malformed as error:
        raise UserError(f"{path.name} {error}") from error
    if not isinstance(given, dict) or not given:
        raise UserError(f"{path.name} must map names to questions")
    result = []
    for name, question in given.items():
        where = f"{path.name}: {name}"
        if (wrong := jsonschema.exceptions.best_match(_VALIDATOR.iter_errors(question))) is not None:
            raise UserError(f"{where}{wrong.json_path[1:]}: {wrong.message}")
        answers = tuple(Expected(**each) for each in question["answers"])
        measures = tuple(question["measures"].split())
        result.append(Question(**{**question, "name": name, "answers": answers, "measures": measures}))
        _check(result[-1], where)
    return result


def _check(question: Question, where: str) -> None:
    for expected in question.answers:
        if (expected.row is None) == (expected.line is None) or (expected.over is not None and expected.row is None):
            raise UserError(f"{where}: {expected.what} needs either row, and over if it is a ratio, or line")
        try:
            if expected.line is not None and re.compile(expected.line).groups != 1:
                raise UserError(f"{where}: line of {expected.what} needs one group, the number")
        except re.error as error:
            raise UserError(f"{where}: line of {expected.what} is no regular expression: {error}") from None
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
            if isinstance(item, dict):
                yield {**item, "benchmark": record["benchmark"]}


def _outcome(expected: Expected, rows: list[Record], output: str) -> Outcome:
    if expected.line is not None:
        found = re.findall(expected.line, output)
        try:
            measured = float(found[-1] or 0) if found else None
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
        if not value:
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
    return float(row) if isinstance(row, (int, float)) and not isinstance(row, bool) else None


def verdict(expected: Expected, measured: float | None) -> str:
    """ship: as predicted, or better than what was; take back: worse than what was, or than predicted if nothing was."""
    if measured is None:
        return ASK_AGAIN
    sign = -1.0 if expected.more_is_better else 1.0
    bound = expected.predicted * (_REACHED if sign > 0 else 1 / _REACHED)
    if sign * measured <= sign * bound:
        return SHIP
    return SHIP if expected.before is not None and sign * measured < sign * expected.before else TAKE_BACK
