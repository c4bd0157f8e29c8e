"""Cases in turn (the mark in_turn): every case has its day, and every day has cases."""

import collections
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.mark.in_turn(days=3)
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 1), (2, 2)])
def test_pairs(a, b, c):
    pass

@pytest.mark.in_turn(days=3)
def test_alone():
    pass

def test_always():
    pass
"""


@pytest.fixture
def cases(tmp_path):
    """The cases of a day, or those that a name stands for."""
    (tmp_path / "test_turns.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nfrom shared_fixtures import *\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    in_turn\n    gpu\n    inductor\n")

    def collect(day, name="test_turns.py"):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", name],
            cwd=tmp_path,
            env={**os.environ, "FASTTFM_TEST_DAY": day, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    return collect


def test_every_case_has_one_day_of_three_and_every_day_some(cases):
    days = [cases(str(day)) for day in (739_000, 739_001, 739_002)]
    every = cases("every")
    assert len(every) == 14
    times = collections.Counter(case for day in days for case in day)
    assert times == {**dict.fromkeys(every, 1), "test_always": 3}
    for day in days:
        pairs = [case[11:-1].split("-") for case in day if "pairs" in case]
        assert len(pairs) == 4
        assert min(len(set(values)) for values in zip(*pairs)) > 1, "several values of each axis"


def test_a_case_that_is_named_runs_on_any_day(cases):
    for day in ("1", "2", "3"):
        assert cases(day, "test_turns.py::test_pairs[1-1-2]") == ["test_pairs[1-1-2]"]
