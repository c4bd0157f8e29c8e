"""NFC and NFD spellings of letters, and invisible characters."""

import random
import unicodedata

import pytest

from fasttfm.data.tokenizer import train_tokenizer
from fasttfm.data.unicode_forms import composed, has_invisible, has_text, is_composed

LINES = [
    "Ein Hund läuft über die Straße.",
    "Tiếng Việt có dấu",
    "한국어 문장",
    "ελληνικά άέή",
    "café naïve Ångström",
] * 20


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES, vocab_size=400, normalization="nfc")


def test_an_nfc_vocabulary_encodes_both_spellings_the_same(tokenizer):
    for line in LINES[:5]:
        apart = unicodedata.normalize("NFD", line)
        assert apart != line
        assert tokenizer.encode(apart) == tokenizer.encode(line)
        assert tokenizer.decode(tokenizer.encode(apart)) == line
    plain = train_tokenizer(LINES, vocab_size=400)
    assert plain.encode(unicodedata.normalize("NFD", LINES[0])) != plain.encode(LINES[0])


def test_letters_with_marks_and_hangul_syllables_are_composed(tokenizer):
    draw = random.Random(1)
    blocks = [*range(0xC0, 0x250), *range(0x370, 0x400), *range(0x1E00, 0x2000), *range(0xAC00, 0xD7A4, 11)]
    letters = [chr(code) for code in blocks if chr(code).isalpha()]
    for _ in range(300):
        line = " ".join(draw.choices(letters, k=8))
        assert tokenizer.encode(unicodedata.normalize("NFD", line)) == tokenizer.encode(composed(line))


def test_spans_refer_to_the_original_text(tokenizer):
    apart = unicodedata.normalize("NFD", "über café")
    assert tokenizer.spans(apart)[-1][1] == len(apart)


def test_invisible_characters_are_no_text():
    assert has_text("a\u200b")
    assert not has_text(" \u200b\ufeff\t")
    assert has_invisible("a\ufeffb")
    assert not has_invisible("ab é")
    assert has_text("\u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"), "Persian is spelt with joiners"
    assert is_composed("é")
    assert not is_composed("e\u0301")
