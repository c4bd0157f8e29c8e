"""The load of a server: its requests, latencies, and the records of both kinds of load."""

import json
from unittest.mock import MagicMock

import pytest
from model_dirs import LINES as SENTENCES
from model_dirs import write_model_dir

from benchmarks import load, open_loop
from benchmarks.measure.records import validate


class AtOnce(load.Load):
    """Answers at once."""

    def ask(self, kind, draws):
        pass


AT_ONCE = AtOnce(0, ["a", "b b"], ["e e e e e", "f f f f f f"])


def test_latency_counts_from_the_scheduled_time(monkeypatch):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds + 1.0  # wakes a second too late

    pool = MagicMock()
    pool.return_value.__enter__.return_value.submit = lambda function, *args: function(*args) or MagicMock()
    monkeypatch.setattr(load.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(load.time, "sleep", sleep)
    monkeypatch.setattr(load, "ThreadPoolExecutor", pool)
    waits = load.arriving(AT_ONCE, rate=2.0, seconds=20.0, seed=1)
    latencies = [*waits["short"], *waits["long"]]
    assert len(latencies) > 20
    assert max(latencies) > 10  # twice as many are due as can be sent


@pytest.fixture
def run(tmp_path):
    """run(*flags): (status, record) of a run on an untrained model."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("ctranslate2")
    model = write_model_dir(tmp_path / "model", trained=False)
    (tmp_path / "in.en").write_text("\n".join(SENTENCES))

    def measured(*flags):
        status = open_loop.main([str(model), *flags, "--text", str(tmp_path / "in.en"), "--results", str(tmp_path)])
        (file,) = tmp_path.glob("*.jsonl")
        record = json.loads(file.read_text())
        validate(record)
        return status, record

    return measured


@pytest.mark.whole
def test_a_record_is_written(run):
    status, record = run("--seconds", "1")
    assert status == 0
    assert [(row["provider"], row["load"]) for row in record["measured"]] == [
        (provider, load) for provider in ("fasttfm", "CTranslate2") for load in open_loop.LOADS
    ]
    assert max(row["sentences_per_second"] for row in record["measured"]) > 0
    for row in record["measured"]:
        assert row["short_requests"] + row["long_requests"] > 0
        assert row["resident_mib"] > 50
        for kind in ("short", "long"):
            assert row[f"{kind}_p99_ms"] >= row[f"{kind}_p50_ms"] >= 0


@pytest.mark.whole
def test_a_mixed_load_has_a_record_of_its_own(run):
    status, record = run("--mixed", "--seconds", "20")
    assert record["benchmark"] == "mixed_load"
    assert status == bool(record["failed"])
    assert record["measured"][0]["requests"] > 0
