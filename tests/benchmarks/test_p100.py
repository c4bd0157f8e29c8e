"""The page and the notebook for old GPUs: tables as the code has them, cells that run, a check that can say no."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.__main__ import main
from benchmarks.limits import old_chips
from benchmarks.measure import check
from benchmarks.measure.machine import ROOT
from fasttfm.kernels.compile_case import CHIPS
from fasttfm.kernels.proof import budgets
from fasttfm.kernels.proof.matrix import families

NOTEBOOK = ROOT / "notebooks" / "p100.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = {cell["id"]: "".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"}


def commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.strip()


# ---------------------------------------------------------------------------------------------------------- the page


REMEDY = "run `python -m benchmarks.limits.old_chips`"


def test_the_routes_of_the_page_are_what_the_code_decides():
    assert old_chips.routes() in old_chips.PAGE.read_text(encoding="utf-8"), REMEDY


def test_the_page_has_what_the_matrix_has_recorded():
    recorded = budgets.read()[1]
    chips = [CHIPS[name] for name in old_chips.OLD]
    cases = [budgets.key(chip, case) for cases in families().values() for chip in chips for case in cases(chip)]
    if not set(cases) <= set(recorded):
        pytest.skip("the compile matrix is not recorded in full: the table is written when it is")
    assert old_chips.proved() in old_chips.PAGE.read_text(encoding="utf-8"), REMEDY


def test_the_routes_are_those_that_a_launch_would_take(monkeypatch):
    from fasttfm.kernels.attention import launch as attention_launch

    monkeypatch.setattr(attention_launch, "route", lambda chip, *size: "flash" if chip.name == "sm_70" else "short")
    lines = [line for line in old_chips.routes().splitlines() if line.startswith("| attention")]
    assert len(lines) == 8
    for line in lines:
        one, other, third = line.strip("| ").split(" | ")[2:]
        assert "tile after tile" in other
        assert one == third != other


def test_what_spills_is_said(monkeypatch):
    from fasttfm.kernels.proof.resources import Resources

    recorded = {
        ("sm_60", "attention.forward/a", "fp32"): Resources(200, 48, 2048, 0),
        ("sm_60", "attention.forward/b", "fp16"): Resources(90, 0, 24576, 0),
        ("sm_60", "attention.forward/b", "bf16"): Resources(255, 999, 49152, 0),
        ("sm_90", "attention.forward/b", "fp16"): Resources(255, 999, 49152, 0),
    }
    monkeypatch.setattr(old_chips.budgets, "read", lambda: ("9.9", recorded))
    row = old_chips.proved().splitlines()[-1]
    results = "2; 200; 24 KiB; 1 spill, up to 48 bytes"
    assert row == f"| `kernels/attention/forward.py` | {results} | none recorded | none recorded |"


def test_each_case_is_filed_under_the_kernel_file_that_lists_it(monkeypatch):
    from fasttfm.kernels.proof.resources import Resources

    files = {
        "attention.short.forward/a": "attention/short",
        "attention.backward.keys/a": "attention/backward",
        "layer_norm.backward_wide/a": "layer_norm",
        "residual_add/1x512w4s1": "residual_add",
    }
    recorded = {("sm_60", case, "fp32"): Resources(90, 0, 0, 0) for case in files}
    monkeypatch.setattr(old_chips.budgets, "read", lambda: ("9.9", recorded))
    named = [line.split("`")[1] for line in old_chips.proved().splitlines() if line.startswith("| `kernels/")]
    assert named == sorted(f"kernels/{file}.py" for file in files.values())


def test_a_page_without_its_markers_is_refused():
    with pytest.raises(ValueError, match="needs the lines"):
        old_chips.updated("no table here")


# ------------------------------------------------------------------------------------------------------ the notebook


def test_the_notebook_is_one_that_jupyter_reads():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    for cell in CELLS:
        assert cell["cell_type"] in ("code", "markdown")
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | (
            {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        )
        assert all(isinstance(line, str) for line in cell["source"])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            compile("".join(cell["source"]), cell["id"], "exec")


def test_a_placeholder_that_was_left_stops_the_notebook():
    space: dict = {}
    exec(CODE["addresses"], space)
    exec(CODE["helpers"], space)
    with pytest.raises(ValueError, match="REPOSITORY is still '<this repository>'"):
        exec(CODE["install"], space)


def test_the_cells_behind_the_run_show_and_check_its_records(tmp_path, capfd, write, record):
    machine = {"commit": commit()}
    write("kernels-x.jsonl", record(machine=machine), record(machine=machine, provider="peer", status="absent"))
    space: dict = {}
    exec(CODE["helpers"], space)
    space |= {"FOLDER": str(ROOT), "RECORDS": tmp_path}
    exec(CODE["table"], space)
    exec(CODE["send"], space)
    shown = capfd.readouterr().out
    assert "100.0 us" in shown
    assert "absent" in shown
    assert "made up: absent" in shown
    assert "fit to be sent in" in shown
    assert str(tmp_path / "kernels-x.jsonl") in shown.splitlines()


def test_a_cell_whose_command_fails_stops_the_notebook():
    space: dict = {}
    exec(CODE["helpers"], space)
    with pytest.raises(RuntimeError, match="status 3"):
        space["run"](sys.executable, "-c", "import sys; sys.exit(3)")


def test_every_command_of_the_notebook_is_one_of_the_suite(capsys):
    assert '"benchmarks", "--quick", "--out"' in CODE["run"]
    assert main(["padding", "--quick", "--out", "x", "--list"]) == 0
    assert main(["check"]) == 2


# --------------------------------------------------------------------------------------------------------- the check


def test_what_is_fit_is_said_to_be(write, record, capsys):
    file = write("a.jsonl", record(machine={"commit": commit()}))
    assert main(["check", str(file)]) == 0
    assert "1 records (1 timed) of AMD EPYC, 2 cores" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": {"uncommitted_changes": True}}, "uncommitted changes"),
        ({"machine": {"commit": None}}, "names no commit"),
        ({"machine": {"commit": 40 * "f"}}, "which this checkout does not have"),
        ({"level": "smoke"}, "is of --smoke"),
        ({"status": "wrong"}, "has a wrong result"),
        (
            {"roofline": {"floor_us": 150.0, "share": 1.5, "ceilings": {"gb_per_s": 9.0, "tflop_per_s": 1.0}}},
            "1.50 of the roofline",
        ),
    ],
)
def test_what_is_not_fit_is_named(write, record, capsys, changes, message):
    changes = {**changes, "machine": {"commit": commit(), **changes.get("machine", {})}}
    file = write("a.jsonl", record(machine={"commit": commit()}), record(provider="peer", **changes))
    assert main(["check", str(file)]) == 1
    out = capsys.readouterr().out
    assert message in out
    assert "1 of 2 records" in out
    assert "fit to be sent in" not in out


def test_a_file_that_holds_no_records_is_refused(tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert main(["check", str(empty)]) == 1
    assert "holds no record" in capsys.readouterr().out
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    assert main(["check", str(broken)]) == 2
    assert "no record of this suite" in capsys.readouterr().err


def test_a_record_is_named_by_what_it_is(record):
    assert check.title(record()).startswith("kernels attention B=2 H=8")
    assert check.title({"benchmark": "end_to_end"}) == "end_to_end"
