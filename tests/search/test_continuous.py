"""Continuous batching on the host: sentences that join a running search get the bits that they get alone."""

import random

import pytest

from fasttfm.cpu import step_passes
from fasttfm.search import DecodingConfig, continuous, search_ids
from fasttfm.search.batches import inference
from fasttfm.search.continuous import RunningSearch
from fasttfm.search.cpu.decoder_step import DecoderStep
from fasttfm.search.tasks import Waiting

from .small_models import model_of, sources_of
from .table_model import EOS

pytestmark = pytest.mark.skipif(not step_passes.usable(), reason="numba is not installed")
VOCABULARY = 150
SETTINGS = {
    "beam": DecodingConfig(beam=4, nbest=3, max_len_b=3, batch_tokens=128),
    "early": DecodingConfig(beam=4, nbest=3, max_len_b=9, early_stopping=True, batch_tokens=128),
    "greedy": DecodingConfig(beam=1, max_len_b=3, batch_tokens=128),
    "sampling": DecodingConfig(sampling=True, nbest=2, max_len_b=3, batch_tokens=128),
    "constraints": DecodingConfig(beam=3, no_repeat_ngram=2, min_len=4, max_len_a=0.5, max_len_b=2, batch_tokens=96),
}


SOURCES = sources_of(VOCABULARY, 16)
PREFIXES = [[5, 9, 7][: number % 4] for number in range(len(SOURCES))]
BANNED = [[11], [12, 13]]


def join_at_random(running: RunningSearch, seed: int) -> dict[int, list]:
    """Run a search that sentences join in random order, a few before each step."""
    draw = random.Random(seed)
    left = draw.sample(range(len(SOURCES)), len(SOURCES))
    found: dict[int, list] = {}
    while left or not running.idle:
        for _ in range(min(len(left), draw.choice([0, 0, 1, 5]))):
            place = left.pop()
            running.waiting.append(Waiting(place, SOURCES[place], PREFIXES[place], place))
        for place, hypotheses in running.step():
            assert place not in found
            found[place] = hypotheses
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "beam") for kind in ("fp32", "bf16", "int8")),
        *(("bf16", name) for name in ("early", "greedy", "sampling", "constraints")),
    ],
)
def test_bits_do_not_depend_on_concurrent_sentences(kind, name):
    model, config = model_of(kind, VOCABULARY), SETTINGS[name]
    alone = [
        search_ids(model, [source], config, prefixes=[prefix], numbers=[number], banned=BANNED)[0]
        for number, (source, prefix) in enumerate(zip(SOURCES, PREFIXES, strict=True))
    ]
    together = search_ids(model, SOURCES, config, prefixes=PREFIXES, banned=BANNED)
    assert together == alone
    assert len({tuple(hypotheses[0].tokens) for hypotheses in alone}) > len(SOURCES) / 2
    with inference(model, batch_invariant=True):
        running = RunningSearch(model, config, banned=BANNED)
        assert running.continues
        found = join_at_random(running, seed=len(name))
    assert [found[place] for place in range(len(SOURCES))] == alone


def test_results_equal_those_of_fixed_batches(monkeypatch):
    model, config = model_of("fp32", VOCABULARY), SETTINGS["beam"]
    found = search_ids(model, SOURCES, config)
    monkeypatch.setattr(continuous, "can_continue", lambda *_: False)
    assert search_ids(model, SOURCES, config) == found


def test_finished_rows_are_replaced_at_once_within_the_budget(monkeypatch):
    """Forced outputs: four long ones, and many short ones that fill the rest of the budget."""
    model, config = model_of("fp32", VOCABULARY), DecodingConfig(beam=2, max_len_a=0.0, max_len_b=0, batch_tokens=128)
    prefixes = [[7] * (40 if number < 4 else 5) for number in range(20)]
    rows: list[int] = []
    step = DecoderStep.__call__

    def counted(self, tokens, cache):
        rows.append(len(tokens))
        return step(self, tokens, cache)

    monkeypatch.setattr(DecoderStep, "__call__", counted)
    with inference(model, batch_invariant=True):
        running = RunningSearch(model, config)
        running.waiting += [Waiting(number, [4] * 15 + [EOS], prefix) for number, prefix in enumerate(prefixes)]
        found = dict(running.run())
    assert [found[number][0].tokens for number in range(20)] == prefixes
    assert max(rows) <= 8 * 2, "eight sentences of sixteen tokens fit"
    assert len(rows) <= 41 + 6, "the sixteen short ones run beside the long ones"


def test_sentences_with_equal_options_share_a_search():
    """Options, lists of allowed tokens and cancelled sentences mix."""
    model, draw = model_of("bf16", VOCABULARY), random.Random(11)
    configs = [draw.choice(list(SETTINGS.values())) for _ in SOURCES]
    allowed = [sorted(draw.sample(range(4, 150), 60)) if number % 3 else None for number in range(len(SOURCES))]
    alone = [
        search_ids(model, [source], config, prefixes=[prefix], numbers=[number], allowed=[some], banned=BANNED)[0]
        for number, (source, config, prefix, some) in enumerate(zip(SOURCES, configs, PREFIXES, allowed, strict=True))
    ]
    gone, found, left = {3, 8, 9}, {}, list(range(len(SOURCES)))
    with inference(model, batch_invariant=True):
        running = RunningSearch(model, SETTINGS["beam"], banned=BANNED)
        while left or not running.idle:
            for number in [left.pop(0) for _ in range(min(len(left), draw.choice([0, 0, 1, 3])))]:
                member = Waiting(
                    number, SOURCES[number], PREFIXES[number], number, allowed[number], (), configs[number]
                )
                assert not running.join([member])
            found.update(running.step())
            running.drop(gone)
            assert len({each.kind for each in running._steps}) == len(running._steps)
    assert found == {number: alone[number] for number in range(len(SOURCES)) if number not in gone}
