"""Records are validated when written, replaced by key, and filed by group and machine; `python -m benchmarks check`
accepts those of this repository and names what is wrong with others.
"""

import json
import re

import pytest

from benchmarks.__main__ import main
from benchmarks.measure import check, machine, records

ROOF = {"floor_us": 50.0, "share": 0.5, "ceilings": {"gb_per_s": 12.5, "tflop_per_s": 0.125}}


@pytest.fixture
def line(record):
    """line(field=...): a valid record of the current commit, as text."""
    commit = machine.git("rev-parse", "HEAD") or 40 * "a"

    def make(*, machine=None, **fields):
        return json.dumps(record(machine={"commit": commit, **(machine or {})}, **({"roofline": ROOF} | fields))) + "\n"

    return make


@pytest.fixture
def checked(tmp_path, capsys):
    """checked(text): (status, output) of the command for a file with this text."""

    def run(text):
        file = tmp_path / "a.jsonl"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        status, printed = main(["check", str(file)]), capsys.readouterr()
        if status == 2:
            assert (printed.out, printed.err.count("\n")) == ("", 1)
        return status, printed.out + printed.err

    return run


def test_the_records_of_this_repository_are_fit():
    if machine.git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("only a complete clone knows all commits")
    files = sorted(records.RESULTS.glob(f"*{check.ENDING}"))
    assert files
    reasons = [reason for path in files for reason in check.check(path)[1]]
    # forks and rebased branches do not have the measured commits
    assert not [reason for reason in reasons if "which this checkout does not have" not in reason]


@pytest.mark.parametrize("text", [b'{"schema": 1, "group"', b"[1]", b"null", b"\n", b"{}", b"[" * 100_000, b"\xff"])
def test_an_invalid_line_is_named(checked, line, text):
    status, output = checked(line().encode() + text + b"\n")
    assert status == 2
    assert ("not UTF-8 text" if text == b"\xff" else "a.jsonl, line 2, is not a record of this suite") in output


@pytest.mark.parametrize(
    ("replace", "by", "why"),
    [
        ('"p50": 100.0', '"p50": NaN', "has NaN, which is not a JSON number"),
        ('"p80": 102.0', '"p80": 1e999', "time_us.p80 has a number that is too large"),
        ('"p50": 100.0', '"p50": -100.0', "equal to the minimum of 0"),
        ('"p50": 100.0, ', "", "record.time_us: 'p50' is a required property"),
        ('"p20": 98.0', '"p20": 103.0', "time_us is not in order: p20 103.0, p50 100.0, p80 102.0"),
        ('"commit": "', '"commit": "-n ', "commit: '-n "),
        ('"status": "timed"', '"status": "absent"', "status is absent but record.time_us is"),
        ('"reason": null', '"reason": "too slow"', "status is timed but record.reason is 'too slow'"),
        ('"error": null', '"error": {"value": 1.0, "allowed": 0.1, "measure": "x"}', "larger than allowed"),
    ],
)
def test_an_invalid_field_is_named(checked, line, replace, by, why):
    assert replace in line()
    status, output = checked(line().replace(replace, by, 1))
    assert status == 2
    assert why in output


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"machine": {"uncommitted_changes": True}}, "uncommitted changes"),
        ({"machine": {"commit": None}}, "has no commit"),
        ({"machine": {"commit": 40 * "f"}}, "which this checkout does not have"),
        ({"level": "smoke"}, "was measured with --smoke"),
        ({"status": "wrong"}, "has a wrong result"),
        ({"roofline": ROOF | {"floor_us": 106.0, "share": 1.06}}, "is at 1.06 of the roofline"),
        ({"roofline": ROOF | {"share": 0.9}}, "says 0.9 of the roofline, but its floor and time give 0.5"),
        ({"provider": "fasttfm"}, "was already measured in the same file"),
    ],
)
def test_what_is_not_fit_is_named(checked, line, fields, why):
    if "checkout" in why and machine.git("rev-parse", "HEAD") is None:
        pytest.skip("not a git checkout")
    status, output = checked(line() + line(**{"provider": "peer"} | fields))
    assert status == 1
    assert re.search(rf"1 of 2 records: kernels attention .* {re.escape(why)}", output)
    assert "fit to be sent in" not in output


@pytest.mark.parametrize(
    ("noisy", "status", "why"), [(2, 0, "fit to be sent in"), (3, 1, "3 of 8 rows are noisy: measure on an idle")]
)
def test_a_file_with_too_many_noisy_rows_is_not_fit(checked, line, noisy, status, why):
    found, output = checked("".join(line(provider=f"p{n}", noisy=n < noisy) for n in range(8)))
    assert (found, why in output) == (status, True), output
    assert f"8 records ({noisy} noisy, 8 timed) of AMD EPYC, 2 cores" in output


def test_write_replaces_equal_keys_and_keeps_other_records(tmp_path, record):
    file = tmp_path / "new" / "kernels.jsonl"
    records.write(file, [record(), record(provider="torch eager")])
    records.write(file, [record(p50=5.0), record(case="embedding")])
    results = [(row["case"], row["provider"], row["time_us"]["p50"]) for row in records.read(file)]
    right = [("attention", "torch eager", 100.0), ("attention", "fasttfm", 5.0), ("embedding", "fasttfm", 100.0)]
    assert results == right
    with pytest.raises(ValueError, match="required property"):
        records.write(file, [record(case="another"), {"schema": 1}])
    assert len(records.read(file)) == 3
    assert [path.name for path in file.parent.iterdir()] == ["kernels.jsonl"]


def test_a_file_name_has_group_and_machine():
    assert records.file_name("blocks", {"device": "NVIDIA H200"}) == "blocks-nvidia-h200.jsonl"
    about = {"processor": "AMD EPYC", "cores": 2, "instruction_sets": ["avx2", "avx512f", "amx_bf16"]}
    assert records.file_name("kernels", about) == "kernels-amd-epyc-amx-2-cores.jsonl"
