"""CONTRIBUTING.md: a newcomer's hour is short, and its ten answers are right."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LINES = 2000


def test_the_newcomers_hour_has_fewer_than_2000_lines():
    hour = TEXT[TEXT.index("### A newcomer's hour") : TEXT.index("## Rings of proof")]
    files = re.findall(r"^\d\. `([^`]+)`", hour, re.MULTILINE)
    assert len(files) == 7
    assert sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in files) < LINES
    named = re.findall(r"`((?:fasttfm|kernels|tests)/[\w/]+\.py)`", hour)
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_answers_to_the_ten_questions_exist():
    rows = re.findall(r"^\| [^|]+\? \| `([^`]+)`: `(\w+)` \| `([^`]+)` \|$", TEXT, re.MULTILINE)
    assert len(rows) == 10
    for file, name, test in rows:
        assert re.search(rf"^(?:def|class) {name}\b", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), name
        assert (ROOT / test).is_file(), test
