"""Requests: what is refused, before it costs much, in one short line; the table of options is the documented one."""

import json
import re
from pathlib import Path

import pytest
import requests
from served import ask, imported
from waiting import PATIENCE

import fasttfm
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.translate import Translator
from fasttfm.translate.server.limits import Limits
from fasttfm.translate.server.openapi import openapi
from fasttfm.translate.server.options import options
from fasttfm.translate.server.requests import Refused, read_request

LONG = "<" * 1_000_000


def refusal(body, translator):
    """The words with which a request is refused with status 422; "" if it is not."""
    try:
        read_request(body, {"small": translator}, Limits())
    except Refused as refused:
        if refused.status != 422:
            raise
        return refused.detail
    return ""


INVALID = [
    (b"{", "is truncated"),
    (b"\xff", "not JSON"),
    (b"[" * 100_000, "is nested too deeply"),
    (b"{}", "text must be"),
    (b'{"text": "\\ud800"}', "a lone surrogate"),
    (b"1" * 1_000_000, ""),
    (f'{{"{LONG}": 1, "{LONG}": 1}}'.encode(), ""),
    (b"{" + b",".join(b'"%d": 1' % (number % 99_999) for number in range(100_000)) + b"}", ""),
    ({"beem": 1}, "beem"),
    ({str(number): 1 for number in range(90_000)}, "is unknown"),
    # texts
    ({"text": ["a"] * 257}, "257 texts"),
    ({"text": "\n" * 1_000_000}, "lines"),
    ({"text": "a dog " * 300}, "tokens"),
    ({"text": LONG}, "characters"),
    ({"text": LONG, "split_sentences": "en"}, "characters"),
    ({"split_sentences": "klingon please"}, "split_sentences 'klingon please'"),
    ({"split_sentences": "en", "prefix": "der"}, "split_sentences and prefix do not go together"),
    ({"split_sentences": "en", "nbest": 2}, "one translation a line, not 2: leave out nbest"),
    ({"text": ["a", "b"], "prefix": ["eine"]}, "1 prefixes were given for 2 texts"),
    ({"prefix": LONG}, "characters"),
    ({"text": "a\nb", "prefix": "der"}, "a text of several lines has no prefix"),
    # terms
    ({"terminology": {" ": "Hund"}}, "the term is empty"),
    ({"terminology": {"dog": "Hund"}, "sampling": True}, "needs a beam search"),
    ({"terminology": {f"term {number}": "Hund" for number in range(300)}}, "256 at most"),
    ({"terminology": {LONG: "b"}}, "8,192 at most"),
    ({"text": "dog " * 100, "terminology": {"dog": "der Hund läuft über"}}, "512 at most"),
    # the search
    ({"beam": 1000}, "beam"),
    ({"max_len_a": 2}, "max_len_a 2 is more than 0"),
    ({"nbest": "2"}, "nbest must be a whole number: '2' was given"),
    ({"temperature": 1e300, "sampling": True}, "temperature 1e+300 must be at most 1,000"),
    ({"temperature": 0.5}, "temperature does nothing while sampling is false: omit it, or change sampling"),
    ({"length_penalty": LONG}, "length_penalty must be one of"),
]


@pytest.mark.parametrize(("given", "words"), INVALID, ids=[words[:30] or "costly" for _, words in INVALID])
def test_an_invalid_or_costly_body_is_refused_before_tokenization_in_one_short_line(
    given, words, translator, monkeypatch
):
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, line: encode(self, line) if len(line) < 20_000 else 1 / 0)
    body = given if isinstance(given, bytes) else json.dumps({"text": "a dog", **given}).encode()
    detail = refusal(body, translator)
    assert detail
    assert words in detail
    assert len(detail) <= 600
    assert len(detail.splitlines()) == 1


def test_what_an_imported_or_a_small_model_does_not_support_is_refused(translator, model_dir):
    short = Translator.from_directory(model_dir, workers=1, max_source_length=6)
    for model, given, words in (
        (imported(translator), {"alignment": True}, "alignment is not supported for imported models: omit it"),
        (short, {"text": "a dog " * 6}, "6 at most"),
    ):
        assert refusal(b'{"text": "a dog"}', model) == ""
        assert words in refusal(json.dumps({"text": "a dog", **given}).encode(), model)


def schema_of(body):
    return body["content"]["application/json"]["schema"]


def test_openapi_page_and_docs_list_the_options(url):
    table = options(["small"])
    described = requests.get(f"{url}/openapi.json", timeout=PATIENCE).json()
    assert described == openapi(["small"], fasttfm.__version__, token=False)
    schema = schema_of(described["paths"]["/translate"]["post"]["requestBody"])
    assert schema["properties"] == {each.name: {**each.schema, "description": each.help} for each in table}
    page = requests.get(f"{url}/docs", timeout=PATIENCE)
    shown = [row for row in re.findall("<tr><td>(.*?)</td>", page.text) if row.isidentifier()]
    assert shown == [each.name for each in table]
    docs = (Path(__file__).parents[3] / "docs" / "serve.md").read_text(encoding="utf-8")
    _, _, rows = docs.partition("| field | must be | |\n|---|---|---|\n")
    assert rows.partition("\n\n")[0].splitlines() == [
        f"| `{each.name}` | {each.kind} | {each.help} |" for each in options()
    ]


VALUES = ["a dog", "en", ["a dog"], [1], "small", True, False, None, "2", {"dog": "Hund"}, {"a": []}, 2, 1.5, 2.0, -1]


def test_requests_and_responses_match_the_openapi_schemas(url, translator):
    jsonschema = pytest.importorskip("jsonschema")
    paths = requests.get(f"{url}/openapi.json", timeout=PATIENCE).json()["paths"]
    post = paths["/translate"]["post"]
    read = jsonschema.Draft202012Validator(schema_of(post["requestBody"]))
    for option in options(["small"]):
        for value in VALUES:
            request = {"text": "a dog", option.name: value}
            detail = refusal(json.dumps(request).encode(), translator)
            assert detail.startswith(f"{option.name} must be {option.kind}:") is not read.is_valid(request), request
    for request in ({"text": "a dog", "nbest": 2, "alignment": True}, {"text": ["a", ""]}, {"text": 1}):
        answer = ask(url, **request)
        jsonschema.validate(answer.json(), schema_of(post["responses"][str(answer.status_code)]))
    health = requests.get(f"{url}/health", timeout=PATIENCE)
    jsonschema.validate(health.json(), schema_of(paths["/health"]["get"]["responses"]["200"]))
