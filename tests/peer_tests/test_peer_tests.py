"""Other projects' own tests run against fasttfm: what is run, what is left out, and when the command fails."""

from pathlib import Path
from typing import Any

import pytest

from tests.peer_tests import __main__ as program
from tests.peer_tests.suites import LIST, SUITES, Difference, Suite, differences, judge

PYTORCH = next(suite for suite in SUITES if suite.name == "pytorch")


def line(test: str, outcome: str, text: str = "") -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "text": text, "cases": 1}


WINDOWS = Difference(tests="test_a.py::*", error="is not supported", reason="no windows", refused=True)


def test_a_failure_that_no_line_explains_is_none_of_the_counts() -> None:
    verdict = judge([line("test_a.py::test_c", "failed", "TypeError: no")], [WINDOWS])
    assert verdict.unexplained == ["test_a.py::test_c: TypeError: no"]
    assert not verdict.good


def test_failures_are_sorted_by_the_line_that_explains_them() -> None:
    found = [
        line("test_a.py::test_b[1-2]", "failed", "ValueError: f: window_size=(1, 2) is not supported"),
        line("test_a.py::test_b[3]", "failed", "AssertionError: so"),
        line("test_a.py::test_b[4]", "passed"),
        line("test_a.py::test_d", "skipped", "needs a GPU"),
    ]
    verdict = judge(found, [WINDOWS, Difference(tests="test_a.py::test_b[*]", error="so$", reason="its own message")])
    assert (verdict.passed, verdict.refused, verdict.differing) == (1, {"no windows": 1}, {"its own message": 1})
    assert verdict.not_run == {"needs a GPU": 1}
    assert verdict.good


def test_a_line_whose_tests_pass_meanwhile_fails_the_command_and_one_whose_tests_did_not_run_does_not() -> None:
    assert judge([line("test_a.py::test_b", "passed")], [WINDOWS]).stale == ["test_a.py::*: is not supported"]
    assert judge([line("test_z.py::test_b", "passed")], [WINDOWS]).good


def test_what_fails_with_the_project_itself_is_not_run() -> None:
    verdict = judge([line("test_a.py::test_b", "failed", "AssertionError")], [], {"test_a.py::test_b"})
    assert verdict.good
    assert verdict.not_run == {"fails with the project itself too": 1}


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_each_suite_is_pinned_and_each_line_of_its_list_has_a_reason(suite: Suite) -> None:
    assert len(suite.digest) == 16
    assert len(suite.version) > 4
    for each in differences(suite.name, LIST):
        assert len(each.reason) > 10
        assert each.tests
        assert each.error


def test_a_project_that_is_not_given_is_left_out_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["--results", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [s.split(":")[0] for s in said] == [suite.name for suite in SUITES]
    assert all("DIR not given: a checkout of github.com/" in s for s in said)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(program.UserError, match=r"has no test/nn/test_multihead_attention\.py: give a checkout of"):
        program.main(["--pytorch", str(tmp_path), "--results", str(tmp_path)])


CASES = """
import pytest, torch

@pytest.mark.parametrize("n", range(30))
def test_ours_is_in_their_place(n):
    assert torch.nn.LayerNorm.__module__.startswith("fasttfm") and torch.nn.modules.LayerNorm is torch.nn.LayerNorm

def test_other():
    raise ValueError("first line\\nsecond")

def test_skipped():
    pytest.skip("no reason")
"""


@pytest.mark.whole
def test_a_suite_runs_with_fasttfm_in_place_of_the_project_and_without(tmp_path: Path) -> None:
    for name in PYTORCH.files:
        tmp_path.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(name).write_text(CASES if name == PYTORCH.files[0] else "")
    found = program.results(PYTORCH, tmp_path, sample=5, seed=0)
    mine = [each for each in found if "in_their_place[" in each["test"]]
    assert [each["outcome"] for each in mine] == ["passed"] * 5
    assert {
        "test": mine[0]["test"].split("[")[0],
        "outcome": "skipped",
        "text": "not of the sample",
        "cases": 25,
    } in found
    assert found[-2] == line("test_multihead_attention.py::test_other", "failed", "ValueError: first line")
    assert found[-1] == line("test_multihead_attention.py::test_skipped", "skipped", "no reason")
    own = program.results(PYTORCH, tmp_path, sample=5, seed=0, own=True)
    assert [each["test"] for each in own] == [each["test"] for each in found]  # the same sample
    assert [each["outcome"] for each in own if "in_their_place[" in each["test"]] == ["failed"] * 5
