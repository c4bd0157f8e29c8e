"""Code blocks of documentation pages: reads, runs and applies them."""

import re
import runpy
from pathlib import Path
from typing import Any

import torch

DOCS = Path(__file__).parents[2] / "docs"


def all_blocks(page: str | Path) -> list[tuple[str, str]]:
    """(language, code) of a page's blocks; page: below docs/, or a path."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def blocks(page: str | Path, language: str = "python") -> list[str]:
    """Code of a page's blocks in one language, "" for commands."""
    return [code for name, code in all_blocks(page) if name == language]


def run(code: str, folder: Path) -> dict[str, Any]:
    """Run code from a file, because Triton reads kernels from one, and return its global names."""
    (folder / "page.py").write_text(code, encoding="utf-8")
    torch.manual_seed(0)
    return runpy.run_path(str(folder / "page.py"))


def make_edits(page: str, root: Path) -> int:
    """Apply a page's new files and edits to a copy of the tree; return their number.

    The last path before a block names its file. The context of a diff occurs once in the file; `@@` separates hunks.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    edits = 0
    for words, language, block in re.findall(r"(.*?)^```(\w*)\n(.*?)^```\n", text, re.DOTALL | re.MULTILINE):
        names = re.findall(r"`((?:fasttfm|pretraining)/[\w/.-]+\.(?:py|yaml))`", words)
        if language == "diff":
            file = root / names[-1]
            for hunk in block.split("@@\n"):
                lines, source = hunk.splitlines(keepends=True), file.read_text(encoding="utf-8")
                before, after = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" ", " +"))
                assert source.count(before) == 1, (file, before)
                file.write_text(source.replace(before, after), encoding="utf-8")
                edits += 1
        elif re.search("new file,", words, re.IGNORECASE):
            (root / names[-1]).parent.mkdir(parents=True, exist_ok=True)
            (root / names[-1]).write_text(block, encoding="utf-8")
            edits += 1
    return edits
