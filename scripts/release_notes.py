"""Prints the section of a release in CHANGELOG.md. Usage: scripts/release_notes.py vX.Y.Z

The exit status is 1 if the tag is not the package's version, or the version has no section.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(version: str, changelog: str) -> str:
    """Text between a version's heading and the next. Raises SystemExit without such a heading."""
    section = re.search(rf"^## {re.escape(version)}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None:
        raise SystemExit(f"CHANGELOG.md has no section {version}: write it before tagging")
    return section[1].strip()


if __name__ == "__main__":
    tag = sys.argv[1]
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "fasttfm" / "__init__.py").read_text(), re.MULTILINE)[1]
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag}, but fasttfm.__version__ is {version}: the tag must be v{version}")
    print(notes(version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))
