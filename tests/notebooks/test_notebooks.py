"""The notebooks run from the first cell to the last, with fewer updates, and are committed without outputs."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"


def cells(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("name", [path.stem for path in sorted(FOLDER.glob("*.ipynb"))])
def test_a_notebook_is_committed_without_outputs(name):
    assert [cell["id"] for cell in cells(name) if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "smaller"),
    [
        ("quickstart", {"PAIRS": "2_000", "TESTED": "4", "UPDATES": "2"}),
        ("attention_is_all_you_need", {"STEPS": "3"}),
    ],
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
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == sum("plt." in cell.source for cell in notebook.cells if cell.cell_type == "code")
