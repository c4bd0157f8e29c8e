"""The page and the notebook for old GPUs: tables match the code, cells run."""

import json
import sys

import pytest

from benchmarks.__main__ import main
from benchmarks.measure.machine import ROOT, git
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.tiles.feed_forward import ROUTE

NOTEBOOK = ROOT / "notebooks" / "p100.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = {cell["id"]: "".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"}


# ---------------------------------------------------------------------------------------------------------- the page


PAGE = ROOT / "docs" / "p100.md"
OLD = {"sm_60": "P100", "sm_70": "V100", "sm_75": "T4"}
ATTENTION = {
    "short": "one Triton kernel, all keys of a row at once",
    "flash": "one Triton kernel, tile after tile",
    "softmax": "cuBLAS, one Triton kernel for mask, softmax and dropout, cuBLAS",
}
FEED_FORWARD = {"fused": "Triton product with everything in it", "cublas": "cuBLAS and one pass for what remains"}


def row(operator, dtype, answer):
    return f"| {' | '.join([operator, dtype, *(answer(CHIPS[chip]) for chip in OLD)])} |"


@pytest.mark.parametrize(("kind", "dtype"), [("fp32", "float32"), ("fp16", "float16")])
def test_the_backends_on_the_page_match_the_code(kind, dtype):
    page = PAGE.read_text(encoding="utf-8")
    for keys in (27, 100, 500, 2_000):
        size = attention_launch.width_class(64), attention_launch.key_class(keys)
        title = f"attention, {keys:,} keys, heads of 64"
        assert row(title, dtype, lambda chip: ATTENTION[attention_launch.route(chip, kind, *size)]) in page  # noqa: B023
    for product in ("forward", "forward+dropout", "backward"):
        title = f"feed-forward, {product.replace('+', ' with ')}"
        assert row(title, dtype, lambda chip: FEED_FORWARD[ROUTE(chip, kind, product)]) in page  # noqa: B023


# ------------------------------------------------------------------------------------------------------ the notebook


def test_the_notebook_is_valid_and_has_no_outputs():
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))
    for cell in CELLS:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            compile("".join(cell["source"]), cell["id"], "exec")


def test_an_unreplaced_placeholder_stops_the_notebook():
    space: dict = {}
    exec(CODE["addresses"], space)
    exec(CODE["helpers"], space)
    with pytest.raises(ValueError, match="REPOSITORY is still '<this repository>'"):
        exec(CODE["install"], space)


def test_the_cells_after_the_run_show_and_check_its_records(tmp_path, capfd, write, record):
    commit = git("rev-parse", "HEAD")
    if commit is None:
        pytest.skip("not a git checkout")
    machine = {"commit": commit}
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


def test_a_failing_command_stops_the_notebook():
    space: dict = {}
    exec(CODE["helpers"], space)
    with pytest.raises(RuntimeError, match="status 3"):
        space["run"](sys.executable, "-c", "import sys; sys.exit(3)")


def test_the_notebooks_commands_exist(capsys):
    assert '"benchmarks", "--quick", "--out"' in CODE["run"]
    assert main(["blocks", "--quick", "--out", "x", "--list"]) == 0
    assert main(["check", "absent.jsonl"]) == 2
