"""The load of all kinds of clients: that every kind is answered rightly, and that wrong answers end it."""

import random
import threading
from dataclasses import replace

import pytest
from model_dirs import LINES

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from benchmarks import mixed_load
from benchmarks.mixed_load import KINDS, Load


@pytest.fixture
def load(url, translator):
    return Load(int(url.rpartition(":")[2]), LINES[:5], LINES[5:], dict(zip(LINES, translator.translate(LINES))))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_request_is_answered_as_it_must_be(load, kind):
    for seed in range(6):
        load.ask(kind, random.Random(seed))


def test_a_wrong_answer_is_noticed_whatever_asked_for_it(load):
    wrong = replace(load, expected=dict.fromkeys(LINES, "another"))
    for kind in set(KINDS) - {"hang up", "heavy"}:
        with pytest.raises(SystemExit, match="was answered with 200"):
            wrong.ask(kind, random.Random(1))


def test_a_run_ends_with_the_first_client_that_fails(load):
    asked = threading.Event()

    class Failing(Load):
        def ask(self, kind, draws):
            assert not asked.is_set()
            asked.set()
            raise SystemExit("wrong")

    with pytest.raises(SystemExit, match="wrong"):
        mixed_load.run(Failing(0, [], [], {}), 1e6, 1, lambda: 0, clients=1)


def test_a_record_says_which_checks_failed():
    assert mixed_load.failed([100] * 20, {"p50_ms": 10.0, "p99_ms": 30.0}) == []
    grown = mixed_load.failed([100] * 15 + [106] * 5, {"p50_ms": 10.0, "p99_ms": 31.0})
    assert [line.split()[0] for line in grown] == ["memory", "short"]
