"""The ledger of compile cases: cached counts, budgets, search, records and tables, without a device.

Reading and counting machine code is tested in ptx-check/tests/test_machine_code.py.
"""

import dataclasses
import re

import pytest

from benchmarks.measure import check, records
from benchmarks.measure.records import load
from fasttfm.errors import UserError
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof import matrix
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import Resources, record, search, work
from fasttfm.kernels.proof.ledger import __main__ as ledger_main
from fasttfm.kernels.proof.ledger.__main__ import main
from ptx_check.ledger.count import Count, Usage
from ptx_check.ledger.counted import Counted

SM_80, SM_90 = CHIPS["sm_80"], CHIPS["sm_90"]


def test_work_is_the_number_of_elements_per_thread():
    assert work.tile_elements("attention.forward/causal/D64/128x64w4s3", 32) == 64
    assert work.tile_elements("feed_forward.forward/plain/64x64x32w4s3", 32) == 16  # half of work.DEPTH
    assert work.tile_elements("layer_norm.forward/N512/4x512w4s1", 64) == 8
    with pytest.raises(ValueError, match="does not end in a tile"):
        work.tile_elements("layer_norm.forward", 32)


def usual(**changes) -> CompileCase:
    listed = (case for _, case in matrix.enumerate_cases([SM_80], ["attention.forward"]))
    return dataclasses.replace(next(listed), **changes)


def counted_as(bound: float, spill: int = 0, shared: int = 0) -> Counted:
    return Counted(Resources(64, spill, shared, 1, bound=bound), Count((), Usage(), False), 4)


def test_a_search_ranks_by_spills_then_the_bound_and_tiles_that_do_not_fit_last():
    case = usual()
    best, spilling, slow = counted_as(16.0), counted_as(8.0, spill=8), counted_as(24.0)
    large = counted_as(1.0, shared=1 << 20)
    tried = [search.Tried(case, each) for each in (large, slow, spilling, best)] + [search.Tried(case, None, "no")]
    ranked = sorted(tried, key=lambda each: each.rank(SM_80))
    assert [each.counted for each in ranked[:3]] == [best, slow, spilling]
    tiles = search.tiles(SM_80, case)
    assert tiles[0] == case
    assert len({each.name for each in tiles}) == len(tiles) > 10
    assert "-> " not in search.reason(SM_80, [search.Tried(case, best)], case)


def test_a_record_has_every_loop_and_names_its_columns(tmp_path):
    loop = Usage(instructions=100, issue=100.0, tensor=160.0)
    result = Counted(Resources(64, 0, 1024, 8, bound=2.5), Count((loop,), Usage(), True, ("H4 | W0",)), 4)
    case = usual()
    record.write(tmp_path / "ledger.jsonl", {"sm_80": [record.entry_of(SM_80, case, result)]})
    (line,) = records.read(tmp_path / "ledger.jsonl")  # validates the schema
    assert line["counted"] == "not measured"
    summary, reasons = check.check(tmp_path / "ledger.jsonl")
    assert ("of no machine" in summary, reasons) == (True, [])
    with pytest.raises(UserError, match="holds no records"):  # no measurements for reports
        load(tmp_path)
    (entry,) = line["cases"]
    elements = work.elements(SM_80, case)
    values = dict(zip(line["columns"], entry["loops"][0]))
    assert (entry["case"], values["instructions"], values["by"]) == (case.name, 100, "tensor")
    assert entry["orders"] == ["H4 | W0"]
    assert values["bound"] == values["tensor"] == pytest.approx(160 / elements, abs=0.01)


def test_a_record_of_some_cases_keeps_the_other_compile_cases_of_their_chip(tmp_path, monkeypatch):
    file, case = tmp_path / "ledger.jsonl", usual()
    other = next(each for _, each in matrix.enumerate_cases([SM_80], ["attention.short"]))
    gone = dataclasses.replace(case, name=f"gone/{case.name}")
    stale = [{"commit": "0" * 40, **record.entry_of(SM_80, each, counted_as(9.0))} for each in (case, other, gone)]
    task = matrix.Task("attention.forward", "sm_80", 0)
    monkeypatch.setattr(ledger_main, "_rows", lambda cases, workers: {task: (SM_80, case, counted_as(2.5))})
    for some, left in ((True, [(other.name, "0" * 40), (case.name, None)]), (False, [(case.name, None)])):
        record.write(file, {"sm_80": stale})
        assert ledger_main._record(file, {task: case}, 1, some=some) == 0
        (line,) = records.read(file)
        assert [(entry["case"], entry.get("commit")) for entry in line["cases"]] == left


def test_the_page_shows_the_recorded_orders_of_products():
    cases = [entry for line in records.read(records.RESULTS / "ledger.jsonl") for entry in line["cases"]]
    recorded = {(entry["case"], entry["orders"][0]) for entry in cases if "orders" in entry}
    page = (records.RESULTS.parents[1] / "docs" / "ledger.md").read_text()
    shown = re.findall(r"^\| (attention\.\S+) \| `(.*)` \|$", page, re.MULTILINE)
    assert len(shown) > 10
    assert {(case, order.replace("\\|", "|")) for case, order in shown} <= recorded


@pytest.mark.parametrize(("factor", "changes"), [(1.02, (0, 0)), (1.04, (1, 0)), (0.9, (0, 1))])
def test_cases_that_grew_by_more_than_three_percent_since_a_record_are_named(tmp_path, factor, changes):
    def counted(times: float) -> Counted:
        loop = Usage(instructions=100, issue=1000.0 * times)
        return Counted(Resources(64, 0, 1024, 8), Count((loop,), Usage(issue=500.0), True), 4)

    file, case = tmp_path / "ledger.jsonl", usual()
    record.write(file, {"sm_80": [record.entry_of(SM_80, case, counted(1.0))]})
    other_tile = dataclasses.replace(case, name=case.name.rpartition("/")[0] + "/16x16w1s1")
    new = dataclasses.replace(case, name=f"new/{case.name}")
    grown, shrunk, compared = record.against(file, [(SM_80, case, counted(factor)), (SM_80, new, counted(9.0))])
    assert ((len(grown), shrunk), compared) == (changes, 1)
    assert all(case.name in line for line in grown)
    assert record.against(file, [(SM_80, other_tile, counted(factor))])[2] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chips", "sm_1"], "unknown chip sm_1: choose from sm_60"),
        (["--kernels", "nothing"], "no kernel file starts with nothing"),
        (["--match", "("], "is not a regular expression"),
        (["--against", "/no/such"], "there is no file /no/such"),
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (["--record", "x", "--search", "attention.forward"], "exclude each other"),
        (["--record", "/no/such/folder/file"], "a file in an existing folder"),
        (["--kernels", "rotary", "--match", "nothing", "--chips", "sm_80"], "matches 'nothing'"),
    ],
)
def test_wrong_arguments_end_in_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
