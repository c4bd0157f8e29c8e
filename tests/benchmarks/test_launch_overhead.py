"""The launch benchmark runs without a device, keeps its record, and finds our key cheaper than Triton's own way."""

import json
import os
import subprocess
import sys

from benchmarks.measure import machine, records


def test_a_record_of_both_ways_is_kept_and_ours_is_the_cheaper(tmp_path):
    words = [sys.executable, "-m", "benchmarks.launch_overhead", "--runs", "20", "--results", str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(words, cwd=machine.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (record,) = records.read(tmp_path / "launch-overhead.jsonl")
    assert json.loads(done.stdout) == record
    assert records.kind(record) == "launch_overhead"
    for name, of in record["measured"].items():
        assert of["fasttfm"]["quickest"] < of["triton"]["quickest"], name
