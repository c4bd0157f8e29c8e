"""The notebooks run from the first cell to the last, with fewer updates, and keep the outputs of their own code."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from waiting import PATIENCE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"


def cells(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("name", ["quickstart", "attention_is_all_you_need"])
def test_the_outputs_in_the_file_are_those_of_its_code(name):
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sources = "\0".join("".join(cell["source"]) for cell in code)
    again = f"the code has changed: scripts/run_notebooks.py notebooks/{name}.ipynb"
    assert notebook["metadata"]["code_sha256"] == hashlib.sha256(sources.encode()).hexdigest(), again
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [(cell, output) for cell in code for output in cell["outputs"]]
    assert [output["output_type"] for _, output in outputs if output["output_type"] == "error"] == []
    drawn = [cell["id"] for cell, output in outputs if "image/png" in output.get("data", {})]
    assert drawn == [cell["id"] for cell in code if "plt." in "".join(cell["source"])]
    shown = json.dumps([{k: v for k, v in output.items() if k != "data"} for _, output in outputs])
    assert not re.search(r"(?<![\w.~-])/(?!s\b)\w+/|\\u001b|[A-Za-z]:\\\\|Traceback", shown), (
        "a path of the machine that ran it"
    )
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 350_000


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "smaller"),
    [("quickstart", {"PAIRS": "2_000", "TESTED": "4", "UPDATES": "2"}), ("attention_is_all_you_need", {"STEPS": "3"})],
)
def test_a_notebook_runs(name, smaller, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    for setting, value in smaller.items():
        changed = 0
        for cell in notebook.cells:
            cell.source, count = re.subn(rf"^{setting} = \S+", f"{setting} = {value}", cell.source, flags=re.MULTILINE)
            changed += count
        assert changed == 1, setting
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    nbclient.NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == sum("plt." in cell.source for cell in notebook.cells if cell.cell_type == "code")
