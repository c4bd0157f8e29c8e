"""The record of executed PTX: a line for each chip, which the pages quote."""

import pytest

from benchmarks.measure import machine, records
from tests.executed import __main__ as executed

FAILING = """
def test_one_on_sm_80(record_property):
    record_property("mutations", '{"noticed": 3, "missed": 1}')

def test_another_on_sm_80():
    assert False

def test_one_on_sm_90():
    raise AssertionError("of another chip")
"""


@pytest.mark.whole
def test_the_cases_of_a_chip_are_counted_with_their_mutations(tmp_path, monkeypatch):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    executed: long\n")
    (tmp_path / "test_small.py").write_text(FAILING)
    monkeypatch.setattr(executed, "TESTS", (tmp_path,))
    mutations = [{"noticed": 3, "missed": 1}]
    counts = {"cases": 2, "passed": 1, "failed": ["test_another_on_sm_80"], "mutations": mutations}
    assert executed.execute("sm_80", 1) == counts


def test_the_pages_quote_the_records():
    said = executed.sentence(records.read(records.RESULTS / "executed.jsonl"))
    for page in ("docs/proof.md", "docs/ptx.md"):
        assert said in " ".join((machine.ROOT / page).read_text(encoding="utf-8").split()), page
