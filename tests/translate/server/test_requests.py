"""Costly requests, which are refused before they cost much or are quoted at length."""

import json

import pytest
from served import Slow, ask, imported, serving
from waiting import PATIENCE

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.translate.server.limits import Limits
from fasttfm.translate.server.requests import Refused, read_request
from fasttfm.translate.server.texts import Text
from fasttfm.translate.translator import Translation

LONG = "<" * 1_000_000
HOSTILE = {
    "a long text": {"text": LONG},
    "a long text to split": {"text": LONG, "split_sentences": "en"},
    "white space alone": {"text": " " * 1_000_000},
    "lines": {"text": "\n" * 1_000_000},
    "texts": {"text": [""] * 300_000},
    "a prefix": {"text": "a", "prefix": LONG},
    "a term": {"text": "a", "terminology": {LONG: "b"}},
    "the translation of a term": {"text": "a", "terminology": {"a": LONG}},
    "a language": {"text": "a", "split_sentences": LONG},
    "a model": {"text": "a", "model": LONG},
    "a penalty": {"text": "a", "length_penalty": LONG},
    "a field": {"text": "a", LONG: 1},
    "fields": {"text": "a", **{str(number): 1 for number in range(90_000)}},
}
BODIES = {
    **{name: json.dumps(given) for name, given in HOSTILE.items()},
    "a field twice": f'{{"{LONG}": 1, "{LONG}": 1}}',
    "a field twice among many": "{" + ",".join(f'"{number % 99_999}": 1' for number in range(100_000)) + "}",
    "a number": "1" * 1_000_000,
    "a depth": "[" * 1_000_000,
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_costly_body_is_refused_before_tokenization_and_quoted_in_part(translator, monkeypatch, body):
    monkeypatch.setattr(Tokenizer, "encode", lambda _, line: [5] * max(1, len(line)) if len(line) < 20_000 else 1 / 0)
    with pytest.raises(Refused) as refused:
        read_request(body.encode(), {"small": translator}, Limits())
    assert refused.value.status == 422
    assert len(refused.value.detail) <= 600
    assert len(refused.value.detail.splitlines()) == 1


def test_alignments_of_an_imported_model_are_refused(translator):
    body = json.dumps({"text": "a dog", "alignment": True}).encode()
    with pytest.raises(Refused, match="alignment is not supported for imported models: omit it") as refused:
        read_request(body, {"small": imported(translator)}, Limits())
    assert refused.value.status == 422


def test_empty_translations_are_marked(translator):
    class Mute(Slow):
        def translate_nbest(self, lines, *_):
            return [[Translation("" if "dog" in line else line, -1.0, -1.0)] for line in lines]

    with serving({"small": Mute(translator)}) as url:
        answer = ask(url, text=["a boat", "a dog", " ", "a boat\na dog"], timeout=PATIENCE).json()["translations"]
    assert [best[0].get("empty", False) for best in answer] == [False, True, False, True]


def test_an_empty_translation_of_one_sentence_is_marked():
    text = Text("One. Two.", lambda line: line.split(maxsplit=1))
    for lost in ("", " "):
        assert text.has_empty([[Translation("Eins.", 0.0, 0.0)], [Translation(lost, 0.0, 0.0)]], 0)
    assert not text.has_empty([[Translation("Eins.", 0.0, 0.0)], [Translation("Zwei.", 0.0, 0.0)]], 0)
    assert not Text("\u200b").has_empty([[Translation("", 0.0, 0.0)]], 0), "a text of invisible characters is blank"
