"""The host benchmark counts and times the Python of a GPU's calls."""

import itertools
import json
import sys

import pytest
import torch
from forked import run

from benchmarks import host
from benchmarks.measure import records
from benchmarks.report.page import machine_page
from fasttfm.system.children import child_environment

CPU = torch.device("cpu")


def measured(*words):
    command = [sys.executable, "-m", "benchmarks", "host", "--json", *words]
    done = run(command, env=child_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {row["what"]: row for row in map(json.loads, done.stdout.splitlines())}


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

    assert host.least([call("slow"), call("quick")], CPU, 0.1) == pytest.approx([6000.0, 4000.0])


@pytest.mark.whole
def test_rows_have_our_cost_and_the_peers():
    rows = measured("--only", "norm", "--quick")
    assert list(rows) == [
        "layer_norm, forward + backward", "residual_layer_norm, dropout, forward + backward",
        "layer_norm in float32, forward + backward", "a launch alone, layer_norm",
    ]  # fmt: skip
    norm, absent = rows["layer_norm, forward + backward"], rows["layer_norm in float32, forward + backward"]
    assert absent["peer"] == "Liger Kernel"
    assert "absent" not in absent or "liger_kernel" in absent["absent"]
    assert norm["triton"] == 3
    assert norm["peer_triton"] == 0 < norm["peer_aten"]
    assert norm["ratio"] == pytest.approx(norm["us"] / norm["peer_us"], rel=0.02)
    for row in rows.values():
        assert host.cells(row)[0] == row["what"]


def test_a_word_without_cases_is_refused_with_their_names():
    command = [sys.executable, "-m", "benchmarks", "host", "--only", "nonsense"]
    done = run(command, env=child_environment(), capture_output=True, text=True)
    assert done.returncode == 2
    (message,) = done.stderr.splitlines()
    assert "no case contains 'nonsense': attention, no gradient; " in message


def test_the_report_says_that_a_stand_in_is_not_a_gpu(record):
    row = {"what": "norm", "peer": "PyTorch", "calls": 1200, "triton": 3, "aten": 1, "us": 80.0,
           "peer_calls": 53, "peer_triton": 0, "peer_aten": 5, "peer_us": 40.0, "ratio": 2.0}  # fmt: skip
    absent = {"what": "other", "peer": "Liger Kernel", "absent": "No module named 'liger_kernel'"}
    for fields, warned in (({"stands_in_for": "sm_90"}, True), ({}, False)):
        host_record = {"benchmark": "host", "measured": [row, absent], **fields, "machine": record()["machine"]}
        records.validate(host_record)
        entry = records.Entry("host.jsonl", 1, host_record)
        page = machine_page("a machine", [entry], [entry], charted=False)
        assert ("**Not run on a GPU**" in page) is warned
        assert "| norm | 1,200 | 80.0 | 3 + 1 | PyTorch | 53 | 40.0 | 0 + 5 | 2.00 |" in page
        assert "Liger Kernel, absent" in page


@pytest.mark.whole
def test_a_complete_run_is_kept(tmp_path):
    rows = measured("--quick", "--results", str(tmp_path))
    (record,) = records.read(tmp_path / "host.jsonl")
    assert record["measured"] == list(rows.values())
    assert record["stands_in_for"] == host.STANDS_IN_FOR
