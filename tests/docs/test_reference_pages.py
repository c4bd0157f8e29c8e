"""API pages: every public function and class has an example that runs, and a list of its arguments."""

import importlib
import re
import runpy
from pathlib import Path

import pytest

from .blocks import blocks, run

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api"
PAGES = sorted(path.name for path in API.glob("*.md") if path.name != "index.md")
PUBLIC = {
    "fasttfm.md": "fasttfm",
    "functional.md": "fasttfm.functional",
    "nn.md": "fasttfm.nn",
    "models.md": "fasttfm.models",
    "pretraining.md": "fasttfm_pretraining.models",
}
ON_ANOTHER_PAGE = {"ArgumentError", "ArgumentTypeError", "backend", "__version__"}
OF_DEMO = "demo/model"
"""Examples with the model of `make demo` do not run here, but in test_paths.py."""


def entries(page: str) -> list[tuple[str, str]]:
    """(qualified name, example) of each function and class, in order."""
    text = (API / page).read_text(encoding="utf-8")
    found = re.findall(r"^::: (\S+)\n(?:    .*\n)*(?:\n```python\n(.*?)^```)?", text, re.MULTILINE | re.DOTALL)
    assert found
    return found


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    for name, example in entries(page):
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", example), f"{name} has no example"
    code = "\n".join(block for block in blocks(API / page) if OF_DEMO not in block)
    monkeypatch.chdir(tmp_path)
    run(code, tmp_path)


@pytest.mark.parametrize(("page", "module"), PUBLIC.items())
def test_every_public_name_is_on_its_page(page, module):
    shown = {name.rpartition(".")[2] for name, _ in entries(page)}
    public = {name for name in importlib.import_module(module).__all__ if not name.endswith("Config")}
    assert public - ON_ANOTHER_PAGE - shown == set()


def test_sentences_about_one_argument_move_to_it():
    pytest.importorskip("griffe", reason="the site is made with it")
    told = runpy.run_path(str(ROOT / "scripts" / "docs_arguments.py"))["told"]
    text = "query (B, L), key (B, S); one dtype. mask, of any\nshape: hides; scale defaults to 1. Returns (B, L)."
    meanings, rest = told(["query", "key", "mask", "scale", "site"], text)
    assert meanings == {"mask": "of any shape: hides.", "scale": "defaults to 1.", "query": "(B, L).", "key": "(B, S)."}
    assert rest == "query (B, L), key (B, S); one dtype. Returns (B, L)."
