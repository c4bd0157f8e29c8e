"""Two versions are compared by rounds, and a row is slower only where every round says so."""

import json

import pytest

from benchmarks import versions
from benchmarks.measure import records
from fasttfm.errors import UserError

ROW = ("attention", "B=8", "fp32", "forward", "fasttfm")
PEER = (*ROW[:4], "torch eager")


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([100, 110], [114, 120], "slower"),
        ([100, 110], [113, 120], ""),  # within 3% of the slowest round before
        ([100, 130], [120, 140], ""),
        ([114, 120], [100, 110], "faster"),
        ([100, 100], [100, 100], ""),
    ],
)
def test_a_row_is_slower_where_every_round_is(before, after, verdict):
    assert versions.verdict(before, after, 0.03) == verdict


def test_groups_alternate_and_the_record_holds_every_median(tmp_path, monkeypatch, capsys):
    times = {"before-1": 100.0, "after-1": 130.0, "before-2": 110.0, "after-2": 140.0}
    seen = []
    monkeypatch.setattr(versions, "run_suite", lambda checkout, words, out: seen.append((out.name, *words)))
    monkeypatch.setattr(versions, "medians_of", lambda out: {ROW: times[out.name], PEER: 50.0})
    monkeypatch.setattr(versions, "commit", lambda checkout: "1" * 40)
    folders = ["--work", str(tmp_path / "W"), "--results", str(tmp_path / "R")]
    assert versions.main([str(versions.machine.ROOT), "kernels", "blocks", *folders]) == 0
    assert [name for name, *_ in seen[:4]] == ["before-1", "after-1", "after-1", "before-1"]
    assert [words for _, *words in seen[::2]] == [["--quick", "kernels"], ["--quick", "blocks"]] * 2
    record = json.loads((tmp_path / "R" / "versions.jsonl").read_text())
    records.validate(record)
    first, second = record["rows"]
    assert (first["before_us"], first["after_us"], first["ratio"]) == ([100.0, 110.0], [130.0, 140.0], 1.286)
    assert (first["verdict"], second["provider"], second["verdict"]) == ("slower", "torch eager", "")
    assert "1 slower and 0 faster by more than 3% in every round" in capsys.readouterr().out


def test_what_is_no_checkout_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(UserError, match="is no checkout of fasttfm"):
        versions.main([str(tmp_path)])


def test_a_suite_that_fails_is_told_with_its_complaint(tmp_path):
    with pytest.raises(UserError, match=r"ended with 1: .*No module named benchmarks"):
        versions.run_suite(tmp_path, [], tmp_path / "OUT")
