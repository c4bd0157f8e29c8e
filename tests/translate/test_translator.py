"""The Translator: lines, prefixes, buffers, counters; translating lines sentence by sentence."""

import itertools
import re
import sys
from dataclasses import replace

import pytest
from model_dirs import write_model_dir

from fasttfm.errors import UserError
from fasttfm.search.hypotheses import Hypothesis
from fasttfm.search.search import search_ids
from fasttfm.store.steps import step_folder
from fasttfm.translate.sentences import join_sentences, sentence_splitter, translate_sentences
from fasttfm.translate.translator import Translation, Translator, one_line

LINES = ["a dog", "", "two men sit in a boat", " \t ", "a small boat", "the green grass", "\u3000", "men"]


def test_every_line_gets_one_line_and_empty_ones_stay_empty(translator):
    results = translator.translate(LINES)
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
    assert (translator.cut.count, translator.cut.first) == (2, 2)
    assert results[1] == results[3], "the same first four tokens"


def test_duplicate_texts_are_removed_from_the_n_best(translator, monkeypatch):
    monkeypatch.setattr(translator.target_tokenizer, "decode", lambda ids: "a" * sum(ids))
    same = [Hypothesis(tokens, -score, -score) for score, tokens in enumerate(([9], [5, 4], [10]))]
    texts, tokens = translator.translations(same, distinct=True)
    assert (tokens, [each.score for each in texts]) == ([[9], [10]], [0, -2])
    assert len(translator.translations(same, distinct=False)[0]) == 3


def reading(lines, read):
    """The lines, which are noted as they are read; then the file cannot be read any more."""
    for line in lines:
        read.append(line)
        yield line
    raise OSError(5, "Input/output error")


def test_a_stream_is_read_in_buffers_and_translated_up_to_a_read_error(translator):
    translator.config = replace(translator.config, buffer_size=3)
    read = []
    stream = translator.translate_stream(reading(LINES, read))
    first = next(stream)
    assert len(read) == 3
    others = [next(stream) for _ in LINES[1:]]
    assert [results[0].text for results in (first, *others)] == translator.translate(LINES)
    with pytest.raises(OSError, match="Input/output"):
        next(stream)


def test_sampling_does_not_depend_on_the_buffer(translator):
    def stream(size):
        translator.config = replace(translator.config, sampling=True, buffer_size=size)
        return [results[0].text for results in translator.translate_stream(LINES)]

    assert stream(2) == stream(100)


def test_a_translation_begins_with_its_prefix(translator):
    prefixes = ["ein", "", "zwei", "", "", "die grüne", "", ""]
    free = translator.translate(LINES)
    for text, other, prefix in zip(translator.translate(LINES, prefixes), free, prefixes, strict=True):
        assert text.startswith(prefix)
        assert prefix or text == other
    for count in (len(LINES) - 1, len(LINES) + 1):
        with pytest.raises(UserError, match="prefixes"):
            list(translator.translate_stream(LINES, itertools.repeat("ein", count)))


def test_a_checkpoint_given_by_its_path_is_that_of_the_first_model_alone(tmp_path):
    one, two = write_model_dir(tmp_path / "one"), write_model_dir(tmp_path / "two", trained=False)

    def scores(**options):
        return Translator.from_directory(one, workers=1, **options).score(["a dog"], ["ein Hund"])

    assert scores(ensemble=[two], checkpoint=str(step_folder(one, 1))) == scores(ensemble=[two]) != scores()


# Sentence by sentence

SENTENCES = ["a dog runs.  two men sit! ", "", "a boat.", " \t", "men. grass. dog.", "the green"]


def split(line: str) -> list[str]:
    return re.findall(r"[^.!]*[.!]\s*|[^.!]+", line)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_line_joins_the_translations_of_its_sentences(translator, size):
    translator.config = replace(translator.config, buffer_size=size)
    actual = [translations[0] for translations in translate_sentences(translator, SENTENCES, split)]
    for each, line in zip(actual, SENTENCES, strict=True):
        parts = [translator.translate_nbest([part])[0][0] for part in split(line) if part.strip()]
        assert each.text == " ".join(part.text for part in parts if part.text)
        assert each.log_probability == pytest.approx(sum(part.log_probability for part in parts))


def test_no_more_lines_are_read_than_the_buffer_needs(translator):
    translator.config = replace(translator.config, buffer_size=2)
    read = []
    next(translate_sentences(translator, reading(SENTENCES, read), split))
    assert len(read) == 1


def test_alignments_refer_to_words_of_the_line():
    first = Translation("ein Hund.", -1.0, -2.0, ((0, 0), (1, 1)))
    second = Translation("ja wohl", -3.0, -4.0, ((0, 1),))
    joined = join_sentences(["a dog. ", "yes"], [first, second])
    assert joined == Translation("ein Hund. ja wohl", -2.0, -6.0, ((0, 0), (1, 1), (2, 3)))
    japanese = [replace(first, text="犬。", alignment=((1, 0),)), replace(second, text="はい")]
    assert join_sentences(["a dog. ", "yes"], japanese).text == "犬。はい"
    assert join_sentences(["犬。", "はい"], [first, second]).alignment == ((0, 0), (1, 1), (0, 3))


def test_sentencex_keeps_every_character_and_knows_abbreviations():
    pytest.importorskip("sentencex")
    english = sentence_splitter("en")
    assert english("Dr. Smith went home.  He slept.") == ["Dr. Smith went home.  ", "He slept."]
    for language in ("de", "DE", "de-AT", "gsw"):  # Swiss German as German
        assert sentence_splitter(language)("Er kam am 3. Mai an.") == ["Er kam am 3. Mai an."]
    for line in (*SENTENCES, "a\u2028b. c", "東京に行く。大学です。", "\ufeffA. B\u0301 c?! d", "x" * 10_000):
        assert "".join(english(line)) == line


def test_an_invalid_language_or_missing_library_is_reported(monkeypatch):
    for language in ("English, please", "xx", "deu", "eng-GB", "ceb"):  # sentencex splits all of them by English rules
        with pytest.raises(UserError, match="language"):
            sentence_splitter(language)
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(UserError, match=r"pip install ../fasttfm\[sentences\]"):
        sentence_splitter("en")
