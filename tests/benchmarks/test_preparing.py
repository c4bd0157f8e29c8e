"""The benchmark of `fasttfm prepare` at a size that takes a second."""

import json

import numpy as np

from benchmarks import preparing


def test_a_record_tells_seconds_and_memory(tmp_path):
    held = np.ones(2_000 << 17)  # 2,000 MB here, which are no part of what the command takes
    assert held[-1] == 1
    assert preparing.main(["--pairs", "1500", "--results", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "preparing.jsonl").read_text())
    (results,) = record["measured"]
    assert results["pairs"] == 1500
    assert 0 < results["seconds"] < 600
    assert 50 < results["peak_mb"] < 1500
    assert record["machine"]
