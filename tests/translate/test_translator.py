"""The Translator: lines, prefixes, buffers, counters."""

import itertools
from dataclasses import replace

import pytest
from model_dirs import write_model_dir

from fasttfm.errors import UserError
from fasttfm.search.hypotheses import Hypothesis
from fasttfm.search.search import search_ids
from fasttfm.store.steps import step_folder
from fasttfm.translate.translator import Translator, one_line

LINES = ["a dog", "", "two men sit in a boat", " \t ", "a small boat", "the green grass", "\u3000", "men"]


def test_every_line_gets_one_line_and_empty_ones_stay_empty(translator):
    results = translator.translate(LINES)
    assert len(results) == len(LINES)
    assert [text == "" for text in results] == [not line.strip() for line in LINES]
    assert results == [translator.translate([line])[0] for line in LINES], "order and neighbours do not matter"
    assert translator.translate([]) == []


def test_decoded_text_cannot_break_a_line(translator, monkeypatch):
    monkeypatch.setattr(translator.target_tokenizer, "decode", lambda ids: "a\u2028b\x85c\x0bd\x0ce\x1cf\rg\n")
    assert translator.translate(["a dog"]) == ["a b c d e f g"]
    assert one_line("ein Wort") == "ein Wort"


def test_banned_words_are_passed_to_the_search_as_token_ids(translator, monkeypatch):
    given = []
    monkeypatch.setattr(
        "fasttfm.translate.translator.search_ids",
        lambda *inputs, banned, **options: given.append(banned) or search_ids(*inputs, banned=banned, **options),
    )
    tokenizer = translator.target_tokenizer
    Translator(translator.model, tokenizer, tokenizer, banned=["grüne Wiese", "", "Boot"]).translate(["a dog"])
    assert given == [[tokenizer.encode("grüne Wiese"), tokenizer.encode("Boot")]]
    assert all(given[0])


def test_a_long_line_is_truncated_and_counted(translator):
    translator.config = replace(translator.config, max_source_length=4)
    words = "a dog runs over the green grass"
    results = translator.translate(["men", words, "a", words + " a dog"])
    assert translator.cut.count == 2
    assert translator.cut.first == 2
    assert results[1] == results[3], "the same first four tokens"


def test_duplicate_texts_are_removed_from_the_n_best(translator, monkeypatch):
    monkeypatch.setattr(translator.target_tokenizer, "decode", lambda ids: "a" * sum(ids))
    same = [Hypothesis(tokens, -score, -score) for score, tokens in enumerate(([9], [5, 4], [10]))]
    texts, tokens = translator.translations(same, distinct=True)
    assert tokens == [[9], [10]]
    assert [each.score for each in texts] == [0, -2]
    assert len(translator.translations(same, distinct=False)[0]) == 3


def test_a_stream_is_read_in_buffers(translator):
    translator.config = replace(translator.config, buffer_size=3)
    read = []

    def lines():
        for line in LINES:
            read.append(line)
            yield line

    stream = translator.translate_stream(lines())
    first = next(stream)
    assert len(read) == 3
    whole = [first, *stream]
    assert [results[0].text for results in whole] == translator.translate(LINES)


def test_sampling_does_not_depend_on_the_buffer(translator):
    def stream(size):
        translator.config = replace(translator.config, sampling=True, buffer_size=size)
        return [results[0].text for results in translator.translate_stream(LINES)]

    assert stream(2) == stream(100)


def test_a_translation_begins_with_its_prefix(translator):
    prefixes = ["ein", "", "zwei", "", "", "die grüne", "", ""]
    results = translator.translate(LINES, prefixes)
    assert all(text.startswith(prefix) for text, prefix in zip(results, prefixes, strict=True))
    free = translator.translate(LINES)
    assert [text for text, prefix in zip(results, prefixes, strict=True) if not prefix] == [
        text for text, prefix in zip(free, prefixes, strict=True) if not prefix
    ]


@pytest.mark.parametrize("count", [len(LINES) - 1, len(LINES) + 1])
def test_a_wrong_number_of_prefixes_is_refused(translator, count):
    with pytest.raises(UserError, match="prefixes"):
        list(translator.translate_stream(LINES, itertools.repeat("ein", count)))


def test_lines_before_a_read_error_are_translated(translator):
    def lines():
        yield from LINES
        raise OSError(5, "Input/output error")

    stream = translator.translate_stream(lines())
    assert [next(stream)[0].text for _ in LINES] == translator.translate(LINES)
    with pytest.raises(OSError, match="Input/output"):
        next(stream)


def test_a_checkpoint_given_by_its_path_is_that_of_the_first_model_alone(tmp_path):
    one, two = write_model_dir(tmp_path / "one"), write_model_dir(tmp_path / "two", trained=False)

    def scores(**options):
        return Translator.from_directory(one, workers=1, **options).score(["a dog"], ["ein Hund"])

    assert scores(ensemble=[two], checkpoint=str(step_folder(one, 1))) == scores(ensemble=[two]) != scores()
