"""The record of speeds, and the pages with the tables of records."""

import pytest
import speeds
from gpu.problems import _embed

from benchmarks.measure.records import RESULTS, read
from tests.executed import machine_code


def test_a_row_for_every_kernel_of_a_family(monkeypatch, tmp_path):
    monkeypatch.setattr(speeds, "FAMILIES", {"embedding": _embed(2, 7, 72, 50, 0.1)})
    assert speeds.main(["--chip", "sm_80", "--times", "1", "--results", str(tmp_path)]) == 0
    (record,) = read(tmp_path / "ptx-speeds.jsonl")  # validates the schema
    rows = [(row["family"], row["kernel"]) for row in record["kernels"]]
    assert rows == [("embedding", "forward"), ("embedding", "sum_rows")]
    assert all(row["first_ms"] > 0 and row["instructions"] > 0 for row in record["kernels"])
    assert speeds.table(record).count("\n") == 3


@pytest.mark.parametrize(("made", "name"), [(speeds, "ptx-speeds.jsonl"), (machine_code, "machine-code.jsonl")])
def test_the_page_has_the_table_of_the_record(made, name):
    page = made.PAGE.read_text(encoding="utf-8")
    between = page.partition(made.BEGIN)[2].partition(made.END)[0].strip()
    assert between == (made.section(read(RESULTS / name)) if (RESULTS / name).exists() else "")
