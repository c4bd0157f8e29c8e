"""The host benchmark runs every call, ours and PyTorch's, and keeps them in one record."""

import json

import torch

from benchmarks import host


def test_every_call_stands_beside_pytorchs_in_the_record(tmp_path):
    assert host.main(["--device", "cpu", "--rounds", "1", "--results", str(tmp_path)]) == 0
    (record,) = map(json.loads, (tmp_path / "host.jsonl").read_text().splitlines())
    names = [name for name, *_ in host.operators(torch.device("cpu"))]
    assert [row["what"] for row in record["measured"]] == names
    assert len(names) == 10
    for row in record["measured"]:
        assert row["ratio"] == round(row["ratio"], 3) > 0
        assert abs(row["ratio"] - row["us"] / row["peer_us"]) < 0.02 * row["ratio"]
