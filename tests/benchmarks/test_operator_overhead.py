"""The overhead benchmark runs, keeps its record, and finds the direct call cheaper than PyTorch's ways."""

import json

from benchmarks import operator_overhead


def test_a_record_of_every_way_is_kept_and_the_direct_call_is_the_cheapest(tmp_path, capsys):
    assert operator_overhead.main(["--runs", "20", "--results", str(tmp_path)]) == 0
    (line,) = (tmp_path / "operator-overhead.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert json.loads(capsys.readouterr().out) == record
    assert record["machine"]["torch"]
    measured = record["measured"]
    assert set(operator_overhead.WAYS) < set(measured)
    for circumstance in ("without_gradient_us", "with_gradient_us"):
        times = {way: measured[way][circumstance]["quickest"] for way in operator_overhead.WAYS}
        assert times["fasttfm"] < times["dispatcher"]
        assert times["fasttfm"] < times["custom_op"]
