"""Translations of the server equal the Translator's: with every option, in one process and with workers."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from model_dirs import LINES
from served import Slow, ask, serving, texts
from waiting import PATIENCE

from fasttfm.translate import Terminology, Translator
from fasttfm.translate.sentences import sentence_splitter, translate_sentences
from fasttfm.translate.server.texts import Text
from fasttfm.translate.translator import Translation

TERMS = {"dog": ["Boot", "Männer"], "green grass": ["kleinen"]}
SENTENCES = ["A dog runs. Two men sit!", "", "a boat"]


@pytest.fixture(params=["joined", "batch by batch", "two workers"], scope="module")
def address(request, translator, url):
    """Of a server that searches all sentences together; as without numba; and with processes that search."""
    if request.param == "joined":
        yield url
        return
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "batch by batch":
            patch.setattr("fasttfm.translate.server.engine.takes_lines", lambda _: False)
        with serving({"small": translator}, workers=1 + (request.param == "two workers")) as other:
            yield other


def other(model_dir, **options):
    return Translator.from_directory(model_dir, workers=1, **options)


def as_json(translations, alignment=False):
    """The answer to a request for these translations, best first, of each text."""
    return [
        [
            {"text": each.text, "score": each.score}
            | ({"alignment": [[*link] for link in each.alignment]} if alignment else {})
            for each in best
        ]
        for best in translations
    ]


@pytest.fixture(scope="module")
def ways(model_dir, translator):
    """[(request, what the Translator of the command gives for it)]."""

    def with_options(lines=LINES, prefixes=None, *, alignment=False, **options):
        ours = other(model_dir, aligned=alignment, **options)
        return as_json(ours.translate_nbest(lines, prefixes), alignment)

    def with_terms(**options):
        terms = Terminology([*TERMS.items()], translator.target_tokenizer)
        tokenizers = translator.source_tokenizer, translator.target_tokenizer
        ours = Translator(translator.model, *tokenizers, other(model_dir, **options).config, terminology=terms)
        return as_json(ours.translate_nbest(LINES))

    search = {"beam": 3, "nbest": 2, "length_penalty": "wu", "alpha": 1.0, "alignment": True}
    drawn = {"sampling": True, "sampling_seed": 7, "nbest": 2}
    prefixes = ["eine", "", "der Hund"]
    result = [
        ({"text": LINES}, with_options()),
        ({"text": LINES[0]}, with_options(LINES[:1])),
        ({"text": []}, []),
        ({"text": ["", " "]}, with_options(["", " "])),
        ({"text": LINES, **search}, with_options(**search)),
        ({"text": LINES, **drawn}, with_options(**drawn)),
        ({"text": LINES[:3], "prefix": prefixes, "beam": 1}, with_options(LINES[:3], prefixes, beam=1)),
        ({"text": LINES, "terminology": {}}, with_options()),
        ({"text": LINES, "terminology": {**TERMS, "green grass": "kleinen"}}, with_terms()),
        ({"text": LINES, "terminology": TERMS, "beam": 6, "nbest": 3}, with_terms(beam=6, nbest=3)),
    ]
    assert any(word in result[-2][1][0][0]["text"] for word in TERMS["dog"])
    assert result[4][1][0][0]["alignment"]
    return result


def test_concurrent_requests_with_every_option_get_what_the_command_gives_for_each(address, ways):
    for request, expected in ways:
        assert ask(address, **request).json()["translations"] == expected, request
    with ThreadPoolExecutor(16) as pool:
        together = [(pool.submit(ask, address, **request), expected) for _ in range(4) for request, expected in ways]
        for answer, expected in together:
            assert answer.result(PATIENCE).json()["translations"] == expected


def test_lines_and_sentences_of_a_text_are_joined_and_their_alignments_moved(address, model_dir):
    pytest.importorskip("sentencex")
    ours = other(model_dir, aligned=True, nbest=2)
    first, second, third = ours.translate_nbest(LINES[:3])
    given = {"text": [f"{LINES[0]}\n\n{LINES[1]}", LINES[2]], "nbest": 2, "alignment": True}
    text, whole = ask(address, **given).json()["translations"]
    assert [whole] == as_json([third], alignment=True)
    assert [each["text"] for each in text] == [f"{a.text}\n\n{b.text}" for a, b in zip(first, second, strict=True)]
    words = len(LINES[0].split()), len(first[0].text.split())
    moved = [[source + words[0], target + words[1]] for source, target in second[0].alignment]
    assert text[0]["alignment"] == [*([*link] for link in first[0].alignment), *moved]

    ours = other(model_dir, aligned=True)
    expected = as_json(translate_sentences(ours, SENTENCES, sentence_splitter("en")), alignment=True)
    given = {"split_sentences": "en", "alignment": True}
    assert ask(address, text=SENTENCES, **given).json()["translations"] == expected
    (text,) = ask(address, text="\n".join(SENTENCES), **given).json()["translations"]
    assert text[0]["text"] == "\n".join(best[0]["text"] for best in expected)


def test_a_stream_has_one_event_per_text_and_a_final_one(url, ways):
    for request, expected in ways[-3:]:
        answer = requests.post(f"{url}/translate", json={**request, "stream": True}, timeout=PATIENCE)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, last = answer.content.decode().strip().split("\n\n")
        found = [json.loads(event.removeprefix("data: ")) for event in events]
        assert found == [{"index": index, "translations": best} for index, best in enumerate(expected)]
        assert last.startswith("event: done")


@pytest.mark.parametrize("workers", [1, 2])
def test_models_are_selected_by_name(model_dir, translator, workers):
    models = {"opus-mt-en-de": translator, "my-run": other(model_dir, max_len_b=2)}
    first, second = (each.translate(LINES) for each in models.values())
    with serving(models, workers=workers) as address:
        for given, expected in (({}, first), ({"model": "opus-mt-en-de"}, first), ({"model": "my-run"}, second)):
            assert texts(ask(address, text=LINES, **given)) == expected
        assert "one of opus-mt-en-de, my-run" in ask(address, text="a", model="fr-de").json()["detail"]


def test_an_empty_translation_of_one_sentence_is_marked():
    text = Text("One. Two.", lambda line: line.split(maxsplit=1))
    for second, empty in (("", True), (" ", True), ("Zwei.", False)):
        assert text.has_empty([[Translation("Eins.", 0.0, 0.0)], [Translation(second, 0.0, 0.0)]], 0) is empty
    assert not Text("\u200b").has_empty([[Translation("", 0.0, 0.0)]], 0), "a text of invisible characters is blank"


def test_empty_translations_are_marked(translator):
    mute = Slow(translator)
    mute.translate_nbest = lambda lines, *_: [[Translation("" if "dog" in line else line, 0.0, 0.0)] for line in lines]
    with serving({"small": mute}) as url:
        answer = ask(url, text=["a boat", "a dog", " "]).json()["translations"]
    assert [best[0].get("empty", False) for best in answer] == [False, True, False]
