"""The table of speeds."""

import speeds
from gpu.problems import _embed


def test_a_row_for_every_kernel_of_a_family(monkeypatch):
    monkeypatch.setattr(speeds, "FAMILIES", {"embedding": _embed(2, 7, 72, 50, 0.1)})
    rows = [[part.strip() for part in row.strip("|").split("|")] for row in speeds.rows("sm_80", 1)]
    assert [row[:2] for row in rows] == [["embedding", "forward"], ["embedding", "sum_rows"]]
    assert all(float(number.replace(",", "")) > 0 for row in rows for number in row[4:])
