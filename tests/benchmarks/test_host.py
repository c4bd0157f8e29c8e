"""The host benchmark counts and times the Python of a GPU's calls."""

import itertools
import json
import sys

import pytest
import torch
from forked import run

from benchmarks import host
from benchmarks.measure import records
from fasttfm.system.children import child_environment


def test_python_and_c_calls_are_counted_including_backward():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            for _ in range(calls):
                len("")
            return gradient * 2

    def count():
        return host.function_calls(lambda: Twice.apply(x).backward())

    x, calls = torch.ones((), requires_grad=True), 0
    before = count()
    calls = 3
    assert count() == before + 3
    assert host.function_calls(lambda: None) == 0
    assert host.function_calls(lambda: (lambda: len(""))()) == 2


def test_a_time_is_the_minimum_of_alternating_runs(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(host.time, "thread_time", lambda: now[0])
    spent = {"slow": itertools.repeat(6.0), "quick": itertools.chain([9.0] * 5, itertools.repeat(4.0))}

    def call(name):
        def run():
            now[0] += next(spent[name]) / 1e3

        return run

    times = host.least([call("slow"), call("quick")], torch.device("cpu"), 0.1)
    assert times == pytest.approx([6000.0, 4000.0])


@pytest.mark.whole
def test_a_complete_run_with_our_cost_and_the_peers_is_kept(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "host", "--json", "--quick", "--results", str(tmp_path)]
    done = run(command, env=child_environment(), capture_output=True, text=True, check=True)
    rows = {row["what"]: row for row in map(json.loads, done.stdout.splitlines())}
    (record,) = records.read(tmp_path / "host.jsonl")
    assert (record["measured"], record["stands_in_for"]) == ([*rows.values()], host.STANDS_IN_FOR)
    norm, absent = rows["layer_norm, forward + backward"], rows["layer_norm in float32, forward + backward"]
    assert absent["peer"] == "Liger Kernel"
    assert "absent" not in absent or "liger_kernel" in absent["absent"]
    assert norm["triton"] == 3
    assert norm["peer_triton"] == 0 < norm["peer_aten"]
    assert norm["ratio"] == pytest.approx(norm["us"] / norm["peer_us"], rel=0.02)
    for row in rows.values():
        assert host.cells(row)[0] == row["what"]
