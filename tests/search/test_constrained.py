"""Required phrases: exhaustive comparison, and combinations with all other options."""

import itertools
import random

import pytest

from fasttfm.search import search_ids
from fasttfm.search.phrases import Required

from .table_model import EOS, TableModel, config, penalty

SOURCES = [[number, *range(10, 10 + number % 5), EOS] for number in range(20, 32)]


def meets(tokens: list[int], requirements, continuations=frozenset(), free=None) -> bool:
    """Whether one alternative of each requirement occurs, without overlaps; tries all places."""
    if not requirements:
        return True
    free = [True] * len(tokens) if free is None else free
    for phrase in map(list, requirements[0]):
        for position in range(len(tokens) - len(phrase) + 1):
            end = position + len(phrase)
            goes_on = end < len(tokens) and tokens[end] in continuations
            if tokens[position:end] == phrase and not goes_on and all(free[position:end]):
                rest = [each and not position <= number < end for number, each in enumerate(free)]
                if meets(tokens, requirements[1:], continuations, rest):
                    return True
    return False


REQUIREMENTS = [
    [[[5]]],
    [[[5]], [[5]]],
    [[[4, 5]], [[5, 4]]],
    [[[4, 5], [6]], [[5], [6, 6]]],
    [[[4, 4, 5]]],
    [[[6, 4], [4, 6]], [[4]]],
    [[[4], [5]], [[5], [6]], [[6], [4]]],
    [[[5, 7]], [[5]]],
]


@pytest.mark.parametrize("requirements", REQUIREMENTS, ids=str)
@pytest.mark.parametrize("continuations", [frozenset(), frozenset({7})], ids=["whole", "words"])
def test_a_beam_that_holds_everything_finds_the_exact_best(requirements, continuations):
    """4 words, at most 4 of them."""
    model = TableModel(vocab_size=8)
    settings = config(beam=256, nbest=4, max_len_b=4)
    results = search_ids(
        model, SOURCES[:5], settings, required=[requirements] * 5, continuations=continuations, max_tokens=60
    )
    for source, hypotheses in zip(SOURCES[:5], results, strict=True):
        allowed = [
            (model.log_probability(source[0], tokens) / penalty(length + 1, settings), list(tokens))
            for length in range(5)
            for tokens in itertools.product((4, 5, 6, 7), repeat=length)
            if meets(list(tokens), requirements, continuations)
        ]
        best = sorted(allowed, reverse=True)[:4]
        assert [each.tokens for each in hypotheses] == [tokens for _, tokens in best]
        assert [each.score for each in hypotheses] == pytest.approx([score for score, _ in best], abs=1e-5)


def test_sentences_without_requirements_are_searched_as_usual():
    model = TableModel(vocab_size=12)
    required = [[[[5, 6]]] if number % 3 == 0 else [] for number in range(len(SOURCES))]
    plain, results = search_ids(model, SOURCES, config()), search_ids(model, SOURCES, config(), required=required)
    assert [each == other for each, other in zip(plain, results)] == [number % 3 != 0 for number in range(len(SOURCES))]


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(20))
def test_required_phrases_occur_with_all_other_options(seed):
    """Beams, batches, prefixes, banned words, repetition, insufficient length limits."""
    draw = random.Random(seed)
    model = TableModel(vocab_size=14, end=draw.choice([-20.0, 0.0, 4.0, 30.0]))
    settings = config(
        beam=draw.choice([1, 2, 3, 5, 8]), max_len_b=draw.choice([0, 1, 4, 9]), min_len=draw.choice([0, 0, 3]),
        no_repeat_ngram=draw.choice([0, 0, 1, 2]), length_penalty=draw.choice(["wu", "avg", "none"]),
    )  # fmt: skip
    words = range(4, 14)
    required = [
        [
            [draw.choices(words, k=draw.randint(1, 3)) for _ in range(draw.randint(1, 3))]
            for _ in range(draw.choice([0, 1, 2, 3, 5]))
        ]
        for _ in SOURCES
    ]
    prefixes = [draw.choices(words, k=draw.choice([0, 0, 1, 3])) for _ in SOURCES]
    banned = [draw.choices(words, k=draw.randint(1, 2)) for _ in range(2)]
    continuations = frozenset(draw.sample(words, k=3)) if draw.random() < 0.5 else frozenset()
    if continuations:  # phrases begin with a word
        starts = [word for word in words if word not in continuations]
        required = [[[[draw.choice(starts), *phrase[1:]] for phrase in each] for each in one] for one in required]
    options = {"banned": banned, "continuations": continuations}
    results = search_ids(model, SOURCES, settings, prefixes=prefixes, required=required, max_tokens=60, **options)
    for source, prefix, requirements, hypotheses in zip(SOURCES, prefixes, required, results, strict=True):
        tokens = hypotheses[0].tokens
        assert meets(tokens, requirements, continuations)
        assert tokens[: len(prefix)] == prefix
        longest = sum(max(map(len, phrases)) for phrases in requirements)
        assert len(tokens) <= max(settings.longest_output(len(source) - 1), len(prefix) + longest)
        alone = search_ids(model, [source], settings, prefixes=[prefix], required=[requirements], **options)[0]
        assert alone == hypotheses
        assert hypotheses[0].log_probability == pytest.approx(model.log_probability(source[0], tuple(tokens)), abs=1e-4)


def test_invalid_requirements_are_refused():
    model = TableModel(vocab_size=12)
    for wrong, message in (
        ([[[]]], "has no tokens"),
        ([[]], "has no tokens"),
        ([[[5, EOS]]], "holds padding, begin- or end-of-sentence"),
    ):
        with pytest.raises(ValueError, match=message):
            search_ids(model, SOURCES[:1], config(), required=[wrong])
    with pytest.raises(ValueError, match="2 required for 1 sources"):
        search_ids(model, SOURCES[:1], config(), required=[[], []])
    for settings in (config(sampling=True), config(diverse_beam_groups=2)):
        with pytest.raises(ValueError, match="required phrases need a beam search"):
            search_ids(model, SOURCES[:1], settings, required=[[[[5]]]])


@pytest.mark.parametrize("phrase", [[4, 5] * 300, [4] * 200, [4, 5, 6] * 340])
def test_a_long_periodic_phrase_can_begin_and_break_off_anywhere(phrase):
    required = Required([[phrase]], frozenset({7}))
    state = required.start
    for token in [*phrase[:-1], 7, *phrase[: len(phrase) // 2], 9]:
        state = required.after(state, token)
        assert 0 < required.needs(state) <= len(phrase)
    assert required.needs(state) == len(phrase)
    for token in phrase:
        state = required.after(state, token)
    assert required.needs(state) == 0
