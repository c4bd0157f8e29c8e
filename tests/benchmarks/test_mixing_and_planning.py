"""The counts of how updates are mixed and of what planning takes, on corpora that take seconds."""

import json

import pytest

from benchmarks import mixing, planning
from benchmarks.measure import records
from fasttfm.data.demo import write_demo_corpus
from fasttfm.errors import UserError


def test_mixed_updates_are_more_even_than_single_batches(tmp_path):
    write_demo_corpus(tmp_path / "short")
    (tmp_path / "long").mkdir()
    for language in ("en", "de"):
        lines = (tmp_path / "short" / f"train.{language}").read_text(encoding="utf-8").splitlines()[:4000]
        (tmp_path / "short" / f"train.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        joined = [" ".join(lines[begin : begin + 4]) for begin in range(0, len(lines), 4)]
        (tmp_path / "long" / f"train.{language}").write_text("\n".join(joined) + "\n", encoding="utf-8")
    words = ["--text", str(tmp_path / "short"), str(tmp_path / "long"), "--vocab-size", "400"]
    assert mixing.main([*words, "--tokens", "4000", "--results", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "mixing.jsonl").read_text())
    records.validate(record)
    assert record["pairs"] == [4000, 1000]
    one, shuffled, mixed, even = record["measured"]
    for field in ("source_share_deviation", "target_length_deviation"):
        assert mixed[field] < 2 * even[field]
        assert 2 * mixed[field] < shuffled[field] < one[field]
    assert mixed["padding"] <= one["padding"]
    assert mixed["busy_of_2_ranks"] > 0.9
    with pytest.raises(UserError, match=r"has no train\.xx"):
        mixing.main([*words, "--languages", "xx", "de"])


def test_planning_tells_time_and_memory_of_each_size(tmp_path):
    assert planning.main(["--pairs", "20000", "--results", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "planning.jsonl").read_text())
    records.validate(record)
    (row,) = record["measured"]
    assert (row["pairs"], record["preset"]) == (20000, "paper-base")
    assert 0 < row["peak_mb"] < 100
