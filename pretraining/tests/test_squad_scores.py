"""Exact match and F1 by the official rules, worked out by hand."""

import random

import numpy as np
import pytest

from fasttfm.errors import UserError
from fasttfm_pretraining.data.answers import best_span, predict_answers, read_predictions, write_json
from fasttfm_pretraining.data.squad import Answer, Question, SquadData
from fasttfm_pretraining.data.squad_scores import evaluate, exact_match, f1, normalize_answer, question_scores
from fasttfm_pretraining.data.task_inputs import Row, Window


def question(name: str, *golds: str) -> Question:
    return Question(name, "?", " ".join(golds) or "text", tuple(Answer(gold, 0) for gold in golds))


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("a An THE Normans", "normans"),
        ("U.S.A. a.m.", "usa am"),  # punctuation goes before articles are looked for
        ("the-cat l'a b", "thecat la b"),  # a hyphen goes without a space
        ("theory another", "theory another"),  # articles are whole words
        ("  two\t words\n", "two words"),
        (
            "\u2013 \u201equote\u201c \u00a35 a day",
            "\u2013 \u201equote\u201c \u00a35 day",
        ),  # only ASCII punctuation goes
        ("na\u00efve \u00c9tude", "na\u00efve \u00e9tude"),
    ],
)
def test_normalization(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("gold", "predicted", "exact", "overlap"),
    [
        ("the Norman conquest", "Norman Conquest!", 1.0, 1.0),
        ("in 1066", "1066", 0.0, 2 * 1 / (2 + 1)),
        ("one two three", "two four", 0.0, 2 * 1 / (3 + 2)),
        ("one one two", "one one one", 0.0, 2 * 2 / (3 + 3)),  # a word counts as often as both have it
        ("one", "two", 0.0, 0.0),
        ("one", "", 0.0, 0.0),
        ("the", "a", 1.0, 1.0),  # nothing is left of either
    ],
)
def test_one_pair(gold, predicted, exact, overlap):
    assert exact_match(gold, predicted) == exact
    assert f1(gold, predicted) == pytest.approx(overlap)


@pytest.mark.parametrize(
    ("golds", "predicted", "may_be_impossible", "exact", "overlap"),
    [
        (["north of Paris", "Paris"], "paris.", False, 1.0, 1.0),  # the best gold answer counts
        (["north of Paris", "Paris"], "north", False, 0.0, 0.5),
        # 2.0 drops a gold answer of which nothing is left; if none stays, the empty answer is right
        (["the"], "", True, 1.0, 1.0),
        (["the"], "", False, 1.0, 0.0),
        (["the", "cat"], "", True, 0.0, 0.0),
    ],
)
def test_the_scores_of_a_question(golds, predicted, may_be_impossible, exact, overlap):
    given = question_scores(question("q", *golds), predicted, may_be_impossible=may_be_impossible)
    assert given == (exact, pytest.approx(overlap))
    assert f1("the", "a", empty_agrees=False) == 0.0


DATA = SquadData((question("a", "one"), question("b", "two three"), question("c"), question("d")), True)


def test_means_are_over_questions_of_each_kind():
    report = evaluate(DATA, {"a": "one", "b": "two", "c": "", "d": "guess"})
    assert (report.all.exact, report.all.f1) == (50.0, pytest.approx(100 * (1 + 2 / 3 + 1) / 4))
    assert (report.answerable.exact, report.answerable.f1) == (50.0, pytest.approx(100 * (1 + 2 / 3) / 2))
    assert (report.impossible.exact, report.impossible.f1) == (50.0, 50.0)
    assert report.best_exact is None


def test_a_question_without_a_prediction_scores_nothing_in_1_1_and_does_not_count_in_2_0():
    report = evaluate(SquadData(DATA.questions[:2], False), {"a": "one"})
    assert (report.all.exact, report.all.questions, report.all.unanswered) == (50.0, 2, 1)
    assert "without a prediction: 1" in str(report.all)
    report = evaluate(DATA, {"a": "one", "c": "guess"}, {"a": 0.0, "c": 1.0})
    assert (report.all.exact, report.all.questions, report.all.unanswered) == (50.0, 2, 2)
    assert (report.answerable.exact, report.impossible.exact) == (100.0, 0.0)
    assert report.best_exact == (100.0, 0.0)
    with pytest.raises(UserError, match="none of the questions"):
        evaluate(DATA, {"z": "one"})
    with pytest.raises(UserError, match="lack question 'b'"):
        evaluate(DATA, {"a": "one", "b": "two"}, {"a": 0.0})


