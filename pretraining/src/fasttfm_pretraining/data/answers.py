"""Answer extraction: the best span over all windows, or no answer, from start and end scores.

A span scores the sum of its start and end scores; "no answer" scores that of the first marker, the lowest over all
windows. The null score is the score of "no answer" minus that of the best span.
Source: Devlin et al. 2019, sections 4.2 and 4.3.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fasttfm.errors import UserError
from fasttfm.system.files import replace_file
from fasttfm_pretraining.data.squad import SquadData, read_json_text
from fasttfm_pretraining.data.task_inputs import Window


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions by question id."""

    answers: dict[str, str]
    """Text of the best span, even if "no answer" scores higher."""
    null_scores: dict[str, float]
    """Score of no answer minus that of the best span."""

    def texts(self, threshold: float | None) -> dict[str, str]:
        """Answers by question id, "" if the null score exceeds threshold (None: every question gets an answer)."""
        if threshold is None:
            return self.answers
        return {each: "" if self.null_scores[each] > threshold else text for each, text in self.answers.items()}


def best_span(
    window: Window, starts: np.ndarray, ends: np.ndarray, *, max_answer: int, candidates: int = 20
) -> tuple[float, int, int] | None:
    """(score, first, last context token) of the best allowed span of a window; None if it has none.

    starts, ends (S,): scores of the row's places. A span ends at or after its start, has at most max_answer tokens, and
    its start is one that this window shows best. candidates: so many of the best starts and of the best ends are looked
    at, as the original program does.
    """
    count = len(window.spans)
    starts, ends = starts[window.first : window.first + count], ends[window.first : window.first + count]
    first = np.argsort(-starts, kind="stable")[:candidates]
    last = np.argsort(-ends, kind="stable")[:candidates]
    length = last[None, :] - first[:, None]
    allowed = (length >= 0) & (length < max_answer) & window.best[first][:, None]
    if not allowed.any():
        return None
    scores = np.where(allowed, starts[first][:, None] + ends[last][None, :], -np.inf)
    row, column = np.unravel_index(int(scores.argmax()), scores.shape)
    return float(scores[row, column]), int(first[row]), int(last[column])


def predict_answers(
    data: SquadData, windows: Sequence[Window], scores: Iterable[tuple[np.ndarray, np.ndarray]], *, max_answer: int = 30
) -> Predictions:
    """Best answer to every question. scores: start and end scores (S,) of each window."""
    best = [(-np.inf, "")] * len(data)
    null = np.full(len(data), np.inf)
    for window, (starts, ends) in zip(windows, scores, strict=True):
        null[window.question] = min(null[window.question], float(starts[0] + ends[0]))
        span = best_span(window, starts, ends, max_answer=max_answer)
        if span is not None and span[0] > best[window.question][0]:
            score, first, last = span
            context = data.questions[window.question].context
            text = context[window.spans[first, 0] : window.spans[last, 1]].strip()
            best[window.question] = score, text
    ids = [question.id for question in data.questions]
    texts = {each: text for each, (_, text) in zip(ids, best)}
    # a question without any allowed span is as good as surely unanswerable, and JSON has no infinity
    differences = {
        each: float(n - score) if np.isfinite(score) else 1e9 for each, n, (score, _) in zip(ids, null, best)
    }
    return Predictions(texts, differences)


def write_json(path: Path, values: dict) -> None:
    """Write an object for the official scripts: one JSON text, UTF-8."""
    replace_file(path, (json.dumps(values, ensure_ascii=False, indent=1) + "\n").encode())


def read_predictions(path: Path, kind: type = str) -> dict:
    """Read a file of question id -> text, or null score with kind float. Raises UserError for anything else."""
    given = read_json_text(path)
    if not isinstance(given, dict):
        raise UserError(f"{path}: holds no object of ids and answers: give what fasttfm finetune predict wrote")
    for each, value in given.items():
        if not isinstance(value, str if kind is str else int | float) or isinstance(value, bool):
            wanted = "a text" if kind is str else "a number"
            raise UserError(f"{path}: {each!r} has {type(value).__name__}, it must be {wanted}")
    return given
