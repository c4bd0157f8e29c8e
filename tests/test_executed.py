"""The record of executed PTX: what a run of pytest becomes, chip after chip, and that the pages quote it."""

import subprocess

import pytest

from benchmarks.measure import machine, records
from tests.executed import __main__ as executed

SMALL = """
import pytest


@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_numbers(chip, dtype):
    assert (chip, dtype) != ("sm_90", "fp32")


@pytest.mark.parametrize("chip", ["sm_80"])
def test_skipped(chip):
    pytest.skip("not everywhere")
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder of few tests in the place of tests/executed."""
    folder = tmp_path / "cases"
    folder.mkdir()
    (folder / "test_small.py").write_text(SMALL)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    executed: long\n")
    monkeypatch.setattr(executed, "TESTS", (folder,))
    return tmp_path / "results"


def run(results, *chips):
    chosen = [word for chip in chips for word in ("--chip", chip)]
    return executed.main([*chosen, "--workers", "1", "--results", str(results)])


def test_a_chip_s_cases_become_its_line_and_the_others_stay(small, capfd):
    assert run(small, "sm_80", "sm_90") == 1
    first, second = records.read(small / "executed.jsonl")
    records.write(small / "executed.jsonl", [{**first, "seconds": 1.5}], executed.by_chip)
    assert [(line["chip"], line["seconds"]) for line in records.read(small / "executed.jsonl")] == [
        ("sm_80", 1.5),
        ("sm_90", second["seconds"]),
    ]
    assert (first["chip"], first["cases"], first["passed"], first["failed"]) == ("sm_80", 2, 2, [])
    assert (second["chip"], second["cases"], second["passed"]) == ("sm_90", 2, 1)
    assert second["failed"] == ["test_numbers[fp32-sm_90]"]
    assert capfd.readouterr().out.splitlines()[-1] == "3 of 4 cases pass"


def test_a_run_without_cases_is_no_record(small):
    with pytest.raises(subprocess.CalledProcessError):
        run(small, "sm_60")
    assert not small.exists()


def test_the_pages_quote_the_records():
    said = executed.sentence(records.read(records.RESULTS / "executed.jsonl"))
    for page in ("docs/proof.md", "docs/ptx.md"):
        assert said in " ".join((machine.ROOT / page).read_text(encoding="utf-8").split()), page


def test_every_case_belongs_to_one_line():
    assert executed.expression("sm_90") == "sm_90"
    assert executed.expression(executed.NO_CHIP) == "not (sm_60 or sm_75 or sm_80 or sm_90 or sm_100 or sm_120)"
