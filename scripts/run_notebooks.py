"""Runs notebooks from the first cell to the last and saves their outputs in the file.

Usage: scripts/run_notebooks.py notebooks/NAME.ipynb... (extra `notebooks`). Each runs in an empty folder.
"""

import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[1]
_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run(path: Path) -> None:
    """Run a notebook and save it with its outputs. If a cell fails, raises CellExecutionError and writes nothing."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": folder}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs = tidied(cell.outputs, folder)
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["code_sha256"] = digest(cell.source for cell in notebook.cells if cell.cell_type == "code")
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def digest(sources: Iterable[str]) -> str:
    """Digest of the code cells, which identifies the code of saved outputs."""
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def tidied(outputs: list[nbformat.NotebookNode], folder: str) -> list[nbformat.NotebookNode]:
    """The outputs with merged streams, without colours, overwritten lines and the folder's path."""
    result: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and result and result[-1].get("name") == output.name:
            result[-1].text += output.text
        else:
            result.append(output)
    for output in result:
        if output.output_type == "stream":
            lines = _STYLE.sub("", output.text).replace("\r\n", "\n").split("\n")
            output.text = "\n".join(line.rsplit("\r", 1)[-1] for line in lines).replace(f"{folder}/", "")
    return result


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(ROOT)
    for name in sys.argv[1:]:
        run(Path(name).resolve())
