"""Extractive question answering data: the official JSON of SQuAD 1.1 and 2.0, plain or compressed.

A file holds articles, an article paragraphs, a paragraph its text (the context) and questions; an answer is its text
and the character of the context where it begins. In 2.0 a question may be impossible: the context has no answer.
Source: Rajpurkar et al. 2016 (SQuAD 1.1), Rajpurkar et al. 2018 (2.0).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttfm.data.corpus import TextFile
from fasttfm.errors import UserError
from fasttfm.system.parsing import Malformed, field, parse_json

_ANYWHERE = "give the official JSON of SQuAD 1.1 or 2.0"


@dataclass(frozen=True, slots=True)
class Answer:
    """A passage of a context; context[start:start + len(text)] is text."""

    text: str
    start: int
    """In characters, from 0."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a context."""

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]
    """All annotated answers, of which the first is the training target; empty if the context has no answer."""


@dataclass(frozen=True, slots=True)
class SquadData:
    """All questions of a file."""

    questions: tuple[Question, ...]
    may_be_impossible: bool
    """Whether "no answer" is a possible answer: SQuAD 2.0."""

    def __len__(self) -> int:
        return len(self.questions)


def read_squad(path: Path | str, *, answered: bool = True) -> SquadData:
    """Read the questions of a file in the official form. answered: whether to read the answers.

    Raises UserError for broken JSON (with line and column), missing values, wrong types, and answers that do not occur
    at their offset (with article, paragraph and question).
    """
    path = Path(path)
    content = read_json_text(path)
    articles = _field(content, "data", list, str(path)) if isinstance(content, dict) else None
    if articles is None:
        raise UserError(f"{path}: holds no object with a list named data: {_ANYWHERE}")
    questions = list(_questions(articles, str(path), answered))
    if not questions:
        raise UserError(f"{path}: has no question: {_ANYWHERE}")
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise UserError(f"{path}: two questions have the id {question.id!r}, which predictions go by: change one")
        seen.add(question.id)
    version = str(content.get("version", ""))
    may_be_impossible = version.lower().lstrip("v").startswith("2") or any(not each.answers for each in questions)
    return SquadData(tuple(questions), may_be_impossible)


def read_json_text(path: Path) -> Any:
    """Read a JSON file, plain or compressed.

    Raises UserError as TextFile does; for broken JSON with line and column.
    """
    try:
        return parse_json("\n".join(TextFile(path)))
    except Malformed as error:
        raise UserError(f"{path}: {error}: copy or download it again") from None


def _questions(articles: list[Any], name: str, answered: bool) -> Iterator[Question]:
    for number, article in enumerate(articles, start=1):
        where = f"{name}: article {number:,}"
        for count, paragraph in enumerate(_field(article, "paragraphs", list, where), start=1):
            spot = f"{where}, paragraph {count:,}"
            context = _field(paragraph, "context", str, spot)
            for order, asked in enumerate(_field(paragraph, "qas", list, spot), start=1):
                yield _question(asked, context, f"{spot}, question {order:,}", answered)


def _question(asked: Any, context: str, where: str, answered: bool) -> Question:
    identity, text = _field(asked, "id", str, where), _field(asked, "question", str, where)
    if not answered:
        return Question(identity, text, context, ())
    where = f"{where} ({identity})"
    impossible = asked.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise UserError(f"{where}: is_impossible is {impossible!r}, it must be true or false: {_ANYWHERE}")
    given = _field(asked, "answers", list, where)
    if impossible and given:
        raise UserError(f"{where}: is impossible and yet has {len(given)} answers: leave one or the other out")
    answers = tuple(
        _answer(answer, context, f"{where}, answer {number}") for number, answer in enumerate(given, start=1)
    )
    return Question(identity, text, context, answers)


def _answer(answer: Any, context: str, where: str) -> Answer:
    text, start = _field(answer, "text", str, where), _field(answer, "answer_start", int, where)
    if not text.strip():
        raise UserError(f"{where}: is empty: give its text")
    if start < 0 or context[start : start + len(text)] != text:
        there = context[max(start, 0) : max(start, 0) + len(text)]
        raise UserError(
            f"{where}: the context has {_short(there)} at answer_start {start}, not {_short(text)}: correct "
            "answer_start (characters, not bytes, from 0)"
        )
    return Answer(text, start)


def _field(value: Any, name: str, kind: type, where: str) -> Any:
    return field(value, name, kind, where, remedy=_ANYWHERE)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
