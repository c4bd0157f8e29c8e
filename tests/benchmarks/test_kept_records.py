"""The records of this repository are held to what is asked of others': `python -m benchmarks check` passes."""

import pytest

from benchmarks.measure import check, machine
from benchmarks.measure.records import RESULTS


@pytest.fixture(autouse=True)
def history():
    if machine.git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("which commits there are is known in a whole clone alone")


def test_check_passes(capsys):
    complaints = []
    for path in sorted(RESULTS.iterdir()):
        if path.suffix == check.ENDING:
            # a fork or a rebased branch has other commits than those that measured
            complaints += [each for each in check.check(path)[1] if "which this checkout does not have" not in each]
    assert not complaints, "\n".join(complaints)


def test_what_is_no_file_of_records_is_left_out_by_its_ending(tmp_path, capsys, write, record):
    commit = machine.git("rev-parse", "HEAD")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n")
    write("a.jsonl", record(machine={"commit": commit}))
    assert check.main([str(tmp_path / "a.png"), str(tmp_path / "a.jsonl")]) == 0
    assert "a.png" not in capsys.readouterr().out
    with pytest.raises(check.UserError, match="none of these is a file of records, whose names"):
        check.main([str(tmp_path / "a.png")])
    with pytest.raises(check.UserError, match=r"none\.png cannot be read"):
        check.main([str(tmp_path / "none.png")])  # a typing error is none of a picture


def test_a_file_of_mostly_noisy_rows_is_not_fit(capsys, write, record):
    commit = {"commit": machine.git("rev-parse", "HEAD")}
    rows = [record(provider=f"p{n}", noisy=n < 2, machine=commit) for n in range(8)]
    assert check.main([str(write("a.jsonl", *rows))]) == 0
    assert "8 records (2 noisy, 8 timed)" in capsys.readouterr().out
    rows[2]["noisy"] = True
    assert check.main([str(write("a.jsonl", *rows))]) == 1
    assert "3 of 8 rows are marked noisy: measure on an idle machine" in capsys.readouterr().out


def test_the_age_of_a_record_is_told_in_commits_to_what_it_measures(monkeypatch, write, record):
    monkeypatch.setattr(check, "_younger", lambda commit: {"a": "7", "b": "12", "c": "0"}[commit[0]])
    rows = [record(provider=commit, machine={"commit": commit * 40}) for commit in "ab"]
    (said,), _ = check.check(write("a.jsonl", *rows))
    assert said.endswith("; 12 commits to what they measure since")
    (said,), _ = check.check(write("b.jsonl", record(machine={"commit": "c" * 40})))
    assert said.endswith("2 cores")
