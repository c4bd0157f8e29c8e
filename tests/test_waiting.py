"""Tests wait for conditions (waiting.py) and never read a clock."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLOCKS = r"(perf_counter|monotonic|time\.time)\(\)|timeout=\d"
READS_ONE = {
    "tests/executed/__main__.py": "a record",
    "tests/executed/machine_code.py": "pytest's limit of a test, taken off",
    "tests/peer_tests/__main__.py": "a record",
    "tests/planted/__main__.py": "a record",
    "tests/processors.py": "a record",
    "tests/pytest_runs.py": "a record",
    "tests/training/test_interruption.py": "kills at random moments, until one has struck",
    "tests/training/test_trainer.py": "a clock of its own, which no machine stretches",
    "tests/training/test_workers.py": "a command that began two minutes ago",
    "tests/waiting.py": "gives up at last",
}
"""File -> reason."""


def test_no_test_reads_a_clock():
    """On a busy machine any duration may be longer, so a test must not fail for it."""
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("tests", "pretraining/tests", "ptx-check/tests")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(CLOCKS, path.read_text(encoding="utf-8")) and path != Path(__file__)
    }
    assert found == READS_ONE.keys()
