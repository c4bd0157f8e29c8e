"""SQuAD files: what is read, and the one line that a wrong file ends in."""

import copy
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from fasttfm.data.tokenizer import train_tokenizer
from fasttfm.errors import UserError
from fasttfm_pretraining.data.squad import Answer, read_squad
from fasttfm_pretraining.data.task_inputs import Markers, answer_tokens, join, question_windows

CONTEXT = "The Normans gave their name to Normandy, a region in France."
WHERE = [{"text": "France", "answer_start": 53}, {"text": "in France", "answer_start": 50}]
ASKED = [
    {"id": "q1", "question": "Where is Normandy?", "answers": WHERE},
    {"id": "q2", "question": "Who?", "answers": [{"text": "The Normans", "answer_start": 0}]},
]
NORMANS = {"title": "Normans", "paragraphs": [{"context": CONTEXT, "qas": ASKED}]}
FILE = {"version": "1.1", "data": [{"title": "Empty", "paragraphs": []}, NORMANS]}
CUT = json.dumps(FILE, indent=1)[:200]


def write(folder: Path, content: object, name: str = "squad.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def changed(*path, value):
    """FILE with one thing at a path of keys put in the place of another, or left out where value is None."""
    content = copy.deepcopy(FILE)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return content


PARAGRAPH = ("data", 1, "paragraphs", 0)
SPOT = "article 2, paragraph 1"
FIRST = (*PARAGRAPH, "qas", 0)
SECOND = (*PARAGRAPH, "qas", 1)


def test_questions_come_with_all_their_answers_and_those_of_version_2_may_have_none(tmp_path):
    data = read_squad(write(tmp_path, FILE))
    assert [question.id for question in data.questions] == ["q1", "q2"]
    assert data.questions[0].answers == (Answer("France", 53), Answer("in France", 50))
    assert data.questions[0].context == CONTEXT
    assert not data.may_be_impossible
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(json.dumps(FILE).encode()))
    assert read_squad(tmp_path / "packed.json.gz") == data
    assert read_squad(write(tmp_path, changed("version", value="v2.0"))).may_be_impossible
    impossible = {**ASKED[1], "is_impossible": True, "answers": [], "plausible_answers": ASKED[1]["answers"]}
    assert read_squad(write(tmp_path, changed(*SECOND, value=impossible))).questions[1].answers == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "holds no object with a list named data"),
        ({"data": []}, "has no question"),
        (changed("data", 1, value=7), "article 2: is an integer, must be an object"),
        (changed(*PARAGRAPH, "context", value=None), f"{SPOT}: has no context"),
        (changed(*SECOND, "id", value=3), f"{SPOT}, question 2: id is an integer, must be a string"),
        (changed(*SECOND, "id", value="q1"), "two questions have the id 'q1'"),
        (changed(*FIRST, "is_impossible", value="no"), f"{SPOT}, question 1 (q1): is_impossible is 'no'"),
        (changed(*FIRST, "is_impossible", value=True), "is impossible and yet has 2 answers"),
        (
            changed(*FIRST, "answers", 1, "answer_start", value=51),
            f"{SPOT}, question 1 (q1), answer 2: the context has 'n France.' at answer_start 51, not 'in France'",
        ),
        (changed(*FIRST, "answers", 0, "answer_start", value=-9), "at answer_start -9"),
        (changed(*FIRST, "answers", 0, "text", value=" "), "answer 1: is empty"),
        (CUT, f"is truncated at line {len(CUT.splitlines())}, column "),
        (b'{"data":\n "\xff"}', "line 2 is not valid UTF-8"),
    ],
)
def test_a_wrong_file_says_where(tmp_path, content, message):
    path = tmp_path / "squad.json"
    path.write_bytes(content) if isinstance(content, bytes) else write(tmp_path, content)
    with pytest.raises(UserError) as error:
        read_squad(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="no such file"):
        read_squad(tmp_path / "none.json")


# Windows

MARKERS = Markers(2, 3, 3)


def tokenizer_of(*lines: str, vocab_size: int = 300):
    return train_tokenizer([*lines] * 3, vocab_size=vocab_size)


def test_an_answer_s_tokens_decode_to_its_text_and_none_points_to_the_first_marker(tmp_path):
    tokenizer = tokenizer_of(CONTEXT, "Where is Normandy? Who?")
    data = read_squad(write(tmp_path, FILE))
    windows = question_windows(data.questions, tokenizer, MARKERS, max_length=200, doc_stride=50)
    assert len(windows) == 2
    for window in windows:
        first, last = window.answer
        assert first > 0
        answer = data.questions[window.question].answers[0]
        text = CONTEXT[window.spans[first - window.first, 0] : window.spans[last - window.first, 1]]
        assert answer.text in text
        assert tokenizer.decode(window.row.tokens[first : last + 1]) == text.strip()
    data = read_squad(write(tmp_path, changed(*SECOND, "answers", value=[])))
    windows = question_windows(data.questions, tokenizer, MARKERS, max_length=200, doc_stride=50)
    assert windows[1].answer == (0, 0)


def test_a_character_that_is_spelt_in_bytes_is_in_its_answer():
    text = "aaa \u4e2d aaa"
    tokenizer = train_tokenizer(["aaa bbb"] * 4, vocab_size=270)
    spans = np.array(tokenizer.spans(text))
    first, last = answer_tokens(spans, 4, 5)
    assert tokenizer.decode(tokenizer.encode(text)[first : last + 1]).strip() == "\u4e2d"


def test_windows_cover_the_context_and_each_token_is_best_in_one(tmp_path):
    data = read_squad(write(tmp_path, FILE))
    tokenizer = tokenizer_of("The in a", vocab_size=270)
    whole = tokenizer.encode(CONTEXT)
    windows = [
        window
        for window in question_windows(data.questions, tokenizer, MARKERS, max_length=30, doc_stride=7)
        if window.question == 1
    ]
    width = 30 - 3 - len(tokenizer.encode("Who?"))
    assert len(windows) > 2
    owned: list[int] = []
    for number, window in enumerate(windows):
        part = window.row.tokens[window.first : -1].tolist()
        assert part == whole[7 * number : 7 * number + width]
        assert len(window.row.tokens) <= 30
        owned += [7 * number + position for position in np.flatnonzero(window.best)]
    assert sorted(owned) == list(range(len(whole)))
    # the answer, at the context's beginning, is in the first window alone
    assert [window.answer != (0, 0) for window in windows] == [True] + [False] * (len(windows) - 1)


def test_join_cuts_the_longer_text():
    row = join(Markers(7, 8, 9), [10, 11, 12, 13], [20, 21], max_length=6)
    assert row.tokens.tolist() == [7, 10, 8, 20, 21, 9] or row.tokens.tolist() == [7, 10, 11, 8, 20, 9]
    assert join(Markers(7, 8, 9), [10, 11], [20, 21], max_length=9).second == 4
    alone = join(Markers(7, 8, 9), [10, 11, 12], None, max_length=4)
    assert (alone.tokens.tolist(), alone.second) == ([7, 10, 11, 9], 4)
