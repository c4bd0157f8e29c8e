"""`python -m benchmarks`: runs, refuses in one line, and keeps what it measured when it is stopped."""

import importlib.abc
import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from forked import run
from waiting import PATIENCE

from benchmarks import __main__ as command
from benchmarks.measure import machine, records
from benchmarks.measure.case import Case, Work
from fasttfm.kernels.proof.costs import Machine

ENVIRONMENT = {**os.environ, "TRITON_INTERPRET": "0"}


def test_it_runs_from_the_shell_and_keeps_records_that_follow_the_schema(tmp_path):
    words = [sys.executable, "-m", "benchmarks", "kernels", "blocks", "--smoke", "--device", "cpu", "--threads", "1"]
    words += ["--only", "training forward", "--out", str(tmp_path)]
    done = run(words, cwd=machine.ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} == {"kernels", "blocks"}
    rows = [row for path in tmp_path.iterdir() for row in records.read(path)]
    assert {row["status"] for row in rows} == {"timed", "refused", "absent"}
    assert {row["threads"] for row in rows} == {1}
    ours = [row for row in rows if row["provider"] == "fasttfm"]
    assert len(ours) >= 8
    assert all(row["roofline"]["ceilings"]["tflop_per_s"] > 0 for row in ours)
    assert all(row["machine"]["command"].startswith("python -m benchmarks kernels blocks --smoke") for row in ours)
    assert "[1/" in done.stdout
    assert "fasttfm" in done.stdout
    assert f"kept in {tmp_path}" in done.stdout


