"""What every page of the documentation keeps to: the status of GPUs, and Python that imports what it uses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_that_mentions_cuda_says_that_no_gpu_has_run_the_kernels(page):
    text = page.read_text(encoding="utf-8")
    if re.search("cuda|rocm", text, re.IGNORECASE):
        assert re.search("no GPU has run (these kernels|them)", text, re.IGNORECASE), "a line with the status"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_uses_no_name_that_the_page_does_not_give(page):
    """Read from the top: ruff finds names that no block before has imported or defined."""
    pytest.importorskip("ruff")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
    if code:
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F823", "-"]
        done = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
