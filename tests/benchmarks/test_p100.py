"""The page and the notebook for old GPUs: tables match the code, cells run."""

import json
import sys

import pytest

from benchmarks.__main__ import main
from benchmarks.measure.machine import ROOT, git
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.tiles.feed_forward import ROUTE

OLD = {"sm_60": "P100", "sm_70": "V100", "sm_75": "T4"}
ATTENTION = {
    "short": "one Triton kernel, all keys of a row at once",
    "flash": "one Triton kernel, tile after tile",
    "softmax": "cuBLAS, one Triton kernel for mask, softmax and dropout, cuBLAS",
}
FEED_FORWARD = {"fused": "Triton product with everything in it", "cublas": "cuBLAS and one pass for what remains"}
NOTEBOOK = ROOT / "notebooks" / "p100.ipynb"
CODE = {
    cell["id"]: "".join(cell["source"])
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
}


@pytest.mark.parametrize(("kind", "dtype"), [("fp32", "float32"), ("fp16", "float16")])
def test_the_backends_on_the_page_match_the_code(kind, dtype):
    rows = []
    for keys in (27, 100, 500, 2_000):
        size = attention_launch.width_class(64), attention_launch.key_class(keys)
        backends = [ATTENTION[attention_launch.route(CHIPS[chip], kind, *size)] for chip in OLD]
        rows.append([f"attention, {keys:,} keys, heads of 64", dtype, *backends])
    for product in ("forward", "forward+dropout", "backward"):
        backends = [FEED_FORWARD[ROUTE(CHIPS[chip], kind, product)] for chip in OLD]
        rows.append([f"feed-forward, {product.replace('+', ' with ')}", dtype, *backends])
    page = (ROOT / "docs" / "p100.md").read_text(encoding="utf-8")
    assert [row for row in rows if f"| {' | '.join(row)} |" not in page] == []


@pytest.fixture
def space():
    """Names of the notebook after its first cells."""
    names: dict = {}
    for cell in ("addresses", "helpers"):
        exec(CODE[cell], names)
    return names


def test_the_notebook_is_valid_and_has_no_outputs():
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            compile(cell["source"], cell["id"], "exec")


def test_an_unreplaced_placeholder_and_a_failing_command_stop_the_notebook(space):
    with pytest.raises(ValueError, match="REPOSITORY is still '<this repository>'"):
        exec(CODE["install"], space)
    with pytest.raises(RuntimeError, match="status 3"):
        space["run"](sys.executable, "-c", "import sys; sys.exit(3)")


def test_the_cells_after_the_run_show_and_check_its_records(space, tmp_path, capfd, write, record):
    commit = git("rev-parse", "HEAD")
    if commit is None:
        pytest.skip("not a git checkout")
    machine = {"commit": commit}
    write("kernels-x.jsonl", record(machine=machine), record(machine=machine, provider="peer", status="absent"))
    space |= {"FOLDER": str(ROOT), "RECORDS": tmp_path}
    for cell in ("table", "send"):
        exec(CODE[cell], space)
    shown = capfd.readouterr().out
    for words in ("100.0 us", "made up: absent", "fit to be sent in"):
        assert words in shown
    assert str(tmp_path / "kernels-x.jsonl") in shown.splitlines()


def test_the_notebooks_commands_exist():
    assert '"benchmarks", "--quick", "--out"' in CODE["run"]
    assert main(["blocks", "--quick", "--out", "x", "--list"]) == 0
