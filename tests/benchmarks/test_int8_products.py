"""The table of products in int8: every candidate in every row, and a record that follows its schema."""

import json

from benchmarks import int8_products
from benchmarks.measure.records import SCHEMAS, kind


def test_every_candidate_is_timed_for_every_shape(tmp_path, monkeypatch):
    monkeypatch.setattr(int8_products, "ROWS", (1, 3))
    monkeypatch.setattr(int8_products, "SHAPES", ((24, 16), (16, 32)))
    assert int8_products.main(["--rounds", "1", "--calls", "2", "--results", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "int8-products.jsonl").read_text())
    assert kind(record) == "int8_products"
    assert set(SCHEMAS["int8_products"]["required"]) <= set(record)
    rows = record["measured"]
    assert [(row["rows"], row["outputs"]) for row in rows] == [(1, 24), (3, 24), (1, 16), (3, 16)]
    wanted = {"int8", "int8, float64 alone", "bfloat16", "float32"}
    assert all(wanted <= set(row["microseconds"]) for row in rows)
    assert all(value > 0 for row in rows for value in row["microseconds"].values())
