"""The benchmark of ALBERT's sharing and of ELECTRA: its rows, its curve, its probe."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import encoders
from benchmarks.measure.records import kind, problems


@pytest.fixture
def texts(tmp_path, monkeypatch):
    first = "".join(f"the dog number {n} runs over green grass\n" for n in range(250))
    second = "".join(f"two ships of iron sail at {n} knots to port\n" for n in range(250))
    for name, text in (("first.txt", first), ("second.txt", second)):
        (tmp_path / name).write_text(text)
    small = {"d_model": 16, "heads": 4, "d_ff": 16, "layers": 2, "max_length": 32, "row_length": 32, "max_tokens": 256}
    monkeypatch.setattr(encoders, "RECIPE", {**encoders.RECIPE, **small, "precision": "fp32"})
    monkeypatch.setattr(encoders, "POINTS", 2)
    return ["--text", str(tmp_path / "first.txt"), str(tmp_path / "second.txt"), "--vocab-size", "330"]


def record_of(folder):
    record = json.loads((folder / "encoders.jsonl").read_text())
    assert kind(record) == "encoders"
    assert not problems(record, "encoders")
    return record


def test_every_way_of_sharing_has_a_row(texts, tmp_path):
    assert encoders.main(["albert", *texts, "--updates", "2", "--results", str(tmp_path)]) == 0
    rows = record_of(tmp_path)["measured"]
    counts = [row["parameters"] for row in rows]
    assert counts[0] > max(counts[1:3])
    assert min(counts[1:3]) > counts[3]
    assert [row["model"].split()[0] for row in rows] == ["albert,"] * 4 + ["bert:"]
    assert all(row["masked_nats"] > 0 and row["tokens_per_second"] > 0 for row in rows)


def test_both_curves_begin_with_fresh_weights(texts, tmp_path):
    words = ["electra", *texts, "--minutes", "0.01", "--results", str(tmp_path), "--images", str(tmp_path)]
    assert encoders.main(words) == 0
    assert (tmp_path / "electra-curve.png").read_bytes()[:4] == b"\x89PNG"
    for points in record_of(tmp_path)["runs"].values():
        assert [point["seconds"] == 0 for point in points] == [True, False, False]
        assert points[1]["seconds"] >= 0.3
        assert points[2]["updates"] >= points[1]["updates"] >= 1


def test_the_probe_is_no_better_than_guessing_on_noise_and_right_on_what_is_separate():
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (2000,), generator=random)
    is_fitted = torch.arange(2000) % 2 == 0
    noise = torch.randn(2000, 8, generator=random, dtype=torch.float64)
    assert abs(encoders.ridge_accuracy(noise, labels, is_fitted) - 0.5) < 0.06
    noise[:, 3] += 20 * labels
    assert encoders.ridge_accuracy(noise, labels, is_fitted) == 1.0


def test_one_text_is_not_enough_for_the_probe(texts, tmp_path, capsys):
    with pytest.raises(encoders.UserError, match="at least two files are needed"):
        encoders.main(["electra", *texts[:2], *texts[3:], "--results", str(tmp_path)])
