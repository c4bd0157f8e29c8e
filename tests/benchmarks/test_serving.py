"""The load test asks a server that is started for it, checks every answer, and leaves a record."""

import json

import pytest
from model_dirs import LINES, write_model_dir

from benchmarks import open_loop, serving
from benchmarks.measure.records import validate

pytest.importorskip("uvicorn")


def test_a_record_is_written(tmp_path):
    model = write_model_dir(tmp_path / "model", trained=False)
    (tmp_path / "in.en").write_text("\n".join(LINES))
    flags = ["--clients", "3", "--seconds", "1", "--text", str(tmp_path / "in.en"), "--results", str(tmp_path)]
    assert serving.main([str(model), *flags]) == 0
    record = json.loads((tmp_path / "serving.jsonl").read_text())
    validate(record)
    (row,) = record["measured"]
    assert row["sentences"] >= row["requests"] >= 3
    assert len(row["resident_mib"]) == 10
    assert min(row["resident_mib"]) > 50
    assert row["p99_ms"] >= row["p50_ms"] > 0


def test_a_wrong_answer_ends_it(tmp_path, monkeypatch):
    model = write_model_dir(tmp_path / "model", trained=False)
    monkeypatch.setattr(serving.Translator, "translate", lambda self, lines: ["another"] * len(lines))
    with pytest.raises(SystemExit, match="was answered with"):
        serving.measure(model, LINES, clients=1, seconds=60)


@pytest.mark.whole
def test_loads_of_requests_that_do_not_wait_for_each_other(tmp_path):
    pytest.importorskip("ctranslate2")
    model = write_model_dir(tmp_path / "model", trained=False)
    (tmp_path / "in.en").write_text("\n".join(LINES))
    flags = ["--seconds", "1", "--text", str(tmp_path / "in.en"), "--results", str(tmp_path)]
    assert open_loop.main([str(model), *flags]) == 0
    record = json.loads((tmp_path / "open-loop.jsonl").read_text())
    validate(record)
    assert [(row["provider"], row["load"]) for row in record["measured"]] == [
        (provider, load) for provider in (*open_loop.EARLY_STOPPING, "CTranslate2") for load in open_loop.LOADS
    ]
    for row in record["measured"]:
        assert row["short_requests"] + row["long_requests"] > 0
        for kind in ("short", "long"):
            assert row[f"{kind}_p99_ms"] >= row[f"{kind}_p50_ms"] >= 0
