"""The record of speeds and its table."""

import speeds
from gpu.problems import _embed

from benchmarks.measure.records import RESULTS, read


def test_a_row_for_every_kernel_of_a_family(monkeypatch, tmp_path):
    monkeypatch.setattr(speeds, "FAMILIES", {"embedding": _embed(2, 7, 72, 50, 0.1)})
    assert speeds.main(["--chip", "sm_80", "--times", "1", "--results", str(tmp_path)]) == 0
    (record,) = read(tmp_path / "ptx-speeds.jsonl")  # validates the schema
    rows = [(row["family"], row["kernel"]) for row in record["kernels"]]
    assert rows == [("embedding", "forward"), ("embedding", "sum_rows")]
    assert all(row["first_ms"] > 0 and row["instructions"] > 0 for row in record["kernels"])
    assert speeds.table(record).count("\n") == 3


def test_the_page_has_the_table_of_the_record():
    file = RESULTS / "ptx-speeds.jsonl"
    page = speeds.PAGE.read_text(encoding="utf-8")
    between = page.partition(speeds.BEGIN)[2].partition(speeds.END)[0].strip()
    assert between == (speeds.section(read(file)) if file.exists() else "")
