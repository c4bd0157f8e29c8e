"""Options of a request: the same as of `fasttfm translate`, with the same checks."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from model_dirs import LINES
from served import ask, serving, texts
from waiting import PATIENCE

import fasttfm
from fasttfm.translate import Terminology, Translator
from fasttfm.translate.sentences import sentence_splitter, translate_sentences
from fasttfm.translate.server.limits import Limits
from fasttfm.translate.server.openapi import openapi
from fasttfm.translate.server.options import options

TERMS = {"dog": ["Boot", "Männer"], "green grass": "kleinen"}


@pytest.fixture(params=["one process", "two workers"], scope="module")
def address(request, translator, url):
    if request.param == "one process":
        yield url
    else:
        with serving({"small": translator}, workers=2) as other:
            yield other


def other(model_dir, **options):
    return Translator.from_directory(model_dir, workers=1, **options)


def answers(translations, *, alignment=False):
    links = [{"alignment": [[*link] for link in each.alignment]} if alignment else {} for each in translations]
    return [{"text": each.text, "score": each.score, **more} for each, more in zip(translations, links, strict=True)]


@pytest.mark.sample(1)
def test_terminology_equals_that_of_the_command(address, model_dir, translator):
    terminology = Terminology([(term, [each] if isinstance(each, str) else each) for term, each in TERMS.items()],
                              translator.target_tokenizer)  # fmt: skip
    ours = Translator(translator.model, translator.source_tokenizer, translator.target_tokenizer, translator.config,
                      terminology=terminology)  # fmt: skip
    expected = [answers(best) for best in ours.translate_nbest(LINES)]
    assert ask(address, text=LINES, terminology=TERMS).json()["translations"] == expected
    assert "Boot" in expected[0][0]["text"] or "Männer" in expected[0][0]["text"]
    assert texts(ask(address, text=LINES, terminology={})) == translator.translate(LINES)


def test_search_options_and_alignments_equal_those_of_the_command(address, model_dir):
    search = {"beam": 3, "nbest": 2, "length_penalty": "wu", "alpha": 1.0}
    ours = other(model_dir, aligned=True, **search)
    expected = [answers(best, alignment=True) for best in ours.translate_nbest(LINES)]
    assert ask(address, text=LINES, alignment=True, **search).json()["translations"] == expected
    one, two = (best[0].alignment for best in ours.translate_nbest(LINES[:2]))
    assert one
    words = len(LINES[0].split()), len(expected[0][0]["text"].split())
    (answer,) = ask(address, text=f"{LINES[0]}\n{LINES[1]}", alignment=True, **search).json()["translations"]
    moved = [[source + words[0], target + words[1]] for source, target in two]
    assert answer[0]["alignment"] == [*([*link] for link in one), *moved]


def test_split_sentences_equal_those_of_the_command(address, model_dir):
    pytest.importorskip("sentencex")
    lines = ["A dog runs. Two men sit!", "", "a boat"]
    ours = other(model_dir, aligned=True)
    expected = [answers(best, alignment=True) for best in translate_sentences(ours, lines, sentence_splitter("en"))]
    given = {"split_sentences": "en", "alignment": True}
    assert ask(address, text=lines, **given).json()["translations"] == expected
    (whole,) = ask(address, text="\n".join(lines), **given).json()["translations"]
    assert whole[0]["text"] == "\n".join(best[0]["text"] for best in expected)


@pytest.mark.sample(1)
def test_concurrent_requests_with_different_options_get_what_each_gets_alone(address):
    options_of_clients = [
        {},
        {"alignment": True, "nbest": 2},
        {"terminology": TERMS, "beam": 6},
        {"terminology": TERMS, "alignment": True},
        {"sampling": True, "sampling_seed": 5, "alignment": True},
        {"beam": 1, "prefix": ["eine"] * len(LINES)},
        {"terminology": TERMS, "nbest": 3},
    ]
    requests_ = [{"text": LINES, **each} for each in options_of_clients]
    alone = [ask(address, **each).json() for each in requests_]
    assert all("translations" in each for each in alone)
    with ThreadPoolExecutor(16) as pool:
        together = [pool.submit(ask, address, **each) for _ in range(4) for each in requests_]
        assert [each.result(300).json() for each in together] == alone * 4


def test_a_stream_supports_them_too(url, model_dir):
    request = {"text": LINES, "stream": True, "alignment": True, "terminology": TERMS}
    events = requests.post(f"{url}/translate", json=request, timeout=PATIENCE).text.strip().split("\n\n")
    assert len(events) == len(LINES) + 1
    assert all("alignment" in event for event in events[:-1])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"terminology": ["dog"]}, "terminology must be an object"),
        ({"terminology": {"dog": 1}}, "terminology must be an object"),
        ({"terminology": {"dog": []}}, "terminology must be an object"),
        ({"terminology": {" ": "Hund"}}, "the term is empty"),
        ({"terminology": {"dog": " "}}, "a translation is empty"),
        ({"terminology": {"dog": "Hund"}, "sampling": True}, "needs a beam search"),
        ({"terminology": {f"term {number}": "Hund" for number in range(300)}}, "256 at most"),
        ({"terminology": {"dog " * 3000: "Hund"}}, "8,192 at most"),
        ({"text": "dog " * 100, "terminology": {"dog": "der Hund läuft über"}}, "512 at most"),
        ({"alignment": 1}, "alignment must be true or false: 1 was given"),
        ({"split_sentences": "en", "prefix": "der"}, "split_sentences and prefix do not go together"),
        ({"split_sentences": "en", "nbest": 2}, "one translation a line, not 2: leave out nbest"),
        ({"split_sentences": "klingon please"}, "split_sentences 'klingon please'"),
        ({"split_sentences": True}, "split_sentences must be a text"),
        ({"text": "a\n" * 300}, "301 lines were given"),
        ({"markup": True}, "markup was removed: text is plain, and so is its translation: a CAT tool or a proxy"),
        ({"format": "html"}, "format was removed: text is plain"),
        (
            {"q": "a dog", "source": "en", "target": "de", "format": "html"},
            "q was removed: ask with text, and with model",
        ),
        ({"nbest": "2"}, "nbest must be a whole number: '2' was given"),
        ({"temperature": 1e300, "sampling": True}, "temperature 1e+300 must be at most 1,000"),
        ({"temperature": None}, "temperature must be a number: None was given"),
        ({"temperature": 0.5}, "temperature does nothing while sampling is false: omit it, or change sampling"),
        ({"sampling_topk": 3, "sampling": False}, "sampling_topk does nothing while sampling is false"),
        ({"alpha": 1.5, "length_penalty": "avg"}, "alpha does nothing while length_penalty is avg"),
        ({"length_penalty": "long"}, "length_penalty must be one of wu, power, avg, none"),
    ],
)
def test_invalid_options_are_refused_in_one_line(url, given, words):
    answer = ask(url, **{"text": "a dog", **given})
    assert (answer.status_code, "\n" in answer.json()["detail"]) == (422, False), answer.text
    assert words in answer.json()["detail"]


def test_a_source_longer_than_the_model_supports_is_refused(model_dir):
    with serving({"small": other(model_dir, max_source_length=6)}, Limits()) as address:
        assert ask(address, text="a dog").status_code == 200
        assert "6 at most" in ask(address, text="a dog " * 6).json()["detail"]


@pytest.mark.parametrize("workers", [1, 2])
def test_models_are_selected_by_name(model_dir, translator, workers):
    short = other(model_dir, max_len_b=2)
    models = {"opus-mt-en-de": translator, "my-run": short}
    expected = [each.translate(LINES) for each in (translator, short)]
    with serving(models, workers=workers) as address:
        found = [
            texts(ask(address, text=LINES, **given)) for given in ({}, {"model": "opus-mt-en-de"}, {"model": "my-run"})
        ]
        assert found == [expected[0], expected[0], expected[1]]
        assert "one of opus-mt-en-de, my-run" in ask(address, text="a", model="fr-de").json()["detail"]


def test_openapi_page_and_docs_list_the_options(url):
    table = options(["small"])
    described = requests.get(f"{url}/openapi.json", timeout=PATIENCE).json()
    assert described == openapi(["small"], fasttfm.__version__, token=False)
    schema = schema_of(described["paths"]["/translate"]["post"]["requestBody"])
    assert schema["properties"] == {each.name: {**each.schema, "description": each.help} for each in table}
    page = requests.get(f"{url}/docs", timeout=PATIENCE)
    assert page.headers["content-type"].startswith("text/html")
    shown = [row for row in re.findall("<tr><td>(.*?)</td>", page.text) if row.isidentifier()]
    assert shown == [each.name for each in table]
    docs = (Path(__file__).parents[3] / "docs" / "serve.md").read_text(encoding="utf-8")
    _, _, rows = docs.partition("| field | must be | |\n|---|---|---|\n")
    assert rows.partition("\n\n")[0].splitlines() == [
        f"| `{each.name}` | {each.kind} | {each.help} |" for each in options()
    ]


def test_requests_and_responses_match_the_openapi_schemas(url):
    jsonschema = pytest.importorskip("jsonschema")
    described = requests.get(f"{url}/openapi.json", timeout=PATIENCE).json()
    post = described["paths"]["/translate"]["post"]
    read = jsonschema.Draft202012Validator(schema_of(post["requestBody"]))
    values = ["a dog", "en", ["a dog"], [1], "small", True, False, None, "2", {"dog": "Hund"}, {"a": []}]
    values += [2, 1.5, 2.0, -1]
    for option in options(["small"]):
        for value in values:
            request = {"text": "a dog", option.name: value}
            answer = ask(url, **request)
            if not read.is_valid(request):
                assert (answer.status_code, option.kind in answer.json()["detail"]) == (422, True), request
            elif answer.headers["content-type"] == "application/json":
                jsonschema.validate(answer.json(), schema_of(post["responses"][str(answer.status_code)]))
                assert not answer.json().get("detail", "").startswith(f"{option.name} must be {option.kind}:"), request
    schema = schema_of(described["paths"]["/health"]["get"]["responses"]["200"])
    jsonschema.validate(requests.get(f"{url}/health", timeout=PATIENCE).json(), schema)


def schema_of(body):
    return body["content"]["application/json"]["schema"]
