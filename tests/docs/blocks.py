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


def make_edits(page: str, root: Path) -> int:
    """Make the new files and edits of a page in a copy of the tree; return how many there are.

    The last path in the words before a block names its file; a diff has lines that are there once, and `@@` between
    the places of a file.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    made = 0
    for words, language, block in re.findall(r"(.*?)^```(\w*)\n(.*?)^```\n", text, re.DOTALL | re.MULTILINE):
        named = re.findall(r"`((?:fasttfm|pretraining)/[\w/.-]+\.(?:py|yaml))`", words)
        if language == "diff":
            for edit in block.split("@@\n"):
                lines = edit.splitlines(keepends=True)
                replace(root / named[-1], "".join(line[1:] for line in lines if line[0] == " "), lines)
                made += 1
        elif re.search("new file,", words, re.IGNORECASE):
            (root / named[-1]).parent.mkdir(parents=True, exist_ok=True)
            (root / named[-1]).write_text(block, encoding="utf-8")
            made += 1
    return made


def replace(file: Path, before: str, lines: list[str]) -> None:
    """Put the lines of a diff in the place of what is there once in a file."""
    text = file.read_text(encoding="utf-8")
    assert text.count(before) == 1, (file, before)
    file.write_text(text.replace(before, "".join(line[1:] for line in lines)), encoding="utf-8")
