"""Machine code of the kernels, executed: the tile that a ptxas miscompiles, tiles that it does not, and the record.

python -m tests.executed.machine_code executes every launch by every assembler and records the results.
"""

import pytest
import torch
from executing import solving
from gpu.problems import _attention, _feed_forward, _norms

from benchmarks.measure.records import RESULTS, read
from fasttfm.functional import backend
from fasttfm.kernels import choices
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof.executed import executed
from fasttfm.kernels.tiles import attention as tiles
from fasttfm.kernels.tiles.table import Tile
from ptx_check import Machine
from ptx_check.ledger import sass
from ptx_check.machine_code.compared import version
from tests.executed import machine_code


def compared(problem, **options) -> Machine:
    solve = solving(problem, torch.bfloat16)
    with executed("sm_90", machine_code="compare", **options) as machine, backend("triton"):
        solve()
    return machine


def test_the_tile_that_ptxas_12_8_miscompiles(monkeypatch):
    """16x128 on four warps: the descriptor of a product comes from an overwritten register. On an H100 this was an
    illegal address; the PTX is right."""
    assemblers = {version(path): path for path in map(str, map(sass.tool, ("ptxas", "ptxas-blackwell")))}
    if "12.8.93" not in assemblers:
        pytest.skip(f"Triton ships ptxas {', '.join(assemblers)}")
    monkeypatch.setattr(tiles.SHORT_BACKWARD, "shipped", lambda *size: Tile(16, 128, 4))
    choices.keep(CHIPS["sm_90"], {})
    try:
        machine = compared(_attention(1, 1, 128, 128, 64, 64), ptxas=list(assemblers.values()), raising=False)
    finally:
        monkeypatch.undo()
        choices.keep(CHIPS["sm_90"], {})
    outcomes = [outcome for outcome in machine.machine_code.outcomes if outcome.kernel == "_backward"]
    by_version = {version(outcome.ptxas): outcome for outcome in outcomes}
    broken = by_version.pop("12.8.93")
    assert broken.difference > 1
    assert {"bounds", "assembler"} <= {fault.kind for fault in broken.faults}
    assert not [outcome.faults for outcome in by_version.values() if outcome.faults]


@pytest.mark.whole
@pytest.mark.parametrize(
    "problem",
    [
        _attention(1, 1, 37, 139, 64, 64, causal=True, p=0.1),
        _attention(2, 1, 150, 139, 128, 128, lengths=[130, 0]),
        _feed_forward(37, 40, 72, 0.1),
        *_norms(7, 520, 0.1),
    ],
    ids=str,
)
def test_shipped_tiles_agree_with_their_ptx(problem):
    machine = compared(problem)
    assert not machine.faults
    assert machine.machine_code.outcomes


def result(ptx: str, outcome: str, **others) -> dict:
    """A line of the plugin."""
    line = {"ptx": ptx, "kernel": "rotary.rotate", "tile": "64x16w2s1", "dtype": "bf16", "width": 0,
            "assembler": "12.8.93", "choice_made": "", "outcome": outcome, "told": [], "constants": {},
            "difference": 0.5, "largest": 2.0}  # fmt: skip
    return line | others


def test_a_line_for_each_kernel_tile_and_assembler():
    results = [result("a", "right"), result("a", "right"), result("b", "wrong", told=["bounds"], difference=1.0)]
    results += [result("c", "refused", told=["not known"])]
    results += [result("a", "right", assembler="13.1.80", choice_made="tune")]
    older, newer = machine_code.lines_of([*results, {"choice": "a tile of tune", "answer": "64x16w2s1"}])
    counts = {"width": 0, "variants": 3, "right": 1, "not_known": 1, "wrong": ["bounds"], "difference": 1.0}
    assert (counts | {"choice": ""}).items() <= older.items()
    assert (newer["assembler"], newer["right"], newer["choice"]) == ("13.1.80", 1, "tune")
    assert "| `rotary.rotate` | 1 | 1 | 1 of 3 | 1 of 1 | 5.0e-01 |" in machine_code.table([older, newer])


@pytest.mark.whole
def test_the_command_writes_a_record_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_code, "found_file", lambda: tmp_path / "found.jsonl")
    words = ["-k", "bf16 and rotary and interleaved", "--workers", "1", "--results", str(tmp_path)]
    assert machine_code.main(words) == 0
    lines = read(tmp_path / "machine-code.jsonl")  # validates the schema
    assert {line["kernel"] for line in lines} == {"rotary.rotate"}
    assert all(line["right"] == line["variants"] for line in lines)
    before = (tmp_path / "found.jsonl").read_text()
    assert machine_code.main(words) == 0
    assert (tmp_path / "found.jsonl").read_text() == before


def test_the_page_has_the_table_of_the_record():
    page = machine_code.PAGE.read_text(encoding="utf-8")
    between = page.partition(machine_code.BEGIN)[2].partition(machine_code.END)[0].strip()
    assert between == machine_code.section(read(RESULTS / "machine-code.jsonl"))
