"""Terminology: terms are found in lines, and their translations occur in the output."""

import random
import re
import time

import pytest
from model_dirs import TEXT

from fasttfm.data.tokenizer import train_tokenizer
from fasttfm.errors import UserError
from fasttfm.translate.terminology import Terminology


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
        ("\u0915\u092e \u0915\u092e\u0940", [["Boot"]]),  # Hindi: the second word goes on with a vowel sign
        ("\u00fcber u\u0308ber", [["Wiese"]] * 2),
    ],
)
def test_terms_are_found_as_whole_words(tokenizer, line, expected):
    terms = [("dog", ["Hund"]), ("green dog", ["Frosch"]), ("US", ["USA"]), ("C++", ["Cpp"]), ("green dog", ["Lurch"])]
    terms += [("\u0915\u092e", ["Boot"]), ("u\u0308ber", ["Wiese"])]
    assert asked(terms, line, tokenizer) == expected


def found_by_a_pattern(terms: list[str], line: str) -> list[str]:
    """Terms in line by a regular expression with the same rules."""

    def pattern(term: str) -> str:
        words = r"\s+".join(map(re.escape, term.split()))
        before, after = (r"\b" if re.match(r"\w", edge) else "" for edge in (term[0], term[-1]))
        return f"{before}(?i:{words}){after}" if term == term.lower() else f"{before}{words}{after}"

    longest_first = sorted(terms, key=lambda term: (-len(term), term))
    matches = re.finditer("|".join(f"({pattern(term)})" for term in longest_first), line)
    return [longest_first[match.lastindex - 1] for match in matches if match.lastindex]


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(40))
def test_overlapping_terms_equal_those_of_a_regular_expression(tokenizer, seed):
    draws = random.Random(seed)
    words = ["a", "aa", "A", "b", "ab", "+", "B+", "-a", "\u017f", "S", "\u03c2", "\u03a3"]
    terms = sorted({" ".join(draws.choices(words, k=draws.randint(1, 4))) for _ in range(draws.randint(1, 12))})
    terminology = Terminology([(term, [f"dog {number}"]) for number, term in enumerate(terms)], tokenizer)
    names = {number: term for term, number in terminology._terms.items()}
    for _ in range(30):
        line = "".join(draws.choice(words) + draws.choice(["", " ", "  ", "\u00a0", "\t"]) for _ in range(20))
        found = [names[terminology.alternatives.index(each)] for each in terminology.required(line)]
        assert found == found_by_a_pattern(terms, line), (terms, line)


def test_matching_time_does_not_grow_with_the_number_of_terms(tokenizer):
    def seconds(count: int) -> float:
        terms = [("a " * 14 + f"b{number}", ["dog"]) for number in range(count)]
        terminology = Terminology(terms, tokenizer)
        begin = time.process_time()
        assert terminology.required("a " * 20_000) == []
        return time.process_time() - begin

    assert min(seconds(249) for _ in range(3)) < 5 * min(seconds(2) for _ in range(3)), "terms are tried one by one"


def test_scripts_without_spaces_match_inside_words(tokenizer):
    assert asked([("東京", ["Tokio"]), ("大学", ["Uni"])], "東京大学に", tokenizer) == [["Tokio"], ["Uni"]]
    (phrases,) = Terminology([("Tokyo", ["東京"])], tokenizer).required("to Tokyo")
    assert [tokenizer.decode(phrase) for phrase in phrases] == ["東京", "東京"]
    assert len(phrases[0]) == len(phrases[1]) + 1, "with a space before it and without"


def test_a_translation_that_the_vocabulary_cannot_spell_is_refused():
    tokenizer = train_tokenizer(TEXT, vocab_size=60, byte_fallback=False)
    with pytest.raises(UserError, match="the model's vocabulary cannot write 'Жук'"):
        Terminology([("bug", ["Жук"])], tokenizer)
