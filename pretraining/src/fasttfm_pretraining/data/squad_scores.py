"""Exact match and F1 of predicted answers, by the rules of SQuAD's official scripts.

Both sides are lower-cased, lose ASCII punctuation and the articles a, an and the, and have their white space
collapsed. A prediction scores the best that it reaches against any gold answer. SQuAD 2.0's script differs from 1.1's
in that the right answer to an impossible question is the empty one, gold answers of which normalisation leaves nothing
do not count, a question without a prediction is left out of the means instead of scoring 0, and a probability of there
being no answer may turn a prediction into the empty one.
Source: evaluate-v1.1.py and evaluate-v2.0.py of Rajpurkar et al.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fasttfm.errors import UserError
from fasttfm_pretraining.data.squad import Question, SquadData

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class SquadScore:
    """Means over questions, in percent."""

    exact: float
    f1: float
    questions: int
    unanswered: int = 0
    """Questions without a prediction: of SQuAD 1.1 they score 0, of 2.0 they are not among `questions`."""

    def __str__(self) -> str:
        missing = f"; without a prediction: {self.unanswered:,}" if self.unanswered else ""
        return f"exact match {self.exact:.2f}, F1 {self.f1:.2f} over {self.questions:,} questions{missing}"


@dataclass(frozen=True, slots=True)
class SquadReport:
    """Scores that the official script reports."""

    all: SquadScore
    answerable: SquadScore | None
    """Of the questions that have an answer; None where there is none."""
    impossible: SquadScore | None
    """Of those that have none."""
    best_exact: tuple[float, float] | None = None
    """Exact match, and the threshold that reaches it: the best on these very questions. None without null scores."""
    best_f1: tuple[float, float] | None = None


def normalize_answer(text: str) -> str:
    """Lower case without ASCII punctuation and English articles, single spaces."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(gold: str, predicted: str) -> float:
    """1.0 where both are the same once normalised, else 0.0."""
    return float(normalize_answer(gold) == normalize_answer(predicted))


def f1(gold: str, predicted: str, *, empty_agrees: bool = True) -> float:
    """Harmonic mean of precision and recall over words, in [0, 1].

    empty_agrees: where either has no word, 1 if neither has any (SQuAD 2.0); else that is 0 (1.1).
    """
    wanted, given = normalize_answer(gold).split(), normalize_answer(predicted).split()
    if not wanted or not given:
        return float(empty_agrees and wanted == given)
    same = sum((Counter(wanted) & Counter(given)).values())
    return 2 * same / (len(wanted) + len(given))


def question_scores(question: Question, predicted: str, *, may_be_impossible: bool) -> tuple[float, float]:
    """(exact match, F1) of one prediction, each in [0, 1]."""
    golds = [answer.text for answer in question.answers]
    if may_be_impossible:
        golds = [gold for gold in golds if normalize_answer(gold)] or [""]
    return (
        max(exact_match(gold, predicted) for gold in golds),
        max(f1(gold, predicted, empty_agrees=may_be_impossible) for gold in golds),
    )


def evaluate(
    data: SquadData,
    predictions: Mapping[str, str],
    null_scores: Mapping[str, float] | None = None,
    threshold: float | None = None,
) -> SquadReport:
    """Score predictions (question's id -> text, "" for no answer) against the gold answers of data.

    null_scores: question's id -> how much there seems to be no answer, a probability or any score; above threshold the
    prediction counts as empty (None: predictions stand as they are, made by the model's own threshold). With them, the
    best thresholds are searched too. Raises UserError where null scores do not cover the predictions, and where no
    question has one.
    """
    raw = {
        question.id: question_scores(question, predictions[question.id], may_be_impossible=data.may_be_impossible)
        for question in data.questions
        if question.id in predictions
    }
    if not raw:
        raise UserError("the predictions have none of the questions' ids: give those of this file")
    counted = [question for question in data.questions if question.id in raw or not data.may_be_impossible]
    has_answer = {question.id: bool(question.answers) for question in counted}
    missing = len(data) - len(raw)
    scores = raw
    best: list[tuple[float, float] | None] = [None, None]
    if null_scores is not None:
        if lacking := raw.keys() - null_scores.keys():
            raise UserError(f"the null scores lack question {min(lacking)!r}: give those of the same prediction")
        if threshold is not None:
            scores = {
                each: (float(not has_answer[each]),) * 2 if null_scores[each] > threshold else score
                for each, score in raw.items()
            }
        best = [best_threshold(raw, which, predictions, null_scores, has_answer) for which in (0, 1)]
    answerable, impossible = ([each for each, has in has_answer.items() if has is wanted] for wanted in (True, False))
    return SquadReport(
        all=_mean(scores, list(has_answer), missing),
        answerable=_mean(scores, answerable) if answerable else None,
        impossible=_mean(scores, impossible) if impossible else None,
        best_exact=best[0],
        best_f1=best[1],
    )


def best_threshold(
    scores: Mapping[str, tuple[float, float]],
    which: int,
    predictions: Mapping[str, str],
    null_scores: Mapping[str, float],
    has_answer: Mapping[str, bool],
) -> tuple[float, float]:
    """(Best mean score in percent, the threshold that reaches it): a prediction stands where its null score is at most
    the threshold.

    scores: question's id -> (exact match, F1) of the predictions as they stand; which: 0 or 1 of these. Where nothing
    beats leaving every question unanswered, the threshold is below every null score (the official script says 0.0,
    which with scores that are not probabilities would not leave all of them unanswered).
    """
    order = sorted((each for each in null_scores if each in scores), key=lambda each: null_scores[each])
    current = best = float(sum(not has for has in has_answer.values()))
    threshold = min(0.0, null_scores[order[0]] - 1.0) if order else 0.0
    for position, each in enumerate(order):
        if has_answer[each]:
            current += scores[each][which]
        elif predictions[each]:
            current -= 1
        # those of an equal null score stand or fall together
        is_cut = position + 1 == len(order) or null_scores[order[position + 1]] > null_scores[each]
        if is_cut and current > best:
            best, threshold = current, null_scores[each]
    return 100 * best / max(len(has_answer), 1), threshold


def _mean(scores: Mapping[str, tuple[float, float]], ids: list[str], missing: int = 0) -> SquadScore:
    given = [scores[each] for each in ids if each in scores]
    exact, overlap = (100 * sum(score[which] for score in given) / len(ids) for which in (0, 1))
    return SquadScore(exact, overlap, len(ids), missing)
