"""Which cases `make test` runs (the marks sample and whole), and what becomes of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared_fixtures import spread

from benchmarks.measure import records
from tests import suite

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.mark.sample(4)
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 1), (2, 2)])
def test_pairs(a, b, c):
    assert (a, b) != (3, 1)

@pytest.mark.whole
def test_long():
    pass

def test_always():
    pass
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "test_cases.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nfrom shared_fixtures import *\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    sample\n    whole\n    gpu\n    inductor\n")
    return tmp_path


def collected(folder, which, name="test_cases.py"):
    """The cases that a name stands for, of the gate or of all."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", name],
        cwd=folder,
        env={**os.environ, "FASTTFM_TESTS": which, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_the_gate_has_so_many_cases_with_every_value_and_all_has_every_case(folder):
    assert len(collected(folder, "all")) == 14
    gate = collected(folder, "gate")
    assert gate == collected(folder, "gate")
    assert "test_long" not in gate
    assert "test_always" in gate
    pairs = [case[11:-1].split("-") for case in gate if "pairs" in case]
    assert [len(set(values)) for values in zip(*pairs, strict=True)] == [3, 3, 4]
    assert collected(folder, "gate", "test_cases.py::test_pairs[1-1-2]") == ["test_pairs[1-1-2]"]


def test_cases_of_one_axis_are_drawn_far_from_each_other():
    cases = [[str(length)] for length in range(9)]
    assert spread(cases, 1) == [0]
    assert spread(cases, 2) == [0, 8]
    assert spread(cases, 3) == [0, 4, 8]
    assert spread(cases, 20) == list(range(9))


def test_every_case_leaves_a_record_and_the_gate_none(folder, tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(suite.processors, "main", lambda words: asked.append(words) or 0)
    monkeypatch.setattr(suite.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(suite, "RUNS", {"tests": ([str(folder)], {})})
    results = tmp_path / "results"
    words = ["--workers", "1", "--results", str(results)]
    for _ in range(2):
        assert suite.main([*words, "--all"]) == 1
    (line,) = records.read(results / "suite.jsonl")
    (run,) = line["runs"]
    assert (run["cases"], run["passed"], run["failed"]) == (14, 13, ["test_cases::test_pairs[1-1-3]"])
    assert asked[-1] == ["--workers", "1", "--results", str(results)]
    (results / "suite.jsonl").unlink()
    suite.main(words)
    assert not (results / "suite.jsonl").exists()
    assert asked[-1] == ["--workers", "1", "--gate"]
    assert "tests: " in capsys.readouterr().out
