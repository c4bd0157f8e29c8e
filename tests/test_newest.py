"""`make newest`: what broke, in a table and a record, with rooms that stand in for the tests."""

import pytest

from benchmarks.measure import records
from tests import newest


@pytest.mark.whole
def test_what_broke_is_told_and_recorded_once_for_these_versions(tmp_path, monkeypatch, capsys):
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / f"test_{folder.name}.py").write_text("def test_that_passes():\n    pass\n")
    (bad / "test_fails.py").write_text("def test_that_fails():\n    assert False\n")
    (bad / "test_imports.py").write_text("import no_such_package\n")
    monkeypatch.setattr(newest, "ROOMS", {"good": [str(good)], "bad": [str(bad)]})
    for _ in range(2):
        assert newest.main(["--workers", "1", "--results", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "| good | 1 of 1 | 0 |" in shown
    assert "| bad | 1 of 3 | 2 |" in shown
    assert "  bad: test_fails::test_that_fails" in shown
    (line,) = records.read(tmp_path / "newest.jsonl")
    assert [room["failed"] for room in line["rooms"]] == [[], ["test_imports", "test_fails::test_that_fails"]]
    assert line["versions"]["torch"]
    monkeypatch.setattr(newest, "ROOMS", {"good": [str(good)]})
    monkeypatch.setattr(newest, "version", lambda name: "9.9" if name == "torch" else None)
    assert newest.main(["--workers", "1", "--results", str(tmp_path)]) == 0
    assert [each["versions"]["torch"] for each in records.read(tmp_path / "newest.jsonl")][1] == "9.9"
