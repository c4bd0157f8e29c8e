"""docs/replace-torch-nn.md lists every argument (tests/docs/test_pages.py runs its code blocks)."""

import inspect
import re
from pathlib import Path

import torch

import fasttfm.nn

TESTS = Path(__file__).parents[1]
PAGE = (Path(__file__).parents[2] / "docs" / "replace-torch-nn.md").read_text(encoding="utf-8")
TABLES = PAGE[PAGE.index("## Every argument") :]


def rows(columns: int) -> list[list[str]]:
    """Rows of the tables with this many columns, without headers."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLES.splitlines() if line.startswith("|")]
    return [row for row in cells if len(row) == columns and row[0] not in ("argument", "what", "---")]


def test_every_argument_of_torch_has_its_line_and_a_status() -> None:
    listed = {name for row in rows(5) for name in row[0].split(", ")}
    for name in set(fasttfm.nn.__all__).intersection(dir(torch.nn)):
        for module in (getattr(torch.nn, name), getattr(fasttfm.nn, name)):
            for method in (module.__init__, module.forward):
                missing = set(inspect.signature(method).parameters) - {"self"} - listed
                assert not missing, f"{module.__module__}.{name}: {missing}"
    assert len(rows(5)) + len(rows(4)) == TABLES.count("\n| ") - 3
    statuses = {row[2] for row in rows(5)} | {row[1] for row in rows(4)}
    assert statuses == {"supported", "through reference", "different on purpose"}


def test_every_line_names_tests_that_exist() -> None:
    for row in [*rows(5), *rows(4)]:
        named = re.findall(r"(\w+)\.py::(\w+)", row[-1])
        assert named, row[0]
        for file, test in named:
            results = [p for p in TESTS.rglob(f"{file}.py") if f"def {test}(" in p.read_text(encoding="utf-8")]
            assert results, f"{row[0]}: there is no {file}.py::{test}"
