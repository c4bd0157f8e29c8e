"""Diverse beam search, compared with the algorithm written out in Python."""

import itertools
from functools import partial

import pytest

from fasttfm.search import search_ids

from . import table_model
from .table_model import EOS, TableModel, by_hand

pytestmark = pytest.mark.usefixtures("either_engine")
SOURCES = [[number, *range(10, 10 + number % 5), EOS] for number in range(20, 40)]


config = partial(table_model.config, beam=6)


@pytest.mark.parametrize(("groups", "strength"), [(2, 0.5), (3, 2.0), (6, 0.3), (2, 0.0)])
@pytest.mark.parametrize(("length_penalty", "early_stopping"), [("wu", False), ("none", False), ("wu", True)])
def test_groups_equal_the_search_by_hand(groups, strength, length_penalty, early_stopping):
    model = TableModel(vocab_size=14)
    settings = config(
        diverse_beam_groups=groups, diverse_beam_strength=strength, length_penalty=length_penalty, nbest=6,
        early_stopping=early_stopping,
    )  # fmt: skip
    for source, actual in zip(SOURCES, search_ids(model, SOURCES, settings, max_tokens=60), strict=True):
        expected = by_hand(model, source[0], 6, settings)
        assert [each.tokens for each in actual] == [tokens for _, tokens in expected]
        assert [each.score for each in actual] == pytest.approx([score for score, _ in expected], abs=1e-5)
        of_the_best = model.log_probability(source[0], tuple(expected[0][1]))
        assert actual[0].log_probability == pytest.approx(of_the_best, abs=1e-5)


def test_one_group_is_beam_search_and_groups_without_strength_are_equal():
    model = TableModel(vocab_size=14)
    plain = search_ids(model, SOURCES, config(beam=3))
    assert search_ids(model, SOURCES, config(beam=3, diverse_beam_groups=1)) == plain
    alike = search_ids(model, SOURCES, config(beam=6, diverse_beam_groups=2, diverse_beam_strength=0.0, nbest=3))
    assert [actual[0].tokens for actual in alike] == [actual[0].tokens for actual in plain]


@pytest.mark.parametrize("groups", [2, 4])
def test_other_options_work_with_groups(groups):
    """Batches, prefixes, length limits, banned sequences, a vocabulary smaller than the beam."""
    model = TableModel(vocab_size=14)
    settings = config(beam=8, diverse_beam_groups=groups, nbest=3, min_len=2, no_repeat_ngram=1)
    prefixes = [[5, 6][: number % 3] for number in range(len(SOURCES))]
    actual = search_ids(model, SOURCES, settings, prefixes=prefixes, banned=[[7], [8, 9]], max_tokens=10_000)
    alone = [
        search_ids(model, [source], settings, prefixes=[prefix], banned=[[7], [8, 9]])[0]
        for source, prefix in zip(SOURCES, prefixes, strict=True)
    ]
    assert actual == alone
    for hypotheses, prefix in zip(actual, prefixes, strict=True):
        for tokens in (each.tokens for each in hypotheses):
            assert tokens[: len(prefix)] == prefix
            assert 2 <= len(tokens) <= 6
            assert 7 not in tokens
            assert (8, 9) not in itertools.pairwise(tokens)
            assert len({*tokens}) == len(tokens)
    small = search_ids(TableModel(vocab_size=5), SOURCES, config(beam=8, diverse_beam_groups=groups, max_len_b=3))
    assert all(small)