RIGHT = {"a": "one", "b": "two three", "c": "guess", "d": "guess"}


def test_above_the_threshold_a_prediction_is_empty_and_without_one_predictions_stand():
    null = {"a": 0.1, "b": 0.9, "c": 0.5, "d": 0.95}
    report = evaluate(DATA, RIGHT, null, threshold=0.5)
    # b becomes empty and wrong, d empty and right; c is not above the threshold
    assert (report.all.exact, report.answerable.exact, report.impossible.exact) == (50.0, 50.0, 50.0)
    null = {"a": 7.5, "b": 2.0, "c": 9.0, "d": 8.0}  # of a model that abstains above 7.8
    assert evaluate(DATA, RIGHT | {"c": "", "d": ""}, null).all.exact == 100.0


def test_the_best_threshold_is_that_of_a_search_through_all():
    drawn = random.Random(0)
    for _ in range(40):
        predictions = {name: drawn.choice(["", "one", "two", "two three", "guess"]) for name in "abcd"}
        null = {name: drawn.choice([-3.0, -1.0, 0.5, 0.5, 4.0]) for name in "abcd"}
        report = evaluate(DATA, predictions, null, threshold=0.0)
        for measure, (best, threshold) in (("exact", report.best_exact), ("f1", report.best_f1)):
            tried = (threshold, -9.0, *null.values())
            reached = [getattr(evaluate(DATA, predictions, null, threshold=at).all, measure) for at in tried]
            assert best == pytest.approx(max(reached)) == reached[0]


# From scores to answers


def window(number: int, tokens: int, first: int = 3, best: list[bool] | None = None) -> Window:
    spans = np.array([(2 * i, 2 * i + 2) for i in range(tokens)])
    row = Row(np.arange(first + tokens + 1), first)
    return Window(number, row, spans, np.array(best or [True] * tokens), (0, 0))


def scores(length: int, **positions: float) -> np.ndarray:
    values = np.zeros(length)
    for position, value in positions.items():
        values[int(position[1:])] = value
    return values


def test_a_span_ends_after_it_starts_and_is_not_too_long():
    given = window(0, 6)
    starts, ends = scores(10, p7=5.0, p4=4.0), scores(10, p4=3.5, p8=2.0)
    assert best_span(given, starts, ends, max_answer=30) == (7.5, 1, 1)
    # the best end lies before the best start; with one token at most only 4 to 4 and the like are left
    assert best_span(given, starts, scores(10, p8=2.0), max_answer=2) == (7.0, 4, 5)
    assert best_span(given, starts, scores(10, p8=2.0), max_answer=1)[0] == 5.0
    unseen = window(0, 6, best=[True] * 4 + [False] * 2)
    assert best_span(unseen, starts, scores(10, p8=2.0), max_answer=30)[0] == 6.0
    markers = scores(10, p0=50.0, p1=40.0, p9=40.0, p5=1.0)  # marker and question are no answer
    assert best_span(given, markers, markers, max_answer=30)[1:] == (2, 2)


def test_the_best_window_answers_and_the_lowest_null_counts():
    data = SquadData((Question("q", "?", "aabbccdd", ()),), True)
    windows = [window(0, 4), window(0, 4)]
    first = scores(8, p0=1.0, p3=2.0), scores(8, p0=1.0, p3=2.0)  # null 2, best 4: "aa"
    second = scores(8, p0=3.0, p4=1.0), scores(8, p0=3.0, p5=1.5)  # null 6, best 2.5
    predictions = predict_answers(data, windows, [first, second])
    assert predictions.answers == {"q": "aa"}
    assert predictions.null_scores == {"q": pytest.approx(2.0 - 4.0)}
    assert [predictions.texts(at) for at in (-2.5, -2.0, None)] == [{"q": ""}, {"q": "aa"}, {"q": "aa"}]


def test_predictions_are_written_as_the_official_script_reads_them(tmp_path):
    write_json(tmp_path / "predictions.json", {"q": "M\u00fcnchen"})
    assert read_predictions(tmp_path / "predictions.json") == {"q": "M\u00fcnchen"}
    with pytest.raises(UserError, match="'q' has str, it must be a number"):
        read_predictions(tmp_path / "predictions.json", float)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match="no object of ids and answers"):
        read_predictions(tmp_path / "list.json")
