"""The thread that translates for all clients: who joins whom, and what a failure leaves behind."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from model_dirs import LINES, write_model_dir

pytest.importorskip("prometheus_client")
pytest.importorskip("numba")
from fasttfm.decoding import Translator
from fasttfm.decoding.continuous_batching import ContinuousBatching, continuous_batching
from fasttfm.errors import UserError
from fasttfm.serving.engine import Engine
from fasttfm.serving.metrics import Metrics

PATIENCE = 300


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    return Translator.from_directory(write_model_dir(tmp_path_factory.mktemp("served") / "small"), workers=1)


@pytest.fixture
def engine(translator):
    engine = Engine({"small": translator}, Metrics(), queue=100, wait_seconds=0.0)
    yield engine
    engine.stop()


def submit(engine, texts, **options):
    config = dataclasses.replace(engine.translators["small"].config, **options)
    return engine.submit("small", config, texts, [20] * len(texts))


def test_lines_that_are_added_between_steps_get_what_the_translator_gives(translator):
    lines = [*LINES, "", "a dog"]
    expected = translator.translate_nbest(lines)
    found: dict[int, list] = {}
    with continuous_batching(translator) as running:
        for number, line in enumerate(lines):
            running.add(number, line)
            found |= running.step()
        while running.searched:
            found |= running.step()
    assert [found[number] for number in range(len(lines))] == expected


def test_who_comes_while_a_search_runs_joins_it(engine, translator, monkeypatch):
    """The second sentence is asked for in the middle of the first one's search, and both are searched together."""
    later, together = [], []
    step = ContinuousBatching.step

    def watched(self):
        if len(together) == 3:
            later.extend(submit(engine, LINES[1:3], min_len=12))
        together.append(self.searched)
        return step(self)

    monkeypatch.setattr(ContinuousBatching, "step", watched)
    first = submit(engine, LINES[:1], min_len=12)
    answers = [first[0].result(PATIENCE), *(each.result(PATIENCE) for each in later)]
    assert max(together) == 3
    alone = copy.copy(translator)
    alone.config = dataclasses.replace(translator.config, min_len=12)
    assert answers == alone.translate_nbest(LINES[:3])


def test_other_options_wait_for_their_turn_and_hold_up_who_comes_later(engine, translator, monkeypatch):
    begun, asked = [], []
    step = ContinuousBatching.step

    def watched(self):
        if not asked:
            asked.extend([*submit(engine, LINES[1:2], beam=2), *submit(engine, LINES[2:3])])
        begun.append((self.translator.config.beam, self.searched))
        return step(self)

    monkeypatch.setattr(ContinuousBatching, "step", watched)
    first = submit(engine, LINES[:1])
    first[0].result(PATIENCE)
    for each in asked:
        each.result(PATIENCE)
    beams = [beam for beam, _ in begun]
    usual = translator.config.beam
    assert [beam for place, beam in enumerate(beams) if place == 0 or beams[place - 1] != beam] == [usual, 2, usual]
    assert max(count for _, count in begun) == 1


def test_a_failure_is_told_to_those_it_concerns_and_the_next_are_translated(engine, translator, monkeypatch):
    failing = iter([True])
    step = ContinuousBatching.step

    def broken(self):
        if next(failing, False):
            raise UserError("no memory")
        return step(self)

    monkeypatch.setattr(ContinuousBatching, "step", broken)
    for each in submit(engine, LINES[:2]):
        with pytest.raises(UserError, match="no memory"):
            each.result(PATIENCE)
    (answer,) = submit(engine, LINES[3:4])
    assert answer.result(PATIENCE) == translator.translate_nbest(LINES[3:4])[0]


def test_what_takes_whole_batches_is_translated_batch_by_batch(engine, translator, monkeypatch):
    monkeypatch.setattr(ContinuousBatching, "step", None)
    (answer,) = submit(engine, LINES[:1], sampling=True, nbest=1)
    assert len(answer.result(PATIENCE)) == 1
