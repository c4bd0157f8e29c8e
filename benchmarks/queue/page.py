"""Predictions and outcomes of the queue's questions, as docs/gpu-predictions.md has them."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import records
from benchmarks.measure.machine import ROOT, machine_name
from benchmarks.measure.records import Record
from benchmarks.measure.text_table import markdown, number
from benchmarks.queue.questions import Question
from fasttfm.errors import UserError

PAGE = ROOT / "docs" / "gpu-predictions.md"
_BEGIN, _END = "<!-- queue -->\n", "<!-- end of queue -->\n"


def text(questions: Sequence[Question], known: Sequence[Record]) -> str:
    """A table of every number that is asked for: its prediction, and the last outcome on each machine."""
    rows = []
    for question in questions:
        of = [record for record in known if record["question"] == question.name]
        for expected in question.answers:
            before = "" if expected.before is None else number(expected.before)
            asked = [
                (f"{number(a['measured'])} ({machine_name(r['machine'])}, {r['machine']['time'][:10]}): {a['verdict']}")
                for r in of
                for a in r["answers"]
                if a["what"] == expected.what and a["measured"] is not None
            ]
            outcome = "; ".join(asked) or "not asked yet"
            rows.append(
                [question.name, f"{expected.what}, {expected.unit}", before, number(expected.predicted), outcome]
            )
    return markdown(["Question", "Number", "Before", "Predicted", "Outcome"], rows)


def write(questions: Sequence[Question], results: Path) -> None:
    """Puts the table of the records in a folder into the page, between its marks. Raises UserError without a folder."""
    if not results.is_dir():
        raise UserError(f"--results {results} does not exist: give a folder of records")
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    PAGE.write_text(f"{head}{_BEGIN}\n{text(questions, load(results))}\n\n{_END}{tail}", encoding="utf-8")


def load(results: Path) -> list[Record]:
    """The queue's records of a folder."""
    return [record for file in sorted(results.glob(f"queue-*{records.ENDING}")) for record in records.read(file)]
