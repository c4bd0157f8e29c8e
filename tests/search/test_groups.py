"""Diverse beam search against the same by hand."""

import itertools

import pytest

from fasttfm.search import DecodingConfig, search_ids

from .table_model import EOS, TableModel, by_hand

pytestmark = pytest.mark.usefixtures("either_engine")
SOURCES = [[number, *range(10, 10 + number % 5), EOS] for number in range(20, 40)]


def config(**changes) -> DecodingConfig:
    return DecodingConfig(**{"beam": 6, "nbest": 1, "max_len_a": 0.0, "max_len_b": 6, "min_len": 0, **changes})


@pytest.mark.parametrize(("groups", "strength"), [(2, 0.5), (3, 2.0), (6, 0.3), (2, 0.0)])
@pytest.mark.parametrize(("length_penalty", "early_stopping"), [("wu", False), ("none", False), ("wu", True)])
def test_the_groups_find_what_they_find_by_hand(groups, strength, length_penalty, early_stopping):
    model = TableModel(vocab_size=14)
    settings = config(
        diverse_beam_groups=groups, diverse_beam_strength=strength, length_penalty=length_penalty, nbest=6,
        early_stopping=early_stopping,
    )  # fmt: skip
    for source, actual in zip(SOURCES, search_ids(model, SOURCES, settings, max_tokens=60)):
        expected = by_hand(model, source[0], 6, settings)
        assert [each.tokens for each in actual] == [tokens for _, tokens in expected]
        assert [each.score for each in actual] == pytest.approx([score for score, _ in expected], abs=1e-5)
        of_the_best = model.log_probability(source[0], tuple(expected[0][1]))
        assert actual[0].log_probability == pytest.approx(of_the_best, abs=1e-5)


def test_one_group_is_beam_search_and_no_strength_makes_groups_alike():
    model = TableModel(vocab_size=14)
    plain = search_ids(model, SOURCES, config(beam=3))
    assert search_ids(model, SOURCES, config(beam=3, diverse_beam_groups=1)) == plain
    alike = search_ids(model, SOURCES, config(beam=6, diverse_beam_groups=2, diverse_beam_strength=0.0, nbest=3))
    assert [actual[0].tokens for actual in alike] == [actual[0].tokens for actual in plain]


def test_strength_makes_outputs_differ_more():
    model = TableModel(vocab_size=14, spread=3.0)

    def first_words(strength):
        settings = config(diverse_beam_groups=6, diverse_beam_strength=strength, nbest=6, max_len_b=4)
        return sum(len({tuple(each.tokens[:1]) for each in actual}) for actual in search_ids(model, SOURCES, settings))

    assert first_words(5.0) > 1.5 * first_words(0.1)


@pytest.mark.parametrize("groups", [2, 4])
def test_what_else_holds_of_searches_holds(groups):
    """Batches, prefixes, lengths, banned sequences, a vocabulary smaller than the beam."""
    model = TableModel(vocab_size=14)
    settings = config(beam=8, diverse_beam_groups=groups, nbest=3, min_len=2, no_repeat_ngram=1)
    prefixes = [[5, 6][: number % 3] for number in range(len(SOURCES))]
    actual = search_ids(model, SOURCES, settings, prefixes=prefixes, banned=[[7], [8, 9]], max_tokens=10_000)
    alone = [
        search_ids(model, [source], settings, prefixes=[prefix], banned=[[7], [8, 9]])[0]
        for source, prefix in zip(SOURCES, prefixes)
    ]
    assert actual == alone
    for hypotheses, prefix in zip(actual, prefixes):
        for tokens in (each.tokens for each in hypotheses):
            assert tokens[: len(prefix)] == prefix
            assert 2 <= len(tokens) <= 6
            assert 7 not in tokens
            assert (8, 9) not in itertools.pairwise(tokens)
            assert len({*tokens}) == len(tokens)
    small = search_ids(TableModel(vocab_size=5), SOURCES, config(beam=8, diverse_beam_groups=groups, max_len_b=3))
    assert all(small)
