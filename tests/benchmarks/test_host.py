"""The host benchmark counts and times the Python of a GPU's calls."""

import itertools
import json
import sys

import pytest
import torch
from forked import run

from benchmarks import host
from benchmarks.cases.host import _launch
from benchmarks.measure import records
from fasttfm.functional import backend
from fasttfm.system.children import child_environment


def ran(*words):
    """Finished process of the command."""
    command = [sys.executable, "-m", "benchmarks", "host", *words]
    return run(command, env=child_environment(), capture_output=True, text=True)


def measured(*words):
    done = ran("--json", *words)
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

    times = host.least([call("slow"), call("quick")], torch.device("cpu"), 0.1)
    assert times == pytest.approx([6000.0, 4000.0])


@pytest.mark.whole
def test_a_complete_run_with_our_cost_and_the_peers_is_kept(tmp_path):
    rows = measured("--quick", "--results", str(tmp_path))
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


def test_a_word_without_cases_is_refused_with_their_names():
    done = ran("--only", "nonsense")
    assert done.returncode == 2
    (message,) = done.stderr.splitlines()
    assert "no case contains 'nonsense': attention, no gradient; " in message


def test_a_stand_in_is_no_gpu_and_a_missing_peer_is_absent():
    assert "**Not run on a GPU**" in host.note({"stands_in_for": "sm_90"})
    assert "Not run" not in host.note({})
    absent = {"what": "other", "peer": "Liger Kernel", "absent": "No module named 'liger_kernel'"}
    assert host.cells(absent) == ["other", "", "", "", "Liger Kernel, absent", "", "", "", ""]


def test_triton_launches_get_the_records_that_compiled_kernels_read_by_name(monkeypatch):
    launches = []
    launch = "triton.runtime.jit.JITFunction.__getitem__"
    monkeypatch.setattr(launch, lambda self, grid: lambda *arguments, **_: launches.append(arguments))
    with backend("triton"):
        for name in ("attention", "layer_norm"):
            _launch(name, torch.device("cpu"))[1][0]()
    named = [{type(each).__name__ for each in arguments} for arguments in launches]
    assert [kinds & {"Problem", "LineStrides", "Dropout", "Shape"} for kinds in named] == [
        {"Problem", "LineStrides"}, {"Dropout", "Shape"},
    ]  # fmt: skip
