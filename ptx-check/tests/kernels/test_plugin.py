"""A test suite and a script run through the machine as users do: by pytest's option and by the command."""

import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

from ptx_check.__main__ import main
from ptx_check.faults import KINDS, NOTES

SUITE = Path(__file__).with_name("suite.txt").read_text()


def run(folder, call, *arguments):
    """Calls a function in a fork, which has Triton loaded; its status and output.

    Triton's cache is the folder's own: the same kernel of another run would bring that run's file along.
    """
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            status = 1
            try:
                for number in (1, 2):
                    os.dup2(said.fileno(), number)
                sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
                os.chdir(folder)
                os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
                status = int(call(*arguments) or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return status, said.read()


def run_suite(folder, *arguments, text=SUITE):
    """Runs pytest with the plugin on a suite."""
    (folder / "test_suite.py").write_text(text)
    words = ["-q", "-p", "ptx_check.plugin", "-p", "no:cacheprovider", "test_suite.py"]
    return run(folder, pytest.main, [*words, *arguments])


def test_a_suite_written_for_a_device_runs_on_every_chip_that_is_named(tmp_path):
    status, text = run_suite(tmp_path, "--ptx-check=sm_80,sm_90", "--ptx-report=faults.sarif")
    assert status == 1
    assert "2 failed, 5 passed" in text, text
    assert "4 launches, 2 faults, 0 notes" in text
    report = json.loads((tmp_path / "faults.sarif").read_text())["runs"][0]
    assert [result["ruleId"] for result in report["results"]] == ["bounds"] * 2
    assert [rule["id"] for rule in report["tool"]["driver"]["rules"]] == [*KINDS, *NOTES]
    place = report["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "test_suite.py"
    assert "tl.store" in SUITE.split("\n")[place["region"]["startLine"] - 1]
    assert {result["properties"]["chip"] for result in report["results"]} == {"sm_80", "sm_90"}


ON_ONE_CHIP = 'ptx_check("sm_90")'


@pytest.mark.parametrize(
    ("arguments", "changed", "told"),
    [
        (["--ptx-check=sm_81"], (), "choose among sm_60"),
        (["--ptx-check=sm_80", "--ptx-report=faults.xml"], (), "ends with one of .txt, .json, .sarif"),
        (["--ptx-check=sm_80", "--ptx-programs=0"], (), "must be at least 1"),
        (["--ptx-check=sm_80"], (ON_ONE_CHIP, 'ptx_check("sm_9O")'), "of 'sm_9O': takes sm_60"),
        (["--ptx-check=sm_80"], (ON_ONE_CHIP, 'ptx_check("sm_90", check=False)'), "of check: takes sm_60"),
        (["--ptx-check=sm_80"], ('sizes={"n"', 'sizes={"m"'), "names m, which no parametrize of this test has"),
    ],
)
def test_wrong_options_and_marks_are_refused_in_a_line(tmp_path, arguments, changed, told):
    status, text = run_suite(tmp_path, *arguments, text=SUITE.replace(*changed) if changed else SUITE)
    assert status != 0
    assert told in text


SAMPLED = """
import torch, triton, triton.language as tl

@triton.jit
def _doubled(x, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, tl.load(x + i) * 2)

def doubled():
    x = torch.randn(6400, device="cuda")
    y = torch.empty_like(x)
    _doubled[(100,)](x, y, N=64)
    return x, y

def test_by_torch():
    x, y = doubled()
    torch.testing.assert_close(y, 2 * x)

def test_by_hand():
    x, y = doubled()
    assert (y - 2 * x).abs().max() < 1e-6

def test_wrong_number():
    x, y = doubled()
    torch.testing.assert_close(y, 3 * x)
"""


def test_a_sample_of_programs_decides_only_what_it_computed(tmp_path):
    words = ("-rA", "--ptx-check=sm_80", "--ptx-programs=4", "--ptx-report=out.json")
    status, text = run_suite(tmp_path, *words, text=SAMPLED)
    assert status == 1
    assert "1 failed, 1 passed, 1 skipped" in text, text
    for name in ("PASSED test_suite.py::test_by_torch", "FAILED test_suite.py::test_wrong_number",
                 "0 faults, 0 notes; 288 programs left out"):  # fmt: skip
        assert name in text, name
    assert json.loads((tmp_path / "out.json").read_text())["left_out"] == 288


SCRIPT = """
import sys, torch, triton, triton.language as tl

@triton.jit
def one(x, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, i, mask=i < n)

one[(1,)](torch.zeros(100, dtype=torch.int32, device="cuda"), int(sys.argv[1]), N=128)
print("went on with", sys.argv[2:])
assert sys.argv[1] == "100", "wrong numbers"
"""


def test_a_script_is_run_by_the_command_with_its_own_options_behind_two_dashes_and_its_faults_are_reported(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    order = ("mine.py", "100", "--chips", "sm_80,sm_90", "--report", "out.json", "--", "--chips", "none", "--", "x")
    status, text = run(tmp_path, main, [*order])
    assert status == 0, text
    assert text.count("went on with ['--chips', 'none', '--', 'x']") == 2
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["launches"] == 2
    assert not report["faults"]
    assert run(tmp_path, main, ["--machine-code", "mine.py", "100"])[0] == 0
    status, text = run(tmp_path, main, ["--chips", "sm_80,sm_90", "mine.py", "101"])
    assert status == 1
    assert text.count("went on") == text.count("AssertionError: wrong numbers") == 2
    assert "2 launches, 2 faults, 0 notes" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--chips", "sm_81", __file__], "--chips sm_81: choose among sm_60"),
        (["--report", "a.xml", __file__], "ends with one of .txt"),
        (["--programs", "0", __file__], "--programs 0: must be at least 1"),
        (["none.py"], "none.py is not a file"),
        (["--machine-code", "--chips", "sm_80,sm_90", __file__], "is for --chips sm_90, not for sm_80,sm_90"),
        (["--ptxas", __file__, __file__], "--ptxas needs --machine-code"),
        (["--machine-code", "--ptxas", "none", __file__], "--ptxas none is not a file"),
    ],
)
def test_the_command_tells_what_is_wrong_in_one_line(words, told, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_the_lines_of_the_readme_give_what_it_shows(tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (tmp_path / "first.py").write_text(readme.split("```python\n")[1].split("```")[0])
    status, text = run(tmp_path, runpy.run_path, "first.py")
    assert status == 1
    shown = " ".join(readme.split("```\n\n```\n")[1].split("```")[0].split())
    assert shown in " ".join(text.split())
