"""Tests that failed run once more, alone, if they are few."""

import json

import pytest

from tests import again

UNSTEADY = """
from pathlib import Path

def test_first():
    seen = Path(__file__).with_name("seen")
    seen.touch()
    assert len(list(seen.parent.glob("seen*"))) > {least}

def test_second():
    pass
"""


@pytest.mark.parametrize(("least", "status"), [(0, 0), (1, 1)])
def test_what_passes_alone_is_named_and_what_fails_again_fails(tmp_path, capfd, least, status):
    (tmp_path / "test_one.py").write_text(UNSTEADY.format(least=least))
    remember(tmp_path, ["test_one.py::test_first"])
    assert again.main(tmp_path) == status
    output = capfd.readouterr().out
    assert ("unsteady: test_one.py::test_first failed beside other tests and passes alone" in output) == (status == 0)
    assert "test_second" not in output


@pytest.mark.parametrize("count", [0, 4])
def test_many_failures_or_none_are_not_run_again(tmp_path, capfd, count):
    remember(tmp_path, [f"test_one.py::test_{number}" for number in range(count)])
    assert again.main(tmp_path) == 1
    assert capfd.readouterr().out == f"{count} tests failed: none is run again\n"


def remember(folder, names):
    cache = folder / ".pytest_cache" / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps(dict.fromkeys(names, True)))
