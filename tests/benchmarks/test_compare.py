"""Regressions between records: found when they are there, not found in noise, exit status accordingly."""

import math

import pytest

from benchmarks.measure.records import load
from benchmarks.report import compare
from benchmarks.report.rows import suite
from fasttfm.errors import UserError


def run(write, before, after, *options):
    files = [write(f"{name}.jsonl", *rows) for name, rows in (("before", before), ("after", after))]
    return compare.main([*map(str, files), *options])


NOISE = {"spread": 0.3, "runs": 5}
STEADY = {"spread": 0.001}


@pytest.mark.parametrize(
    ("before", "after", "options", "status", "said"),
    [
        ({}, {"p50": 110}, "", 1, "slower (regression)"),
        (NOISE, {"p50": 110, **NOISE}, "", 0, "unclear"),
        (STEADY, {"p50": 104, **STEADY}, "", 0, " same"),
        (STEADY, {"p50": 104, **STEADY}, "--threshold 0.02", 1, "slower (regression)"),
        ({}, {"p50": 50}, "", 0, "faster"),
        ({"runs": 4}, {"p50": 300, "runs": 50}, "", 0, "too few runs"),
        ({}, {"status": "wrong"}, "", 1, "now wrong (regression)"),
        ({}, {"status": "absent"}, "", 1, "now absent (regression)"),
        ({"status": "refused"}, {"status": "refused"}, "", 0, "0 regressions"),
        ({"status": "refused"}, {}, "", 0, "0 regressions"),
    ],
)
def test_a_row_is_called_slower_where_that_is_more_than_noise_and_threshold(
    write, record, capsys, before, after, options, status, said
):
    assert run(write, [record(**before)], [record(**after)], *options.split()) == status
    out = capsys.readouterr().out
    assert said in out
    assert f"1 rows compared, 0 without a partner, {status} regressions." in out


def test_a_slower_peer_is_shown_but_is_no_regression(write, record, capsys):
    rows = [[record(p50=100), record(p50=p, provider="torch eager")] for p in (100, 200)]
    assert run(write, *rows) == 0
    out = capsys.readouterr().out
    assert "slower" in out
    assert "The 1 rows of other providers: median ratio 2.000." in out


def test_the_interval_by_hand(write, record):
    before, after = (suite(load(write(f"{p}.jsonl", record(p50=p, runs=25)))) for p in (100.0, 150.0))
    (change,) = compare.changes(before, after, 0.05).itertuples()
    deviation = math.log(1.02 / 0.98) / 1.6832
    wide = math.exp(2.5758 * math.sqrt(2) * 1.2533 * deviation / 5)
    assert (change.low, change.high) == pytest.approx((1.5 / wide, 1.5 * wide), rel=1e-4)


def test_rows_meet_by_everything_that_names_them(write, record, capsys):
    shape = {"B": 2, "H": 8, "L": 27, "D": 64, "causal": True}
    differing = [
        record(p50=900, shape=shape | {"L": 28}),
        record(p50=900, dtype="bfloat16"),
        record(p50=900, **{"pass": "backward"}),
        record(p50=900, case="layer_norm"),
    ]
    assert run(write, [record()], [record(), *differing]) == 0
    assert "1 rows compared, 4 without a partner" in capsys.readouterr().out


def test_two_folders_of_several_machines_meet_by_machine(tmp_path, write, record, end_to_end):
    for side, slow in (("a", 100), ("b", 200)):
        write(f"{side}/runs.jsonl", end_to_end(bleu=slow / 4))  # no row of the suite
        write(f"{side}/cpu.jsonl", record(p50=100))
        write(f"{side}/gpu.jsonl", record(p50=slow, machine={"device": "NVIDIA H200"}))
    results = compare.changes(suite(load(tmp_path / "a")), suite(load(tmp_path / "b")), 0.05)
    found = [(change.ratio, change.entry_after.file) for change in results.itertuples()]
    assert found == [(2.0, "gpu.jsonl"), (1.0, "cpu.jsonl")]


def test_what_cannot_be_compared_is_refused_in_a_line(tmp_path, write, record):
    with pytest.raises(UserError, match=r"kernels in float32\) and .* have no row in common"):
        run(write, [record()], [record(case="other")])
    with pytest.raises(UserError, match=r"kernels in float32\) and .*kernels in bfloat16"):
        run(write, [record()], [record(dtype="bfloat16")])
    with pytest.raises(UserError, match=r"before\.jsonl:1 and before\.jsonl:2 measure the same thing"):
        run(write, [record(), record()], [record()])
    with pytest.raises(UserError, match=r"--threshold: '-1' was given, it must be from 0"):
        run(write, [record()], [record()], "--threshold", "-1")
    with pytest.raises(UserError, match="holds no records"):
        run(write, [record()], [])
    with pytest.raises(UserError, match=r"after\.jsonl, line 1, is no record"):
        run(write, [record()], [{"schema": 1}])


@pytest.mark.parametrize(
    ("other", "status"), [({"machine": {"processor": "another"}}, 0), ({"threads": 2}, 0), ({"seed": 5}, 1)]
)
def test_two_machines_have_no_regressions(write, record, capsys, other, status):
    lost = [record(provider="fasttfm, packed"), record(provider="fasttfm, packed", status="refused", **other)]
    assert run(write, [record(p50=100), lost[0]], [record(p50=300, **other), lost[1]]) == status
    assert ("no row is called a regression" in capsys.readouterr().out) == (status == 0)


def test_the_same_file_twice_and_the_wrong_order_are_said(write, record, capsys):
    later = record(p50=50, machine={"time": "2026-02-02T03:04:05+00:00"})
    assert run(write, [record()], [record()]) == 0
    assert "Both sides hold the same records." in capsys.readouterr().out
    assert run(write, [later], [record()]) == 1
    assert "BEFORE was measured later (2026-02-02T03:04:05+00:00) than AFTER" in capsys.readouterr().out
    assert run(write, [record()], [later]) == 0
    out = capsys.readouterr().out
    assert "wrong way round" not in out
    assert "same records" not in out
