"""Files of records: `python -m benchmarks check` takes those of this repository, and says in a line what is wrong."""

import json
import re

import pytest

from benchmarks.__main__ import main
from benchmarks.measure import check, machine
from benchmarks.measure.records import RESULTS

ROOF = {"floor_us": 50.0, "share": 0.5, "ceilings": {"gb_per_s": 12.5, "tflop_per_s": 0.125}}


@pytest.fixture
def line(record):
    """line(field=...): a record that would be taken, as text; outside a checkout no commit is known to be missing."""
    commit = machine.git("rev-parse", "HEAD") or 40 * "a"

    def make(*, machine=None, **fields):
        return json.dumps(record(machine={"commit": commit, **(machine or {})}, **({"roofline": ROOF} | fields))) + "\n"

    return make


def checked(tmp_path, capsys, text):
    """(status, what the command says) of a file with this text."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    status, printed = main(["check", str(file)]), capsys.readouterr()
    if status == 2:  # it cannot be read as records
        assert printed.out == ""
        assert len(printed.err.strip().splitlines()) == 1
    return status, printed.out + printed.err


def test_the_records_of_this_repository_are_fit(capsys):
    if machine.git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("which commits there are is known in a whole clone alone")
    files = sorted(RESULTS.glob(f"*{check.ENDING}"))
    assert files
    complaints = [each for path in files for each in check.check(path)[1]]
    # a fork or a rebased branch has other commits than those that measured
    assert not [each for each in complaints if "which this checkout does not have" not in each]


@pytest.mark.parametrize(
    "text",
    [b'{"schema": 1, "group"', b"[1]", b"null", b"\n", b"{}", b"[" * 100_000],
    ids=lambda text: text[:9].decode(),
)
def test_what_is_no_record_is_named_with_its_line(tmp_path, capsys, line, text):
    status, said = checked(tmp_path, capsys, line().encode() + text + b"\n")
    assert status == 2
    assert "a.jsonl, line 2, is no record of this suite" in said


def test_what_is_no_file_of_records_is_refused_or_left_out_by_its_ending(tmp_path, capsys, line):
    assert "no text in UTF-8" in checked(tmp_path, capsys, b"\xff\xfe\x00")[1]
    assert "holds no record" in checked(tmp_path, capsys, "")[1]
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "b.jsonl").write_text(line())
    assert check.main([str(tmp_path / "a.png"), str(tmp_path / "b.jsonl")]) == 0
    assert "a.png" not in capsys.readouterr().out
    with pytest.raises(check.UserError, match="none of these is a file of records, whose names"):
        check.main([str(tmp_path / "a.png")])
    with pytest.raises(check.UserError, match=r"none\.png cannot be read"):
        check.main([str(tmp_path / "none.png")])  # a typing error is none of a picture


@pytest.mark.parametrize(
    ("replace", "by", "why"),
    [
        ('"p50": 100.0', '"p50": NaN', "has NaN, which is not a JSON number"),
        ('"p80": 102.0', '"p80": 1e999', "time_us.p80 has a number that is too large"),
        ('"p50": 100.0', '"p50": -100.0', "equal to the minimum of 0"),
        ('"p50": 100.0, ', "", "record.time_us: 'p50' is a required property"),
        ('"p20": 98.0', '"p20": 103.0', "time_us is not in order: p20 103.0, p50 100.0, p80 102.0"),
        ('"runs": 20', '"runs": 0', "runs: 0 is less than the minimum of 1"),
        ('"schema": 1', '"schema": true', "schema"),
        ('"seed": 0', '"seed": 0, "trust_me": 1', "'trust_me' was unexpected"),
        ('"group": "kernels"', '"group": "krnels"', "record.group: 'krnels' is not one of"),
        ('"causal": true', '"causal": [1]', "shape.causal: [1] is not"),
        ('"launches": null', '"launches": true', "launches: True is not of type"),
        ('"commit": "', '"commit": "-n ', "commit: '-n "),
        ('"status": "timed"', '"status": "absent"', "status is absent but record.time_us is"),
        ('"reason": null', '"reason": "too slow"', "status is timed but record.reason is 'too slow'"),
        (
            '"error": null',
            '"error": {"value": 1.0, "allowed": 0.1, "measure": "x"}',
            "larger than allowed, and yet there is a time",
        ),
    ],
)
def test_a_field_that_cannot_be_is_named(tmp_path, capsys, line, replace, by, why):
    assert replace in line()
    status, said = checked(tmp_path, capsys, line().replace(replace, by, 1))
    assert status == 2
    assert why in said


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"machine": {"uncommitted_changes": True}}, "uncommitted changes"),
        ({"machine": {"commit": None}}, "names no commit"),
        ({"machine": {"commit": 40 * "f"}}, "which this checkout does not have"),
        ({"level": "smoke"}, "is of --smoke"),
        ({"status": "wrong"}, "has a wrong result"),
        ({"roofline": ROOF | {"floor_us": 106.0, "share": 1.06}}, "is at 1.06 of the roofline"),
        ({"roofline": ROOF | {"floor_us": 106.0}}, "is at 1.06 of the roofline"),
        ({"roofline": ROOF | {"share": 0.9}}, "says 0.9 of the roofline, but its floor and time give 0.5"),
        ({"p50": 200.0}, "says 0.5 of the roofline, but its floor and time give 0.25"),
        ({"provider": "fasttfm"}, "was measured before in the same file"),
    ],
)
def test_what_is_not_fit_is_named(tmp_path, capsys, line, fields, why):
    if "checkout" in why and machine.git("rev-parse", "HEAD") is None:
        pytest.skip("not a git checkout")
    status, said = checked(tmp_path, capsys, line() + line(**{"provider": "peer"} | fields))
    assert status == 1
    assert re.search(rf"1 of 2 records: kernels attention .* {re.escape(why)}|1 of 2 records: .*{re.escape(why)}", said)
    assert "fit to be sent in" not in said


def test_a_file_of_mostly_noisy_rows_is_not_fit(tmp_path, capsys, line):
    status, said = checked(tmp_path, capsys, "".join(line(provider=f"p{n}", noisy=n < 2) for n in range(8)))
    assert status == 0
    assert "8 records (2 noisy, 8 timed) of AMD EPYC, 2 cores" in said
    assert "fit to be sent in" in said
    status, said = checked(tmp_path, capsys, "".join(line(provider=f"p{n}", noisy=n < 3) for n in range(8)))
    assert (status, "3 of 8 rows are marked noisy: measure on an idle machine" in said) == (1, True)


def test_the_age_of_a_record_is_told_in_commits_to_what_it_measures(monkeypatch, write, record):
    monkeypatch.setattr(check, "_younger", lambda commit: {"a": "7", "b": "12", "c": "0"}[commit[0]])
    rows = [record(provider=commit, machine={"commit": commit * 40}) for commit in "ab"]
    (said,), _ = check.check(write("a.jsonl", *rows))
    assert said.endswith("; 12 commits to what they measure since")
    (said,), _ = check.check(write("b.jsonl", record(machine={"commit": "c" * 40})))
    assert said.endswith("2 cores")
