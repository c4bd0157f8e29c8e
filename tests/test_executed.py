"""The record of executed PTX: what is executed again, and that the pages quote it."""

import ast
from pathlib import Path

import pytest

from benchmarks.measure import machine, records
from tests.executed import __main__ as executed
from tests.executed import unchanged

TESTS = Path(__file__).parent


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder of few tests in the place of tests/executed."""
    folder = tmp_path / "cases"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    executed: long\n")
    monkeypatch.setattr(executed, "TESTS", (folder,))
    monkeypatch.setenv("FASTTFM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "results"


def run(results, *chips):
    chosen = [word for chip in chips for word in ("--chip", chip)]
    return executed.main([*chosen, "--workers", "1", "--results", str(results)])


ADDED = """
import triton
import triton.language as tl


@triton.jit
def added(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i) + 1)
"""
LAUNCHED = """
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from added import added
from ptx_check import executed


def test_a_sum_on_sm_80():
    with executed("sm_80"):
        y = torch.zeros(32)
        added[(1,)](torch.ones(32), y, N=32)
    assert (y == 2).all()
    with Path(__file__).with_suffix(".log").open("a") as log:
        log.write("executed ")
"""


@pytest.mark.whole
def test_what_has_passed_is_executed_again_where_its_ptx_has_changed(small, tmp_path):
    """Not where a comment in the kernel has, or the lines of its statements."""
    file, kernel = tmp_path / "cases" / "test_small.py", tmp_path / "added.py"
    file.write_text(LAUNCHED)
    changes = [ADDED, "# A sum.\n" + ADDED, ADDED.replace("+ 1)", "+ 3)")]
    kept, commits = [], []
    for position, text in enumerate(changes):
        kernel.write_text(text)
        assert run(small, "sm_80") == (position == 2)
        (record,) = records.read(small / "executed.jsonl")
        kept.append(record["kept"])
        commits.append(list(record["keys"]))
        if position == 0:
            (keys,) = record["keys"].values()
            records.write(small / "executed.jsonl", [{**record, "keys": {"of-then": keys}}], executed.by_chip)
    assert kept == [0, 1, 0]
    assert commits == [commits[0], ["of-then"], []]
    assert file.with_suffix(".log").read_text().split() == ["executed"]


@pytest.mark.parametrize("folder", executed.TESTS, ids=lambda folder: folder.parent.parent.name)
def test_the_key_of_a_case_covers_every_file_that_it_imports(folder):
    """One that is not digested may change and the case counts as passed."""
    covered, imported = set(unchanged.files(folder)), set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            places = (folder, TESTS, TESTS / "kernels", TESTS.parent / "ptx-check" / "src")
            imported |= {place.joinpath(*name.split(".")).with_suffix(".py") for name in named for place in places}
    imported = {path for path in imported if path.exists() and path.name not in unchanged._ELSEWHERE}
    assert len(imported) > 3
    assert not imported - covered


def test_the_pages_quote_the_records():
    said = executed.sentence(records.read(records.RESULTS / "executed.jsonl"))
    for page in ("docs/proof.md", "docs/ptx.md"):
        assert said in " ".join((machine.ROOT / page).read_text(encoding="utf-8").split()), page


def test_every_case_belongs_to_one_line():
    assert executed.expression("sm_90") == "sm_90"
    assert executed.expression(executed.NO_CHIP) == "not (sm_60 or sm_75 or sm_80 or sm_90 or sm_100 or sm_120)"
