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


def test_a_slower_peer_and_rows_of_other_cases_are_no_regressions(run, record):
    shape = {"B": 2, "H": 8, "L": 28, "D": 64, "causal": True}
    others = ({"shape": shape}, {"dtype": "bfloat16"}, {"pass": "backward"}, {"case": "layer_norm"})
    peer = {"provider": "torch eager"}
    after = [record(), record(p50=200, **peer), *(record(p50=900, **fields) for fields in others)]
    status, out = run([record(), record(**peer)], after)
    assert status == 0
    for words in ("slower", "1 rows of other providers: median ratio 2.000.", "2 rows compared, 4 unmatched"):
        assert words in out


def test_the_interval_by_hand(write, record):
    before, after = (suite(load(write(f"{p}.jsonl", record(p50=p, runs=25)))) for p in (100.0, 150.0))
    (change,) = compare.changes(before, after, 0.05).itertuples()
    deviation = math.log(1.02 / 0.98) / 1.6832
    wide = math.exp(2.5758 * math.sqrt(2) * 1.2533 * deviation / 5)
    assert (change.low, change.high) == pytest.approx((1.5 / wide, 1.5 * wide), rel=1e-4)


def test_rows_of_several_machines_match_by_machine(tmp_path, write, record, end_to_end):
    for side, slow in (("a", 100), ("b", 200)):
        write(f"{side}/runs.jsonl", end_to_end(bleu=slow / 4))  # not a row of the suite
        write(f"{side}/cpu.jsonl", record(p50=100))
        write(f"{side}/gpu.jsonl", record(p50=slow, machine={"device": "NVIDIA H200"}))
    results = compare.changes(suite(load(tmp_path / "a")), suite(load(tmp_path / "b")), 0.05)
    found = [(change.ratio, change.entry_after.file) for change in results.itertuples()]
    assert found == [(2.0, "gpu.jsonl"), (1.0, "cpu.jsonl")]


@pytest.mark.parametrize(
    ("before", "after", "options", "message"),
    [
        (
            [{}],
            [{"case": "x", "dtype": "bfloat16"}],
            "",
            r"kernels in float32\) and .*in bfloat16\) have no row in com",
        ),
        ([{}, {}], [{}], "", r"before\.jsonl:1 and before\.jsonl:2 are the same case"),
        ([{}], [{}], "--threshold -1", r"--threshold: '-1' was given, it must be from 0"),
        ([{}], [], "", "holds no records"),
        ([{}], [{"level": "?"}], "", r"after\.jsonl, line 1, is not a record"),
    ],
)
def test_sets_that_cannot_be_compared_are_refused(run, record, before, after, options, message):
    with pytest.raises(UserError, match=message):
        run(*([record(**fields) for fields in rows] for rows in (before, after)), *options.split())
