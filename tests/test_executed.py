"""The record of executed PTX: a line for each chip, which the pages quote."""

from benchmarks.measure import machine, records
from tests.executed import __main__ as executed


def test_the_pages_quote_the_records():
    said = executed.sentence(records.read(records.RESULTS / "executed.jsonl"))
    for page in ("docs/proof.md", "docs/ptx.md"):
        assert said in " ".join((machine.ROOT / page).read_text(encoding="utf-8").split()), page
