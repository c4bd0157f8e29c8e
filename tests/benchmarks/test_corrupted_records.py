"""A file of records that was cut, edited or made up is refused by `python -m benchmarks check`, in one line."""

import json
import re
import subprocess

import pytest

from benchmarks.__main__ import main
from benchmarks.measure.machine import ROOT

ROOF = {"floor_us": 50.0, "share": 0.5, "ceilings": {"gb_per_s": 12.5, "tflop_per_s": 0.125}}


@pytest.fixture
def line(record):
    """line(field=...): a record that would be taken, as text."""
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    machine = {"commit": done.stdout.strip()}
    return lambda **fields: json.dumps(record(**{"machine": machine, "roofline": ROOF, **fields}))


def refused(tmp_path, capsys, text):
    """What the command says of such a file, which cannot be read as records."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["check", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.strip().splitlines()) == 1
    return printed.err


def test_the_record_that_the_others_are_made_from_is_fit(tmp_path, capsys, line):
    (tmp_path / "a.jsonl").write_text(line() + "\n" + line(provider="torch eager") + "\n")
    assert main(["check", str(tmp_path / "a.jsonl")]) == 0


@pytest.mark.parametrize(
    "text",
    [b'{"schema": 1, "group"', b"[1]", b"3", b"null", b'"text"', b"\n", b"{}", b"[" * 100_000, b"{" * 100_000],
    ids=["cut", "list", "number", "null", "text", "blank", "empty object", "deep list", "deep object"],
)
def test_what_is_no_record_is_named_with_its_line(tmp_path, capsys, line, text):
    assert "a.jsonl, line 2, is no record" in refused(tmp_path, capsys, line().encode() + b"\n" + text + b"\n")


def test_what_is_no_text_is_refused(tmp_path, capsys):
    assert "no text in UTF-8" in refused(tmp_path, capsys, b"\xff\xfe\x00")
    assert main(["check", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("replace", "by", "why"),
    [
        ('"p50": 100.0', '"p50": NaN', "has NaN, which is not a number of JSON"),
        ('"p50": 100.0', '"p50": Infinity', "has Infinity, which is not a number of JSON"),
        ('"p80": 102.0', '"p80": 1e999', "time_us.p80 has a number that is too large"),
        ('"p50": 100.0', '"p50": -100.0', "equal to the minimum of 0"),
        ('"p50": 100.0', '"p50": 0', "equal to the minimum of 0"),
        ('"p50": 100.0', '"p50": "100"', "time_us.p50: '100' is not of type 'number'"),
        ('"p20": 98.0', '"p20": 103.0', "time_us is not in order: p20 103.0, p50 100.0, p80 102.0"),
        ('"runs": 20', '"runs": 0', "runs: 0 is less than the minimum of 1"),
        ('"runs": 20', '"runs": 2.5', "runs: 2.5 is not of type 'integer'"),
        ('"share": 0.5', '"share": -Infinity', "has -Infinity, which is not a number of JSON"),
        ('"schema": 1', '"schema": true', "schema"),
        ('"seed": 0', '"seed": 0, "trust_me": 1', "'trust_me' was unexpected"),
        ('"group": "kernels"', '"group": "krnels"', "record.group: 'krnels' is not one of"),
        ('"causal": true', '"causal": [1]', "shape.causal: [1] is not"),
        ('"commit": "', '"commit": "-n ', "commit: '-n "),
        ('"machine": {', '"machine": null, "was": {', "record.machine: None is not of type 'object'"),
    ],
)
def test_a_field_that_cannot_be_is_named(tmp_path, capsys, line, replace, by, why):
    text = line()
    assert replace in text
    assert why in refused(tmp_path, capsys, text.replace(replace, by, 1) + "\n")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"roofline": ROOF | {"floor_us": 106.0, "share": 1.06}}, "is at 1.06 of the roofline"),
        ({"roofline": ROOF | {"floor_us": 106.0}}, "is at 1.06 of the roofline"),
        ({"roofline": ROOF | {"share": 0.9}}, "says 0.9 of the roofline, but its floor and time give 0.5"),
        ({"p50": 200.0}, "says 0.5 of the roofline, but its floor and time give 0.25"),
    ],
)
def test_numbers_that_do_not_agree_are_not_fit(tmp_path, capsys, line, fields, why):
    (tmp_path / "a.jsonl").write_text(line(**fields) + "\n")
    assert main(["check", str(tmp_path / "a.jsonl")]) == 1
    assert why in capsys.readouterr().out


def test_the_same_measurement_twice_is_not_fit(tmp_path, capsys, line):
    (tmp_path / "a.jsonl").write_text(line() + "\n" + line(p50=90.0, roofline=None) + "\n")
    assert main(["check", str(tmp_path / "a.jsonl")]) == 1
    said = capsys.readouterr().out
    assert re.search("1 of 2 records: kernels attention .* was measured before in the same file", said)
