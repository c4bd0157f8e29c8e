"""The load of a server: what is asked for, that answers are checked, and from when waiting counts."""

import json
import random

import pytest
from model_dirs import LINES as SENTENCES
from model_dirs import write_model_dir

from benchmarks import open_loop
from benchmarks.measure.records import validate
from benchmarks.open_loop import Requests

LINES = ["a", "b b", "c c c", "d d d d", "e e e e e", "f f f f f f"]


class AtOnce(open_loop.Server):
    """Answers at once."""

    def __init__(self):
        super().__init__(0)

    def ask(self, texts):
        pass


def test_short_requests_are_of_the_shortest_third_and_long_ones_of_the_longest():
    requests = Requests.from_lines(LINES[::-1])
    assert (requests.short, requests.long) == (LINES[:2], LINES[4:])
    draws = random.Random(1)
    drawn = [requests.draw(draws) for _ in range(500)]
    assert {len(texts) for kind, texts in drawn if kind == "short"} == {1}
    assert {len(texts) for kind, texts in drawn if kind == "long"} == {8}
    assert sum(kind == "short" for kind, _ in drawn) / 500 == pytest.approx(0.8, abs=0.05)


def test_a_request_that_was_sent_late_has_waited_since_it_was_due(monkeypatch):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds + 1.0  # wakes a second too late

    class Pool:
        def __init__(self, _):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, function, *arguments):
            function(*arguments)
            return self

        def result(self):
            pass

    monkeypatch.setattr(open_loop.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(open_loop.time, "sleep", sleep)
    monkeypatch.setattr(open_loop, "ThreadPoolExecutor", Pool)
    found = open_loop.waits(AtOnce(), Requests.from_lines(LINES), rate=2.0, seconds=20.0, seed=1)
    waited = [*found["short"], *found["long"]]
    assert len(waited) > 20
    assert max(waited) > 10  # twice as many are due as can be sent


def test_clients_stop_asking_when_the_benchmark_is_stopped(monkeypatch):
    wait = open_loop.threading.Event.wait

    def stopped(event, seconds=None):
        if seconds is not None:
            raise KeyboardInterrupt
        return wait(event)  # for a thread's begin

    monkeypatch.setattr(open_loop.threading.Event, "wait", stopped)
    monkeypatch.setattr(open_loop, "_CLIENTS", 1)
    with pytest.raises(KeyboardInterrupt):
        open_loop.capacity(AtOnce(), Requests.from_lines(LINES), seconds=600.0)


def test_a_row_has_the_quantiles_of_each_kind_in_milliseconds():
    row = open_loop.row_of("fasttfm", 0.8, 4.0, {"short": [0.1 * n for n in range(1, 12)], "long": [2.0]})
    assert (row["short_requests"], row["short_p50_ms"], row["short_p99_ms"]) == (11, 600.0, 1090.0)
    assert (row["long_requests"], row["long_p50_ms"], row["long_p99_ms"]) == (1, 2000.0, 2000.0)


@pytest.mark.whole
def test_a_record_is_written(tmp_path):
    pytest.importorskip("uvicorn")
    pytest.importorskip("ctranslate2")
    model = write_model_dir(tmp_path / "model", trained=False)
    (tmp_path / "in.en").write_text("\n".join(SENTENCES))
    flags = ["--seconds", "1", "--text", str(tmp_path / "in.en"), "--results", str(tmp_path)]
    assert open_loop.main([str(model), *flags]) == 0
    record = json.loads((tmp_path / "open-loop.jsonl").read_text())
    validate(record)
    assert [(row["provider"], row["load"]) for row in record["measured"]] == [
        (provider, load) for provider in (*open_loop.EARLY_STOPPING, "CTranslate2") for load in open_loop.LOADS
    ]
    assert max(row["sentences_per_second"] for row in record["measured"]) > 0
    for row in record["measured"]:
        assert row["short_requests"] + row["long_requests"] > 0
        assert row["resident_mib"] > 50
        for kind in ("short", "long"):
            assert row[f"{kind}_p99_ms"] >= row[f"{kind}_p50_ms"] >= 0


@pytest.mark.whole
def test_a_mixed_load_has_a_record_of_its_own(tmp_path):
    pytest.importorskip("uvicorn")
    model = write_model_dir(tmp_path / "model", trained=False)
    (tmp_path / "in.en").write_text("\n".join(SENTENCES))
    flags = ["--mixed", "--seconds", "20", "--text", str(tmp_path / "in.en"), "--results", str(tmp_path)]
    status = open_loop.main([str(model), *flags])
    record = json.loads((tmp_path / "mixed-load.jsonl").read_text())
    validate(record)
    assert status == bool(record["failed"])
    assert record["measured"][0]["requests"] > 0


def test_a_wrong_answer_ends_it(tmp_path, monkeypatch):
    pytest.importorskip("uvicorn")
    model = write_model_dir(tmp_path / "model", trained=False)
    monkeypatch.setattr(open_loop.Translator, "translate", lambda self, lines: ["another"] * len(lines))
    with pytest.raises(SystemExit, match="was answered with"):
        open_loop.measure(model, SENTENCES, seconds=60.0, workers=1, seed=1, folder=tmp_path)
