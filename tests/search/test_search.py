"""Searches with a table model, compared with exhaustive search and with the algorithm written out in Python."""

import pytest

from fasttfm.errors import UserError
from fasttfm.search import DecodingConfig, search_ids, translate_ids

from .table_model import EOS, Diverged, TableModel, by_hand, config, exhaustive

pytestmark = pytest.mark.usefixtures("either_engine")
SOURCES = [[number, *range(10, 10 + number % 5), EOS] for number in range(20, 44)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("length_penalty", ["wu", "power", "avg", "none"])
@pytest.mark.parametrize("alpha", [0.6, 2.0])
@pytest.mark.parametrize("min_len", [0, 2])
def test_a_beam_that_holds_everything_finds_the_exact_best(length_penalty, alpha, min_len):
    """3 words, at most 4 of them: at most 81 live hypotheses."""
    model = TableModel(vocab_size=7)
    settings = config(beam=81, nbest=5, length_penalty=length_penalty, alpha=alpha, max_len_b=4, min_len=min_len)
    for source, actual in zip(SOURCES, search_ids(model, SOURCES, settings, max_tokens=30), strict=True):
        best = exhaustive(model, source[0], 4, settings)[:5]
        assert [hypothesis.tokens for hypothesis in actual] == [tokens for _, tokens in best]
        assert [hypothesis.score for hypothesis in actual] == pytest.approx([score for score, _ in best], abs=1e-5)


def groups_of(beam, groups, strength, **changes):
    return {"beam": beam, "diverse_beam_groups": groups, "diverse_beam_strength": strength, "nbest": 6, **changes}


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        *({"length_penalty": penalty, "beam": 4} for penalty in ("wu", "power", "avg", "none")),
        *({"length_penalty": penalty, "beam": 64} for penalty in ("wu", "avg")),
        *(groups_of(6, groups, strength) for groups, strength in ((2, 0.5), (3, 2.0), (6, 0.3), (2, 0.0))),
        groups_of(6, 3, 2.0, length_penalty="none"),
    ],
    ids=str,
)
def test_a_search_equals_the_search_by_hand(changes, early_stopping):
    """It stops when nothing better can follow; the search by hand, without early_stopping, at the longest output."""
    model = TableModel(vocab_size=14)
    settings = config(**{"nbest": 3, "max_len_b": 8, **changes}, early_stopping=early_stopping)
    sources = SOURCES[:12]
    for source, actual in zip(sources, search_ids(model, sources, settings, max_tokens=60), strict=True):
        expected = by_hand(model, source[0], 8, settings)
        assert [each.tokens for each in actual] == [tokens for _, tokens in expected]
        assert [each.score for each in actual] == pytest.approx([score for score, _ in expected], abs=1e-5)
        of_the_best = model.log_probability(source[0], tuple(expected[0][1]))
        assert actual[0].log_probability == pytest.approx(of_the_best, abs=1e-5)


@pytest.mark.parametrize("groups", [2, 4])
def test_other_options_work_with_groups(groups):
    """Batches, prefixes, length limits, banned sequences, a vocabulary smaller than the beam."""
    model, banned = TableModel(vocab_size=14), [[7], [8, 9]]
    settings = config(beam=8, diverse_beam_groups=groups, nbest=3, min_len=2, no_repeat_ngram=1)
    prefixes = [[5, 6][: number % 3] for number in range(len(SOURCES))]
    actual = search_ids(model, SOURCES, settings, prefixes=prefixes, banned=banned, max_tokens=10_000)
    alone = [
        search_ids(model, [source], settings, prefixes=[prefix], banned=banned)[0]
        for source, prefix in zip(SOURCES, prefixes, strict=True)
    ]
    assert actual == alone
    for hypotheses, prefix in zip(actual, prefixes, strict=True):
        for tokens in (each.tokens for each in hypotheses):
            assert tokens[: len(prefix)] == prefix
            assert 2 <= len(tokens) <= 6
            assert not any(holds(tokens, each) for each in banned)
            assert len({*tokens}) == len(tokens)
    small = search_ids(TableModel(vocab_size=5), SOURCES, config(beam=8, diverse_beam_groups=groups, max_len_b=3))
    assert all(small)


