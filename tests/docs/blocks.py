"""What pages of the documentation hold, and what their Python leaves."""

import re
import runpy
from pathlib import Path
from typing import Any

import torch

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str | Path, kind: str = "python") -> list[str]:
    """The blocks of a page's code that are of a kind, "" for commands; page: below docs/, or any."""
    text = (DOCS / page).read_text(encoding="utf-8")
    written = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in written if name == kind]


def run(code: str, folder: Path) -> dict[str, Any]:
    """Run code from a file, because Triton reads a kernel's source from one; return the names that it leaves."""
    (folder / "page.py").write_text(code, encoding="utf-8")
    torch.manual_seed(0)
    return runpy.run_path(str(folder / "page.py"))
