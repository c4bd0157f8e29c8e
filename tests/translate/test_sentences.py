"""Translating lines sentence by sentence."""

import re
import sys
from dataclasses import replace

import pytest

from fasttfm.errors import UserError
from fasttfm.translate.sentences import join_sentences, sentence_splitter, translate_sentences
from fasttfm.translate.translator import Translation

LINES = ["a dog runs.  two men sit! ", "", "a boat.", " \t", "men. grass. dog.", "the green"]


def split(line: str) -> list[str]:
    return re.findall(r"[^.!]*[.!]\s*|[^.!]+", line)


def test_a_line_joins_the_translations_of_its_sentences(translator):
    for size in (1, 2, 100):
        translator.config = replace(translator.config, buffer_size=size)
        actual = [translations[0] for translations in translate_sentences(translator, LINES, split)]
        parts = [[part for part in split(line) if part.strip()] for line in LINES]
        expected = [[translator.translate_nbest([part])[0][0] for part in each] for each in parts]
        assert [each.text for each in actual] == [
            " ".join(part.text for part in each if part.text) for each in expected
        ]
        for each, sentences in zip(actual, expected, strict=True):
            total = sum(part.log_probability for part in sentences)
            assert each.log_probability == pytest.approx(total)


def test_no_more_lines_are_read_than_the_buffer_needs(translator):
    translator.config = replace(translator.config, buffer_size=2)
    read = []

    def lines():
        for line in LINES:
            read.append(line)
            yield line

    next(translate_sentences(translator, lines(), split))
    assert len(read) == 1


def test_truncated_sentences_are_counted_by_line(translator):
    translator.config = replace(translator.config, max_source_length=6)
    long = "a dog runs over the green grass and the boat."
    assert len([*translate_sentences(translator, ["men. men.", "a dog.", f"men. {long}", long], split)]) == 4
    assert translator.cut.count == 2
    assert translator.cut.first == 3


def test_alignments_refer_to_words_of_the_line():
    first = Translation("ein Hund.", -1.0, -2.0, ((0, 0), (1, 1)))
    second = Translation("ja wohl", -3.0, -4.0, ((0, 1),))
    joined = join_sentences(["a dog. ", "yes"], [first, second])
    assert joined == Translation("ein Hund. ja wohl", -2.0, -6.0, ((0, 0), (1, 1), (2, 3)))
    japanese = join_sentences(
        ["a dog. ", "yes"], [replace(first, text="犬。", alignment=((1, 0),)), replace(second, text="はい")]
    )
    assert japanese.text == "犬。はい"
    assert join_sentences(["犬。", "はい"], [first, second]).alignment == ((0, 0), (1, 1), (0, 3))


def test_sentencex_keeps_every_character_and_knows_abbreviations():
    pytest.importorskip("sentencex")
    english = sentence_splitter("en")
    assert english("Dr. Smith went home.  He slept.") == ["Dr. Smith went home.  ", "He slept."]
    for language in ("de", "DE", "de-AT"):
        assert sentence_splitter(language)("Er kam am 3. Mai an.") == ["Er kam am 3. Mai an."]
    assert sentence_splitter("gsw")("Er kam am 3. Mai an.") == ["Er kam am 3. Mai an."]  # as German
    for line in (*LINES, "a\u2028b. c", "東京に行く。大学です。", "\ufeffA. B\u0301 c?! d", "x" * 10_000):
        assert "".join(english(line)) == line


def test_an_invalid_language_or_missing_library_is_reported(monkeypatch):
    with pytest.raises(UserError, match="give the language of the input"):
        sentence_splitter("English, please")
    for language in ("xx", "deu", "eng-GB", "ceb"):  # sentencex splits all of them by English rules
        with pytest.raises(UserError, match=f"'{language}': is not a language of ISO 639-1"):
            sentence_splitter(language)
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(UserError, match=r"pip install ../fasttfm\[sentences\]"):
        sentence_splitter("en")