def test_finished_sentences_leave_the_batch_and_the_first_step_runs_one_row_a_sentence():
    model = TableModel(vocab_size=12)
    search_ids(model, SOURCES, config(beam=4), max_tokens=10_000)
    rows = model.rows_computed
    assert rows[0] == len(SOURCES)
    assert rows[1] <= 4 * len(SOURCES)
    assert rows[1:] == sorted(rows[1:], reverse=True)
    assert rows[-1] < rows[1] / 2


@pytest.mark.parametrize("settings", [config(beam=1), config(), config(sampling=True)])
def test_length_limits_hold_and_special_tokens_never_come(settings):
    endless = TableModel(vocab_size=12, end=-30.0)
    settings = DecodingConfig(beam=settings.beam, sampling=settings.sampling, max_len_a=1.0, max_len_b=2)
    for source, tokens in zip(SOURCES, translate_ids(endless, SOURCES, settings, max_tokens=60), strict=True):
        assert len(tokens) == len(source) - 1 + 2, "as long as its own source allows, whatever the batch holds"
        assert min(tokens) > EOS
    hasty = TableModel(vocab_size=12, end=30.0)
    settings = DecodingConfig(beam=settings.beam, sampling=settings.sampling, min_len=5)
    assert {len(tokens) for tokens in translate_ids(hasty, SOURCES, settings)} == {5}


def test_the_unknown_token_comes_only_when_allowed():
    class Unknowing(TableModel):
        def logits(self, source, target):
            values = super().logits(source, target)
            values[1] += 50
            return values

    allowed = translate_ids(Unknowing(12), SOURCES, config(allow_unk=True))
    assert all(set(tokens) == {1} for tokens in allowed)
    assert not any(1 in tokens for tokens in translate_ids(Unknowing(12), SOURCES, config()))


@pytest.mark.parametrize("beam", [1, 3])
def test_a_prefix_is_kept_and_counts_in_the_score(beam):
    model = TableModel(vocab_size=9)
    prefixes = [[4 + number % 5, 1, 5][: number % 4] for number in range(len(SOURCES))]
    settings = config(beam=beam, max_len_b=2, nbest=1)
    for source, prefix, actual in zip(
        SOURCES, prefixes, search_ids(model, SOURCES, settings, prefixes=prefixes), strict=True
    ):
        tokens = actual[0].tokens
        assert tokens[: len(prefix)] == prefix
        assert len(tokens) <= max(2, len(prefix))
        expected = model.log_probability(source[0], tuple(tokens))
        assert actual[0].log_probability == pytest.approx(expected, abs=1e-5)


def test_no_sources_give_no_outputs_and_a_source_without_tokens_is_refused():
    assert translate_ids(TableModel(12), [], config()) == []
    with pytest.raises(ValueError, match="source 1 has no tokens"):
        translate_ids(TableModel(12), [[5, EOS], []], config())


def holds(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[position : position + len(part)] == part for position in range(len(tokens) - len(part) + 1))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_best_output_without_repeated_n_grams_or_banned_sequences_is_found(size):
    """3 words, at most 4 of them, a beam that holds everything."""
    model = TableModel(vocab_size=7)
    settings = config(beam=81, nbest=3, max_len_b=4, no_repeat_ngram=size)
    banned = [[5], [4, 6]]
    for source, actual in zip(SOURCES, search_ids(model, SOURCES, settings, banned=banned), strict=True):
        allowed = [
            (score, tokens)
            for score, tokens in exhaustive(model, source[0], 4, settings)
            if not any(holds(tokens, each) for each in banned)
            and len({*zip(*(tokens[place:] for place in range(size)))}) == max(0, len(tokens) + 1 - size)
        ]
        assert [each.tokens for each in actual] == [tokens for _, tokens in allowed[:3]]
    with pytest.raises(ValueError, match="banned sequence has no tokens"):
        search_ids(model, SOURCES, settings, banned=[[]])


@pytest.mark.parametrize(
    ("changes", "required"), [({"beam": 1}, None), ({}, None), ({"sampling": True}, None), ({}, [[[[5]]]] * 2)]
)
def test_a_diverged_model_is_reported(changes, required):
    with pytest.raises(UserError, match="training diverged"):
        search_ids(Diverged(12), SOURCES[:2], config(**changes), required=required)
