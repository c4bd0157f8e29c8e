"""Terms of the source ask for their translations; a fuzz shows that they come."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from fasttfm.data.tokenizer import train_tokenizer
from fasttfm.decoding.terminology import Terminology
from fasttfm.decoding.translator import Translator
from fasttfm.errors import UserError

from .conftest import TEXT
from .table_model import TableModel


def asked(terms, line, tokenizer) -> list[list[str]]:
    required = Terminology(terms, tokenizer).required(line)
    return [[tokenizer.decode(phrase) for phrase in phrases] for phrases in required]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a dog, two dogs", [["Hund"]]),
        ("Dog DOG dog", [["Hund"]] * 3),
        ("a green  dog", [["Frosch", "Lurch"]]),
        ("dogs doggy hotdog 2dog dog2 _dog", []),
        ("us US", [["USA"]]),
        ("C++ C", [["Cpp"]]),
        ("dog-dog (dog)", [["Hund"]] * 3),
        ("", []),
    ],
)
def test_terms_are_found_as_whole_words(tokenizer, line, expected):
    terms = [("dog", ["Hund"]), ("green dog", ["Frosch"]), ("US", ["USA"]), ("C++", ["Cpp"]), ("green dog", ["Lurch"])]
    assert asked(terms, line, tokenizer) == expected


def test_scripts_without_spaces_have_no_whole_words(tokenizer):
    assert asked([("東京", ["Tokio"]), ("大学", ["Uni"])], "東京大学に", tokenizer) == [["Tokio"], ["Uni"]]
    (phrases,) = Terminology([("Tokyo", ["東京"])], tokenizer).required("to Tokyo")
    assert [tokenizer.decode(phrase) for phrase in phrases] == ["東京", "東京"]
    assert len(phrases[0]) == len(phrases[1]) + 1, "with a space before it and without"


def test_a_vocabulary_that_cannot_write_a_translation_is_told():
    tokenizer = train_tokenizer(TEXT, vocab_size=60, byte_fallback=False)
    with pytest.raises(UserError, match="the model's vocabulary cannot write 'Жук'"):
        Terminology([("bug", ["Жук"])], tokenizer)


@pytest.mark.parametrize("seed", range(12))
def test_every_term_is_translated_whatever_the_settings(tokenizer, seed):
    draw = random.Random(seed)
    words = " ".join(TEXT).split()
    terms = [
        (
            draw.choice(words),
            [" ".join(draw.choices([*words, "Übersee", "東", "x"], k=draw.randint(1, 2))) for _ in "ab"],
        )
        for _ in range(4)
    ]
    model = TableModel(len(tokenizer), end=draw.choice([-5.0, 2.0, 8.0]))
    translator = Translator(model, tokenizer, tokenizer, terminology=Terminology(terms, tokenizer), banned=["Wiese"])
    translator.config = replace(
        translator.config,
        beam=draw.choice([1, 2, 4]),
        max_len_b=draw.choice([0, 3]),
        no_repeat_ngram=draw.choice([0, 2]),
    )
    lines = [" ".join(draw.choices(words, k=draw.randint(0, 6))) for _ in range(6)]
    alternatives: dict[str, list[str]] = {}
    for term, texts in terms:
        alternatives.setdefault(term, []).extend(texts)
    for line, text in zip(lines, translator.translate(lines)):
        for term, texts in alternatives.items():
            occurs = re.search(rf"(?<!\w){re.escape(term)}(?!\w)", line, re.IGNORECASE if term.islower() else 0)
            assert not occurs or any(
                re.search(rf"(?<![a-zA-Zü]){re.escape(each)}(?![a-zA-Zü])", text) for each in texts
            )


def test_anything_but_a_beam_search_is_refused(tokenizer):
    translator = Translator(TableModel(len(tokenizer)), tokenizer, tokenizer)
    for changes in ({"sampling": True}, {"mbr_samples": 4}, {"diverse_beam_groups": 2}):
        with pytest.raises(UserError, match="terminology needs a beam search"):
            Translator(
                translator.model, tokenizer, tokenizer, replace(translator.config, **changes),
                terminology=Terminology([], tokenizer),
            )  # fmt: skip
