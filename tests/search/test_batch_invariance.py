"""Batch invariance: a sentence gets the bits that it gets alone, in every batch, and joining a running search.

On a device it gets the same tokens, and scores up to rounding.
"""

import random

import pytest

from fasttfm.cpu import step_passes
from fasttfm.search import DecodingConfig, search_ids
from fasttfm.search.batches import inference
from fasttfm.search.continuous import RunningSearch
from fasttfm.search.cpu.decoder_step import DecoderStep
from fasttfm.search.device.search import DeviceSearch
from fasttfm.search.tasks import Waiting

from .device_cases import assert_same
from .small_models import model_of, sources_of
from .table_model import EOS


def sources(lengths) -> list[list[int]]:
    draw = random.Random(1)
    return [[*(draw.randrange(4, 600) for _ in range(length)), EOS] for length in lengths]


DISTINCT = sources([26] * 12 + [25] * 4 + [*range(3, 27, 3)])  # 26, 27 and 28 tokens are padded to one length
BATCH = DISTINCT + DISTINCT[:16] + DISTINCT
kinds = pytest.mark.parametrize("kind", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.whole), "int8"])
SIZES = {"a small model": (48, 3), "a wide model": (512, 8)}
"""Weights too small to be packed for oneDNN, and large enough that it splits their sums."""


@pytest.mark.sample(3)
@kinds
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("beam", [1, 4])
def test_bits_do_not_depend_on_batch_and_order(kind, size, beam):
    fields = {"norm_first": True, "final_norm": True, "activation": "gelu"} if beam == 4 else {}
    model = model_of(kind, 600, *SIZES[size], std=4.0, **fields)
    settings = DecodingConfig(beam=beam, nbest=beam, max_len_a=0.0, max_len_b=7)
    alone = [search_ids(model, [source], settings)[0] for source in DISTINCT]
    assert len({tuple(hypotheses[0].tokens) for hypotheses in alone}) > len(DISTINCT) / 3
    alone = alone + alone[:16] + alone
    draw = random.Random(2)
    for count in (2, 3, 9, 17, 64):
        chosen = draw.sample(range(len(BATCH)), count)
        results = search_ids(model, [BATCH[position] for position in chosen], settings, max_tokens=10_000)
        assert results == [alone[position] for position in chosen], count


@pytest.mark.sample(2)
@kinds
@pytest.mark.parametrize("size", SIZES)
def test_bits_do_not_depend_on_the_number_of_threads(kind, size, threads):
    model = model_of(kind, 600, *SIZES[size], std=4.0)
    settings = DecodingConfig(beam=4, nbest=4, max_len_a=0.0, max_len_b=4)
    results = []
    for count in (1, 3, 8):
        threads(count)
        results.append(search_ids(model, BATCH, settings, max_tokens=10_000))
    assert all(each == results[0] for each in results)


# ------------------------------------------------------------------------------------------ joining a running search

joins = pytest.mark.skipif(not step_passes.usable(), reason="numba is not installed")
VOCABULARY = 150
SETTINGS = {
    "beam": DecodingConfig(beam=4, nbest=3, max_len_b=3, batch_tokens=128),
    "early": DecodingConfig(beam=4, nbest=3, max_len_b=9, early_stopping=True, batch_tokens=128),
    "another penalty": DecodingConfig(beam=4, nbest=3, max_len_b=3, length_penalty="wu", alpha=6.0, batch_tokens=128),
    "greedy": DecodingConfig(beam=1, max_len_b=3, batch_tokens=128),
    "sampling": DecodingConfig(sampling=True, nbest=2, max_len_b=3, batch_tokens=128),
    "constraints": DecodingConfig(beam=3, no_repeat_ngram=2, min_len=4, max_len_a=0.5, max_len_b=2, batch_tokens=96),
    "groups": DecodingConfig(beam=4, diverse_beam_groups=2, max_len_b=3, batch_tokens=128),
}
SOURCES = sources_of(VOCABULARY, 16)
PREFIXES = [[5, 9, 7][: number % 4] for number in range(len(SOURCES))]
BANNED = [[11], [12, 13]]


def alone(model, configs, allowed=()):
    """Each sentence searched by itself."""
    allowed = allowed or [None] * len(SOURCES)
    return [
        search_ids(model, [source], config, prefixes=[prefix], numbers=[number], allowed=[some], banned=BANNED)[0]
        for number, (source, config, prefix, some) in enumerate(zip(SOURCES, configs, PREFIXES, allowed, strict=True))
    ]


@joins
def test_finished_rows_are_replaced_at_once_within_the_budget(monkeypatch):
    """Forced outputs: four long ones, and many short ones that fill the rest of the budget."""
    model, config = model_of("fp32", VOCABULARY), DecodingConfig(beam=2, max_len_a=0.0, max_len_b=0, batch_tokens=128)
    prefixes = [[7] * (40 if number < 4 else 5) for number in range(20)]
    rows: list[int] = []
    step = DecoderStep.__call__
    monkeypatch.setattr(
        DecoderStep, "__call__", lambda self, tokens, cache: (rows.append(len(tokens)), step(self, tokens, cache))[1]
    )
    with inference(model, batch_invariant=True):
        running = RunningSearch(model, config)
        running.waiting += [Waiting(number, [4] * 15 + [EOS], prefix) for number, prefix in enumerate(prefixes)]
        found = dict(running.run())
    assert [found[number][0].tokens for number in range(20)] == prefixes
    assert max(rows) <= 8 * 2, "eight sentences of sixteen tokens fit"
    assert len(rows) <= 41 + 6, "the sixteen short ones run beside the long ones"


@joins
@pytest.mark.parametrize(
    ("search", "kind"), [*((RunningSearch, kind) for kind in ("fp32", "bf16", "int8")), (DeviceSearch, "fp32")]
)
def test_sentences_join_with_their_own_options_and_leave(search, kind):
    """Options, lists of allowed tokens and cancelled sentences mix; sentences with equal options share rows."""
    host = search is RunningSearch
    model, draw = model_of(kind, VOCABULARY), random.Random(11)
    kinds = list(SETTINGS) if host else ["beam", "another penalty", "beam", "another penalty", "groups"]
    configs = [SETTINGS[draw.choice(kinds)] for _ in SOURCES]
    limited = [bool(number % 3) == host for number in range(len(SOURCES))]
    allowed = [sorted(draw.sample(range(4, 150), 60)) if each else None for each in limited]
    expected = alone(model, configs, allowed)
    gone, found, left = {3, 8, 9}, {}, list(range(len(SOURCES)))
    with inference(model, batch_invariant=True):
        running = search(model, SETTINGS["beam"], banned=BANNED)
        assert not host or running.continues
        while left or not running.idle:
            for number in [left.pop(0) for _ in range(min(len(left), draw.choice([0, 0, 1, 3] if host else [0, 8])))]:
                given = SOURCES[number], PREFIXES[number], number, allowed[number], (), configs[number]
                assert not running.join([Waiting(number, *given)])
            found.update(running.step())
            running.drop(gone)
            assert not host or len({each.kind for each in running._steps}) == len(running._steps)
    kept = [number for number in range(len(SOURCES)) if number not in gone]
    assert sorted(found) == kept
    if host:
        assert all(found[number] == expected[number] for number in kept)
    assert_same([found[number] for number in kept], [expected[number] for number in kept])
