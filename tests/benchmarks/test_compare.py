"""`python -m benchmarks compare` finds regressions, and none in noise."""

import math

import pytest

from benchmarks.measure.records import load
from benchmarks.report import compare
from benchmarks.report.rows import suite
from fasttfm.errors import UserError


@pytest.fixture
def run(write, capsys):
    """run(before, after, *options): (status, output) for two files of records."""

    def make(before, after, *options):
        files = [write(f"{name}.jsonl", *rows) for name, rows in (("before", before), ("after", after))]
        return compare.main([*map(str, files), *options]), capsys.readouterr().out

    return make


NOISE = {"spread": 0.3, "runs": 5}
STEADY = {"spread": 0.001}
PACKED = {"provider": "fasttfm, packed"}
ELSEWHERE, UNLIKE = {"machine": {"processor": "another"}}, "no row is called a regression"


@pytest.mark.parametrize(
    ("before", "after", "options", "status", "verdict"),
    [
        ({}, {"p50": 110}, "", 1, "slower (regression)"),
        (PACKED, {"p50": 110, "seed": 5, **PACKED}, "", 1, "slower (regression)"),
        (NOISE, {"p50": 110, **NOISE}, "", 0, "unclear"),
        (STEADY, {"p50": 104, **STEADY}, "", 0, " same"),
        (STEADY, {"p50": 104, **STEADY}, "--threshold 0.02", 1, "slower (regression)"),
        ({}, {"p50": 50}, "", 0, "faster"),
        ({"provider": "torch eager"}, {"p50": 200, "provider": "torch eager"}, "", 0, "slower"),
        ({"runs": 4}, {"p50": 300, "runs": 50}, "", 0, "too few runs"),
        ({}, {"status": "wrong"}, "", 1, "now wrong (regression)"),
        ({}, {"status": "absent"}, "", 1, "now absent (regression)"),
        ({"status": "refused"}, {"status": "refused"}, "", 0, "0 regressions"),
        ({"status": "refused"}, {}, "", 0, "0 regressions"),
        ({}, {"p50": 300, **ELSEWHERE}, "", 0, UNLIKE),
        ({}, {"p50": 300, "threads": 2}, "", 0, UNLIKE),
        (PACKED, {"status": "refused", **PACKED, **ELSEWHERE}, "", 0, UNLIKE),
    ],
)
def test_a_row_slower_beyond_noise_and_threshold_on_one_machine_is_a_regression(
    run, record, before, after, options, status, verdict
):
    found, out = run([record(**before)], [record(**after)], *options.split())
    assert (found, verdict in out, UNLIKE in out) == (status, True, verdict == UNLIKE), out
    assert f"1 rows compared, 0 unmatched, {status} regressions." in out


def test_the_interval_by_hand(write, record):
    before, after = (suite(load(write(f"{p}.jsonl", record(p50=p, runs=25)))) for p in (100.0, 150.0))
    (change,) = compare.changes(before, after, 0.05).itertuples()
    deviation = math.log(1.02 / 0.98) / 1.6832
    wide = math.exp(2.5758 * math.sqrt(2) * 1.2533 * deviation / 5)
    assert (change.low, change.high) == pytest.approx((1.5 / wide, 1.5 * wide), rel=1e-4)


@pytest.mark.parametrize(
    ("before", "after", "options", "message"),
    [
        ([{}], [{"case": "x", "dtype": "bfloat16"}], "", r"in float32\) and .*in bfloat16\) have no row in com"),
        ([{}, {}], [{}], "", r"before\.jsonl:1 and before\.jsonl:2 are the same case"),
        ([{}], [{}], "--threshold -1", r"--threshold: '-1' was given, it must be from 0"),
        ([{}], [], "", "holds no records"),
        ([{}], [{"level": "?"}], "", r"after\.jsonl, line 1, is not a record"),
    ],
)
def test_sets_that_cannot_be_compared_are_refused(run, record, before, after, options, message):
    with pytest.raises(UserError, match=message):
        run(*([record(**fields) for fields in rows] for rows in (before, after)), *options.split())
