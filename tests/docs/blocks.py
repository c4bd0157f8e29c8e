"""What pages of the documentation hold."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str | Path, kind: str = "python") -> list[str]:
    """The blocks of a page's code that are of a kind, "" for commands; page: below docs/, or any."""
    text = (DOCS / page).read_text(encoding="utf-8")
    written = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in written if name == kind]
