"""The load generator of the benchmark: right answers pass, wrong answers end the run."""

import random
from dataclasses import replace

import pytest
from model_dirs import LINES

from benchmarks import load as loads
from benchmarks.load import MIXED, Load


@pytest.mark.parametrize("kind", [*MIXED, "long"])
def test_a_right_answer_to_each_kind_of_request_passes_and_a_wrong_one_ends_the_run(kind, url, translator):
    expected = dict(zip(LINES, translator.translate(LINES)))
    load = Load(int(url.rpartition(":")[2]), LINES[:5], LINES[5:], expected, MIXED)
    for seed in range(6):
        load.ask(kind, random.Random(seed))
    wrong = replace(load, expected=dict.fromkeys(LINES, "another"))
    if kind not in ("hang up", "heavy"):
        with pytest.raises(SystemExit, match="was answered with 200"):
            wrong.ask(kind, random.Random(1))
    replace(wrong, expected=None).ask(kind, random.Random(1))


def test_a_record_lists_failed_checks():
    assert loads.failed([100] * 20, {"p50_ms": 10.0, "p99_ms": 30.0}) == []
    grown = loads.failed([100] * 15 + [106] * 5, {"p50_ms": 10.0, "p99_ms": 31.0})
    assert [line.split()[0] for line in grown] == ["memory", "short"]
