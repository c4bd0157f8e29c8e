"""Searches with a table model, compared with exhaustive search and with the algorithm written out in Python."""

import itertools

import pytest
import torch

from fasttfm.errors import UserError
from fasttfm.search import DecodingConfig, search_ids, translate_ids

from .table_model import EOS, Diverged, TableModel, by_hand, config, exhaustive

pytestmark = pytest.mark.usefixtures("either_engine")
SOURCES = [[number, *range(10, 10 + number % 5), EOS] for number in range(20, 44)]


def greedy_by_hand(model: TableModel, source: int, longest: int) -> list[int]:
    target: tuple[int, ...] = ()
    while len(target) < longest:
        logits = model.logits(source, target)
        token = max(range(EOS, model.vocab_size), key=logits.__getitem__)
        if token == EOS:
            break
        target = (*target, token)
    return list(target)


def test_beam_one_is_greedy_search():
    model = TableModel(vocab_size=12)
    expected = [greedy_by_hand(model, source[0], longest=6) for source in SOURCES]
    assert translate_ids(model, SOURCES, config(beam=1), max_tokens=40) == expected
    assert {len(tokens) for tokens in expected} >= {1, 2, 3, 6}, "the table must give outputs of many lengths"


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


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize(
    ("length_penalty", "beam"), [("wu", 4), ("power", 4), ("avg", 4), ("none", 4), ("wu", 64), ("avg", 64)]
)
def test_a_search_stops_when_nothing_better_can_follow_or_early_when_enough_have_ended(
    length_penalty, beam, early_stopping
):
    """Compared with a beam search by hand, which without early_stopping runs to the longest output."""
    model = TableModel(vocab_size=12)
    settings = config(length_penalty=length_penalty, beam=beam, nbest=3, max_len_b=8, early_stopping=early_stopping)
    actual = search_ids(model, SOURCES, settings, max_tokens=40)
    for source, hypotheses in zip(SOURCES, actual, strict=True):
        expected = by_hand(model, source[0], 8, settings)
        assert [hypothesis.tokens for hypothesis in hypotheses] == [tokens for _, tokens in expected]
    assert len(model.rows_computed) > 0


@pytest.mark.parametrize("phrases", [None, [[[5, 6]]]])
def test_early_stopping_takes_fewer_steps_and_may_change_results(phrases):
    results, rows = [], []
    required = None if phrases is None else [phrases] * len(SOURCES)
    for early_stopping in (False, True):
        model = TableModel(vocab_size=12)
        settings = config(max_len_b=20, alpha=2.0, early_stopping=early_stopping)
        results.append(search_ids(model, SOURCES, settings, max_tokens=10_000, required=required))
        rows.append(sum(model.rows_computed))
    if phrases is None:
        assert rows[1] < rows[0] / 2
        assert results[0] != results[1]
    else:
        assert rows[1] < rows[0]
        assert all(holds(hypotheses[0].tokens, [5, 6]) for each in results for hypotheses in each)


def test_finished_sentences_leave_the_batch_and_the_first_step_runs_one_row_a_sentence():
    model = TableModel(vocab_size=12)
    search_ids(model, SOURCES, config(beam=4), max_tokens=10_000)
    rows = model.rows_computed
    assert rows[0] == len(SOURCES)
    assert rows[1] <= 4 * len(SOURCES)
    assert rows[1:] == sorted(rows[1:], reverse=True)
    assert rows[-1] < rows[1] / 2


def test_a_certain_ending_stops_the_search_at_once():
    model = TableModel(vocab_size=12, end=30.0)
    assert translate_ids(model, SOURCES, config(max_len_b=50)) == [[] for _ in SOURCES]
    assert len(model.rows_computed) == 1


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
@pytest.mark.parametrize("settings", [{"beam": 1}, {"beam": 4}, {"sampling": True}])
def test_no_n_gram_is_repeated(size, settings):
    """4 words, at least 20 times: with only 16 pairs and 64 triples, unconstrained outputs repeat some."""
    model = TableModel(vocab_size=12 if size == 1 else 8, end=-30.0)
    length = 8 if size == 1 else 12
    free, actual = (
        translate_ids(model, SOURCES, config(**settings, max_len_b=length, no_repeat_ngram=each)) for each in (0, size)
    )

    def repeats(tokens):
        grams = [tuple(tokens[position : position + size]) for position in range(len(tokens) - size + 1)]
        return len(grams) > len({*grams})

    assert not any(map(repeats, actual))
    if size < 3:
        assert sum(map(repeats, free)) > len(SOURCES) / 2, "unconstrained outputs must repeat"
    if settings == {"beam": 1}:
        assert all(tokens == other for tokens, other in zip(free, actual) if not repeats(tokens)), "unchanged"


