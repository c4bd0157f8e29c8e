"""The benchmark of `fasttfm prepare` at a size that takes a second."""

import json

from benchmarks import preparing


def test_a_record_tells_seconds_and_memory(tmp_path):
    assert preparing.main(["--pairs", "1500", "--results", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "preparing.jsonl").read_text())
    (found,) = record["measured"]
    assert found["pairs"] == 1500
    assert 0 < found["seconds"] < 600
    assert 50 < found["peak_mb"] < 5000
    assert record["machine"]
