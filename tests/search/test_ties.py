"""Ties: the better hypothesis comes first, then the lower token; every search against the rule in plain Python."""

import numpy as np
import pytest
from numba_passes import skip_without

from fasttfm.cpu import step_passes
from fasttfm.search import search_ids
from fasttfm.search.device.search import DeviceSearch

from .device_tables import search_by
from .table_model import EOS, TableCache, Tied, by_hand, config
from .test_constrained import meets
from .test_search import greedy_by_hand

SOURCES = [[number, EOS] for number in range(20, 32)]


@pytest.fixture(params=["numba", "torch", "device"])
def passes(request, monkeypatch):
    """The implementation that chooses tokens."""
    if request.param == "device":
        search_by(monkeypatch, DeviceSearch)
        return
    skip_without(request.param)
    if request.param == "torch":
        monkeypatch.setattr(step_passes, "takes", lambda x: False)


def sources_of(model):
    return SOURCES[: 4000 // model.vocab_size]


def found(model, settings, **options):
    return [[each.tokens for each in some] for some in search_ids(model, sources_of(model), settings, **options)]


def expected(model, settings):
    return [[tokens for _, tokens in by_hand(model, source, 4, settings)] for source, _ in sources_of(model)]


@pytest.mark.parametrize("moves_nothing", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        *({"beam": beam} for beam in (2, 3, 4, 5)),
        {"beam": 5, "early_stopping": True},
        {"beam": 4, "diverse_beam_groups": 2, "diverse_beam_strength": 128.0},
        {"beam": 6, "diverse_beam_groups": 3, "diverse_beam_strength": 64.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [5, 14, 1300])  # 5: fewer than a beam; 1300: several blocks
def test_beams(passes, monkeypatch, vocab_size, changes, moves_nothing):
    monkeypatch.setattr(TableCache, "moves_nothing", moves_nothing, raising=False)
    model, settings = Tied(vocab_size), config(**changes, nbest=changes["beam"], length_penalty="avg", max_len_b=4)
    assert found(model, settings) == expected(model, settings)


@pytest.mark.parametrize("vocab_size", [14, 1300])
def test_greedy_search(passes, vocab_size):
    model = Tied(vocab_size)
    model.likely = -128.0  # no token is certain
    actual = found(model, config(beam=1))
    assert actual == [[greedy_by_hand(model, source, 6)] for source, _ in sources_of(model)]


@pytest.mark.parametrize("topk", [0, 3])
@pytest.mark.parametrize("vocab_size", [14, 1300])
def test_sampling(passes, vocab_size, topk):
    model = Tied(vocab_size)
    actual = found(model, config(sampling=True, sampling_topk=topk, temperature=128.0, nbest=4, max_len_b=3))
    for number, ((source, _), outputs) in enumerate(zip(sources_of(model), actual, strict=True)):
        uniform = np.random.default_rng([1, number]).random((4, 4))
        drawn = set()
        for row in range(4):
            output: tuple[int, ...] = ()
            while len(output) < 3:
                values = model.logits(source, output)
                best = sorted(range(EOS, vocab_size), key=lambda token: -values[token])[: topk or None]  # stable
                mass = np.cumsum(np.exp([values[token] / 128 for token in best]))
                token = best[int(np.searchsorted(mass, uniform[len(output), row] * mass[-1], side="right"))]
                if token == EOS:
                    break
                output = (*output, token)
            drawn.add(output)
        assert set(map(tuple, outputs)) == drawn


@pytest.mark.parametrize("requirements", [[[[5]]], [[[4, 5], [6]], [[5], [6, 6]]]], ids=str)
def test_required_phrases(requirements):
    """A beam that holds everything finds all outputs that meet the requirements, in beam search order."""
    model, settings = Tied(7), config(beam=121, nbest=121, max_len_b=4, length_penalty="avg")
    actual = found(model, settings, required=[requirements] * len(SOURCES))
    for hypotheses, every in zip(actual, expected(model, settings), strict=True):
        assert len(every) == sum(3**length for length in range(5))
        assert hypotheses == [tokens for tokens in every if meets(tokens, requirements)]