class Hidden(importlib.abc.MetaPathFinder):
    """Has a package be as if it were not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ptx_check":
            raise ModuleNotFoundError(f"No module named {name!r}", name="ptx_check")


@pytest.mark.parametrize("words", [["queue", "--dry-run"], ["host", "--device", "cpu"]], ids=" ".join)
def test_a_package_that_is_missing_is_named_in_one_line(words, monkeypatch, capfd):
    monkeypatch.setenv("FASTTFM_EXCHANGED", "1")  # host: in this process
    for name in [name for name in sys.modules if name.startswith(("ptx_check", "benchmarks.queue"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "benchmarks.measure.exchanged", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])
    assert command.main(words) == 2
    told = "benchmarks: ptx_check is not installed: pip install ./fasttfm/ptx-check\n"
    assert capfd.readouterr().err.endswith(told)


@pytest.fixture
def group(monkeypatch):
    """A group of a single case, in which torch eager and ours are one; its provider may be exchanged."""
    module = type(sys)("a_group")
    module.function = torch.tanh

    def cases(setting):
        def make():
            inputs = {"inputs": lambda i: (torch.randn(4),), "reference": torch.tanh}
            return Work(providers={"torch eager": torch.tanh, "fasttfm": lambda x: module.function(x)}, **inputs)

        def case(name):
            return Case(group="kernels", name=name, shape={}, dtype="float32", passes="forward", make=make)

        return [case("first"), case("second")]

    module.cases = cases
    monkeypatch.setitem(sys.modules, "a_group", module)
    monkeypatch.setattr(command, "GROUPS", {"kernels": "a_group"})
    monkeypatch.setattr("benchmarks.measure.clocks.ceilings", lambda setting: Machine(1e9, 1e9))
    monkeypatch.setattr("benchmarks.measure.clocks.last_level_cache", lambda: 1 << 20)  # is emptied before each run
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    return module


def rows_in(folder):
    return [row for path in folder.iterdir() for row in records.read(path)]


def test_what_is_wrong_has_no_time_in_the_file_and_is_said(group, tmp_path, capsys):
    group.function = torch.sinh
    assert command.main(["--smoke", "--out", str(tmp_path)]) == 0
    status = {(row["case"], row["provider"]): (row["status"], row["time_us"] is None) for row in rows_in(tmp_path)}
    assert status["first", "fasttfm"] == ("wrong", True)
    assert status["first", "torch eager"] == ("timed", False)
    assert "wrong: fasttfm" in capsys.readouterr().out


def test_toy_shapes_are_kept_only_where_one_asks_for_it(group, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    assert command.main(["--smoke"]) == 0
    assert not list(tmp_path.iterdir())
    assert command.main(["--quick", "--only", "first"]) == 0
    assert {row["case"] for row in rows_in(tmp_path)} == {"first"}


def test_json_prints_the_rows_and_quiet_says_nothing_of_a_case(group, tmp_path, capsys):
    assert command.main(["--smoke", "--json", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == rows_in(tmp_path)
    assert "[1/2]" in said.err
    assert command.main(["--smoke", "--quiet", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [f"kept in {path}" for path in tmp_path.iterdir()]
    assert said.err == ""


def test_times_that_scatter_are_said_to(group, tmp_path, monkeypatch, capsys):
    scattered = itertools.cycle([10.0, 30.0, 30.0, 10.0])
    monkeypatch.setattr(
        "benchmarks.measure.clocks.HostClock.microseconds", lambda self, run: [run(), next(scattered)][1]
    )
    assert command.main(["--quick", "--out", str(tmp_path)]) == 0
    assert "4 of 4 rows are noisy, measured twice" in capsys.readouterr().out


def test_stopping_keeps_what_was_measured(group, tmp_path, capsys):
    calls = []

    def stops(x):
        calls.append(1)
        if len(rows_in(tmp_path)) == 2:
            raise KeyboardInterrupt
        return torch.tanh(x)

    group.function = stops
    assert command.main(["--smoke", "--out", str(tmp_path)]) == 130
    assert {row["case"] for row in rows_in(tmp_path)} == {"first"}
    assert "interrupted" in capsys.readouterr().err


def test_a_broken_case_does_not_stop_the_others(group, tmp_path, capsys):
    whole = group.cases

    def cases(setting):
        first, second = whole(setting)
        broken = Case(group="kernels", name="broken", shape={}, dtype="float32", passes="forward", make=lambda: 1 / 0)
        return [first, broken, second]

    group.cases = cases
    assert command.main(["--smoke", "--out", str(tmp_path)]) == 1
    assert {row["case"] for row in rows_in(tmp_path)} == {"first", "second"}
    printed = capsys.readouterr()
    assert "ZeroDivisionError" in printed.err
    assert "1 of 3 cases are broken" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kernals"], "kernals is no group: kernels"),
        (["kernels", "end_to_end"], "end_to_end is a command of its own: python -m benchmarks end_to_end --help"),
        (["--only", "nothing like it"], "no case contains 'nothing like it'"),
        (["--device", "gpu"], "device 'gpu' is unknown"),
        (["--device", "meta"], "device meta cannot be used"),
        (["--device", "cuda:77"], "device cuda:77 is not available"),
        (["--dtype", "float8"], "--dtype float8 is unknown: float32, float16, bfloat16"),
        (["--threads", "0"], "--threads: '0' was given, it must be from 1"),
        (["--ful"], "--ful is unknown: did you mean --full?"),
        (["--quick", "--full"], "not allowed with"),
        (["--smoke", "--out", "/proc/nowhere"], "--out /proc/nowhere cannot be written to"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(group, words, message, capsys):
    assert command.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1


def test_cases_can_be_listed_without_running(group, tmp_path, capsys):
    assert command.main(["--list", "--only", "second", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "kernels second  float32 forward\n"
    assert not list(tmp_path.iterdir())


def test_full_without_groups_goes_on_to_the_end(group, tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr("benchmarks.end_to_end.run_built_in", lambda *arguments: ran.append(arguments))
    monkeypatch.setattr(command, "SECONDS", dict.fromkeys(command.SECONDS, 0.0))
    out = ["--out", str(tmp_path)]
    assert command.main(["--full", "--device", "cpu", "--threads", "1", *out]) == 0
    assert ran == [(tmp_path, "cpu", 1)]
    for words in (["--full", "kernels"], ["--full", "--only", "first"], ["--quick"], []):
        assert command.main([*words, *out]) == 0
    assert len(ran) == 1


def test_the_help_names_groups_and_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    flags = ("--quick", "--full", "--only", "--device", "--dtype", "--out")
    for word in (*command.GROUPS, "end_to_end demo", "report", "compare", *flags):
        assert word in printed


def test_the_shell_sees_130_after_ctrl_c(tmp_path):
    words = [sys.executable, "-m", "benchmarks", "kernels", "--quick", "--device", "cpu", "--threads", "1"]
    process = subprocess.Popen(
        [*words, "--out", str(tmp_path)],
        cwd=machine.ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell starts what is behind & without it
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("[1/"):  # a case has been measured, and the next is being
        pass
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130


def test_a_reader_that_has_gone_ends_it_quietly():
    line = f"{sys.executable} -m benchmarks report --all | head -n 1"
    done = subprocess.run(["bash", "-c", line], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("file,line,")
    assert done.stderr == ""