def test_the_best_output_without_repetition_or_banned_sequences_is_found():
    """3 words, at most 4 of them, a beam that holds everything."""
    model = TableModel(vocab_size=7)
    settings = config(beam=81, nbest=3, max_len_b=4, no_repeat_ngram=2)
    banned = [[5], [4, 6]]
    for source, actual in zip(SOURCES, search_ids(model, SOURCES, settings, banned=banned), strict=True):
        allowed = [
            (score, tokens)
            for score, tokens in exhaustive(model, source[0], 4, settings)
            if not any(holds(tokens, each) for each in banned)
            and len({*itertools.pairwise(tokens)}) == max(0, len(tokens) - 1)
        ]
        assert [each.tokens for each in actual] == [tokens for _, tokens in allowed[:3]]
    with pytest.raises(ValueError, match="banned sequence has no tokens"):
        search_ids(model, SOURCES, settings, banned=[[]])


def test_a_prefix_may_contain_banned_sequences():
    model = TableModel(vocab_size=9)
    prefixes = [[4, 5, 4, 5] for _ in SOURCES]
    settings = config(max_len_b=6, no_repeat_ngram=2)
    actual = search_ids(model, SOURCES, settings, prefixes=prefixes, banned=[[4, 5], [7]])
    assert all(each[0].tokens[:4] == [4, 5, 4, 5] for each in actual)
    assert not any(7 in each[0].tokens for each in actual)


def test_the_training_mode_is_restored():
    model = TableModel(12).train()
    translate_ids(model, SOURCES[:2], config())
    assert model.training


def test_samples_depend_only_on_seed_and_number():
    model = TableModel(vocab_size=12)
    settings = config(sampling=True, nbest=3)
    together = search_ids(model, SOURCES, settings, max_tokens=10_000)
    alone = [search_ids(model, [source], settings, numbers=[position])[0] for position, source in enumerate(SOURCES)]
    assert together == alone
    assert together != search_ids(model, SOURCES, config(sampling=True, nbest=3, sampling_seed=2))


def test_samples_follow_the_distribution():
    class Flat(TableModel):
        def logits(self, source, target):
            return [-100.0] * 3 + [-100.0] + [1.0, 2.0, 3.0, 0.0]

    settings = config(sampling=True, nbest=4000, max_len_b=1)
    drawn = [hypothesis.tokens[0] for hypothesis in search_ids(Flat(8), [[5, EOS]], settings)[0]]
    expected = torch.tensor([1.0, 2.0, 3.0, 0.0]).softmax(0)
    share = torch.bincount(torch.tensor(drawn), minlength=8)[4:] / 4000
    torch.testing.assert_close(share, expected, atol=0.03, rtol=0)

    def drawn_with(**changes):
        actual = search_ids(Flat(8), [[5, EOS]], config(sampling=True, nbest=500, max_len_b=1, **changes))[0]
        return {hypothesis.tokens[0] for hypothesis in actual}

    assert drawn_with(sampling_topk=2) == {5, 6}
    assert drawn_with(sampling_topp=0.6) == {6}, "0.64 alone reaches 0.6"
    assert drawn_with(sampling_topp=0.7) == {5, 6}
    assert drawn_with(temperature=0.01) == {6}


@pytest.mark.parametrize(
    ("changes", "required"), [({"beam": 1}, None), ({}, None), ({"sampling": True}, None), ({}, [[[[5]]]] * 2)]
)
def test_a_diverged_model_is_reported(changes, required):
    with pytest.raises(UserError, match="training diverged"):
        search_ids(Diverged(12), SOURCES[:2], config(**changes), required=required)
