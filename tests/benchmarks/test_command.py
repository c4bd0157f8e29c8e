"""`python -m benchmarks`: runs, one-line errors, and finished cases kept when it is stopped."""

import dataclasses
import os
import signal
import sys

import pytest
import torch
from forked import run

from benchmarks import __main__ as command
from benchmarks.measure import machine, records
from benchmarks.measure.case import Case, Work
from fasttfm.kernels.proof.costs import Machine

ENVIRONMENT = {**os.environ, "TRITON_INTERPRET": "0"}


def rows_in(folder):
    return [row for path in folder.iterdir() for row in records.read(path)]


def test_a_run_from_the_shell_keeps_valid_records(tmp_path):
    words = ["kernels", "blocks", "--smoke", "--device", "cpu", "--threads", "1", "--out", str(tmp_path), "--only"]
    words.append("feed-forward gelu M=40 N=16 F=64 dropout=0.1 float32 training forward")
    line = [sys.executable, "-m", "benchmarks", *words]
    done = run(line, cwd=machine.ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["kernels"]
    rows = {row["provider"]: row for row in rows_in(tmp_path)}
    assert {rows[name]["status"] for name in ("fasttfm", "torch eager")} == {"timed"}
    assert {row["threads"] for row in rows.values()} == {1}
    assert rows["fasttfm"]["roofline"]["ceilings"]["tflop_per_s"] > 0
    assert rows["fasttfm"]["machine"]["command"].startswith("python -m benchmarks kernels blocks --smoke")
    for each in ("[1/1", "fasttfm", f"kept in {tmp_path}"):
        assert each in done.stdout


@pytest.fixture
def group(monkeypatch):
    """A group of two cases with torch eager and ours, whose provider is group.function."""
    module = type(sys)("a_group")
    module.function = torch.tanh

    def make():
        inputs = {"inputs": lambda i: (torch.randn(4),), "reference": torch.tanh}
        return Work(providers={"torch eager": torch.tanh, "fasttfm": lambda x: module.function(x)}, **inputs)

    fields = {"group": "kernels", "shape": {}, "dtype": "float32", "passes": "forward", "make": make}
    module.cases = lambda setting: [Case(name=name, **fields) for name in ("first", "second")]
    monkeypatch.setitem(sys.modules, "a_group", module)
    monkeypatch.setattr(command, "GROUPS", {"kernels": "a_group"})
    monkeypatch.setattr("benchmarks.measure.clocks.ceilings", lambda setting: Machine(1e9, 1e9))
    monkeypatch.setattr("benchmarks.measure.clocks.last_level_cache", lambda: 1 << 20)  # flushed before each run
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    return module


def test_smoke_runs_are_only_kept_with_out_and_list_runs_nothing(group, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    assert command.main(["--smoke"]) == 0
    capsys.readouterr()
    assert command.main(["--list", "--only", "second"]) == 0
    assert capsys.readouterr().out == "kernels second  float32 forward\n"
    assert not list(tmp_path.iterdir())
    assert command.main(["--quick", "--only", "first"]) == 0
    assert {row["case"] for row in rows_in(tmp_path)} == {"first"}


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "stopped by SIGTERM")],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_stopped_run_keeps_finished_cases(group, number, status, words, tmp_path, capsys):
    def stops(x):
        if len(rows_in(tmp_path)) == 2:
            signal.raise_signal(number)
        return torch.tanh(x)

    group.function = stops
    assert command.main(["--smoke", "--out", str(tmp_path)]) == status
    assert {row["case"] for row in rows_in(tmp_path)} == {"first"}
    assert f"benchmarks: {words}; finished cases are kept" in capsys.readouterr().err


def test_an_error_in_a_case_does_not_stop_the_others(group, tmp_path, capsys):
    first, second = group.cases(None)
    group.cases = lambda setting: [first, dataclasses.replace(first, name="broken", make=lambda: 1 / 0), second]
    assert command.main(["--smoke", "--out", str(tmp_path)]) == 1
    assert {row["case"] for row in rows_in(tmp_path)} == {"first", "second"}
    printed = capsys.readouterr()
    assert "ZeroDivisionError" in printed.err
    assert "1 of 3 cases raised an error" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("kernals", "kernals is not a group: kernels"),
        ("kernels end_to_end", "end_to_end is a command of its own: python -m benchmarks end_to_end --help"),
        ("--only nothing", "no case contains 'nothing'"),
        ("--device meta", "device meta cannot be used"),
        ("--device cuda:77", "device cuda:77 is not available"),
        ("--dtype float8", "--dtype float8 is unknown: float32, float16, bfloat16"),
        ("--threads 0", "--threads: '0' was given, it must be from 1"),
        ("--smoke --out /proc/nowhere", "--out /proc/nowhere cannot be written to"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(group, words, message, capsys):
    assert command.main(words.split()) == 2
    printed = capsys.readouterr()
    assert (printed.out, len(printed.err.strip().splitlines())) == ("", 1)
    assert message in printed.err
