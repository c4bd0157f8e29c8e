"""A test suite and a script run through the machine as users do: by pytest's option and by the command."""

import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

SUITE = Path(__file__).with_name("suite.txt").read_text()


def run(folder, *arguments):
    """Runs Python with these arguments in a fork, which has Triton loaded; its status and output.

    Triton's cache is the folder's own: the same kernel of another run would bring that run's file along.
    """
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            for number in (1, 2):
                os.dup2(said.fileno(), number)
            _become(folder, *arguments)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return status, said.read()


def _become(folder, *arguments):
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    os.chdir(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    sys.path.insert(0, str(folder))
    # pytest's loader, which other tests' imports came by, gives runpy no code
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, AssertionRewritingHook)]
    sys.modules.pop("ptx_check.__main__", None)
    is_module = arguments[0] == "-m"
    sys.argv[:] = arguments[is_module:]
    status = 0
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        os._exit(status)


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    return tmp_path


PYTEST = ("-m", "pytest", "-q", "-p", "ptx_check.plugin", "-p", "no:cacheprovider", "test_suite.py")


def test_a_suite_written_for_a_device_runs_on_every_chip_that_is_named(suite):
    status, text = run(suite, *PYTEST, "--ptx-check=sm_80,sm_90", "--ptx-report=faults.sarif")
    assert status == 1
    assert "2 failed, 5 passed" in text, text
    assert "4 launches, 2 faults, 0 notes" in text
    report = json.loads((suite / "faults.sarif").read_text())["runs"][0]
    assert [result["ruleId"] for result in report["results"]] == ["bounds"] * 2
    place = report["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "test_suite.py"
    assert "tl.store" in SUITE.split("\n")[place["region"]["startLine"] - 1]
    assert {result["properties"]["chip"] for result in report["results"]} == {"sm_80", "sm_90"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ptx-check=sm_81"], "choose among sm_60"),
        (["--ptx-check=sm_80", "--ptx-report=faults.xml"], "ends with one of .txt, .json, .sarif"),
        (["--ptx-report=faults.json"], "--ptx-report needs --ptx-check"),
        (["--ptx-programs=4"], "--ptx-programs needs --ptx-check"),
        (["--ptx-check=sm_80", "--ptx-programs=0"], "must be at least 1"),
    ],
)
def test_wrong_options_are_refused_in_a_line(suite, arguments, said):
    status, text = run(suite, *PYTEST, *arguments)
    assert status == 4
    assert said in text


SAMPLED = """
import torch, triton, triton.language as tl

@triton.jit
def _doubled(x, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, tl.load(x + i) * 2)

def doubled(count, n=6400):
    x = torch.randn(n, device="cuda")
    y = torch.empty_like(x)
    _doubled[(count,)](x, y, N=64)
    return x, y

def test_by_torch():
    x, y = doubled(100)
    torch.testing.assert_close(y, 2 * x)

def test_by_hand():
    x, y = doubled(100)
    assert (y - 2 * x).abs().max() < 1e-6

def test_wrong_number():
    x, y = doubled(100)
    torch.testing.assert_close(y, 3 * x)

def test_out_of_bounds():
    doubled(101)
"""


def test_a_sample_of_programs_decides_only_what_it_computed(tmp_path):
    (tmp_path / "test_suite.py").write_text(SAMPLED)
    status, text = run(tmp_path, *PYTEST, "-rA", "--ptx-check=sm_80", "--ptx-programs=4", "--ptx-report=out.json")
    assert status == 1
    assert "2 failed, 1 passed, 1 skipped" in text, text
    for name in ("PASSED test_suite.py::test_by_torch", "FAILED test_suite.py::test_wrong_number",
                 "FAILED test_suite.py::test_out_of_bounds", "96 programs were left out"):  # fmt: skip
        assert name in text, name
    assert "faults, 0 notes; 385 programs left out" in text
    assert json.loads((tmp_path / "out.json").read_text())["left_out"] == 385


@pytest.mark.parametrize(
    ("mark", "said"), [('"sm_9O"', "of 'sm_9O': takes sm_60"), ('"sm_90", check=False', "of check: takes sm_60")]
)
def test_a_mark_of_what_there_is_not_is_refused(suite, mark, said):
    (suite / "test_suite.py").write_text(SUITE.replace('ptx_check("sm_90")', f"ptx_check({mark})"))
    status, text = run(suite, *PYTEST, "--ptx-check=sm_80")
    assert status != 0
    assert said in text


def test_a_method_of_unittest_for_other_chips_is_not_run(suite):
    (suite / "test_suite.py").write_text(
        SUITE.replace("class TestOld", '@pytest.mark.ptx_check("sm_60")\nclass TestOld')
    )
    _, text = run(suite, *PYTEST, "-k", "TestOld", "--ptx-check=sm_80")
    assert "1 skipped" in text


def test_sizes_for_a_parameter_that_a_test_does_not_have_are_refused(suite):
    (suite / "test_suite.py").write_text(SUITE.replace('sizes={"n"', 'sizes={"m"'))
    status, text = run(suite, *PYTEST, "--ptx-check=sm_80")
    assert status != 0
    assert "names m, which no parametrize of this test has" in text


SCRIPT = """
import sys, torch, triton, triton.language as tl

@triton.jit
def one(x, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, i, mask=i < n)

one[(1,)](torch.zeros(100, dtype=torch.int32, device="cuda"), int(sys.argv[1]), N=128)
print("went on")
"""


@pytest.mark.parametrize(("count", "status"), [(100, 0), (101, 1)])
def test_a_script_is_run_by_the_command(tmp_path, count, status):
    (tmp_path / "mine.py").write_text(SCRIPT)
    command = ("-m", "ptx_check", "--chips", "sm_80,sm_90", "--report", "out.json", "mine.py", str(count))
    found, text = run(tmp_path, *command)
    assert found == status, text
    assert text.count("went on") == 2
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["launches"] == 2
    assert [fault["chip"] for fault in report["faults"]] == (["sm_80", "sm_90"] if status else [])


def test_options_follow_the_script_and_its_own_follow_two_dashes(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT + "print(sys.argv[1:])\n")
    order = ("mine.py", "100", "--chips", "sm_80,sm_90", "--report", "out.json", "--", "--chips", "none", "--", "x")
    status, text = run(tmp_path, "-m", "ptx_check", *order)
    assert status == 0, text
    assert text.count("['100', '--chips', 'none', '--', 'x']") == 2
    assert json.loads((tmp_path / "out.json").read_text())["launches"] == 2


def test_what_a_script_ends_with_is_printed(tmp_path):
    (tmp_path / "mine.py").write_text("import sys\nsys.exit('no such file')\n")
    status, text = run(tmp_path, "-m", "ptx_check", "mine.py")
    assert status == 1
    assert "no such file" in text


def test_a_script_that_fails_is_reported_on_every_chip(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT + "assert False, 'wrong numbers'\n")
    status, text = run(tmp_path, "-m", "ptx_check", "--chips", "sm_80,sm_90", "mine.py", "101")
    assert status == 1
    assert text.count("AssertionError: wrong numbers") == 2
    assert "2 launches, 2 faults, 0 notes" in text


def test_the_lines_of_the_readme_give_what_it_shows(tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (tmp_path / "first.py").write_text(readme.split("```python\n")[1].split("```")[0])
    status, text = run(tmp_path, "first.py")
    assert status == 1
    shown = " ".join(readme.split("```\n\n```\n")[1].split("```")[0].split())
    assert shown in " ".join(text.split())
