"""docs/replace-torch-nn.md: its Python blocks run, and its table has every argument."""

import inspect
import re
from pathlib import Path

import torch

import fasttfm.nn

PAGE = (Path(__file__).parents[2] / "docs" / "replace-torch-nn.md").read_text(encoding="utf-8")


def test_the_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/replace-torch-nn.md", "exec"), names)


def test_every_argument_of_torch_has_its_line_and_a_status() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("|")]
    listed = {name for row in rows for name in row[0].split(", ")}
    for name in fasttfm.nn.__all__:
        theirs = getattr(torch.nn, name, None)
        if theirs is None:
            continue
        for module in (theirs, getattr(fasttfm.nn, name)):
            for method in (module.__init__, module.forward):
                missing = set(inspect.signature(method).parameters) - {"self"} - listed
                assert not missing, f"{module.__module__}.{name}: {missing}"
    statuses = {row[-2] for row in rows} - {"status", "---"}
    assert statuses == {"supported", "through reference", "different on purpose"}
