"""Rules for every documentation page: GPU status, figures from records, defined names, widths."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .blocks import blocks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@EVERY_PAGE
def test_a_page_that_mentions_cuda_says_which_devices_have_run_the_kernels(page):
    text = page.read_text(encoding="utf-8")
    if re.search("cuda|rocm", text, re.IGNORECASE):
        status = "an H100 has run (these kernels|them)|No other device has run these kernels"
        assert re.search(status, text, re.IGNORECASE)


@EVERY_PAGE
def test_the_python_of_a_page_has_no_undefined_name(page):
    pytest.importorskip("ruff")
    code = "\n".join(blocks(page))
    if code:
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F823", "-"]
        done = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


GENERATED = re.compile(r"<!-- (?!end|the end)[^>]*-->.*?<!-- (?:the )?end.*?-->", re.DOTALL)
FIGURE = re.compile(
    r"\d[\d.,]* ?(?:[mnuµ]s|microseconds|milliseconds|BLEU|(?:tokens|sentences|requests)/s|[GT]B/s|TFLOP/s)\b"
    r"|\d[\d.,]* (?:tokens|sentences|requests) a second|\bBLEU (?:of )?\d"
    r"|\b\d[\d.]* times (?:as|the time)\b|\b\d+\.\d+ ?x\b"
)


PREDICTIONS = "gpu-predictions.md"
"""Page whose paragraphs and tables may have figures that they call predicted."""


def measured_figures(text: str, *, predictions: bool = False) -> list[str]:
    """Lines with times, rates, scores or ratios, except generated blocks and lines with a link (others' figures)."""
    parts = re.split(r"\n\s*\n", re.sub(r"`[^`\n]*`", "", GENERATED.sub("", text)))
    if predictions:
        parts = [part for part in parts if not re.search("predict", part, re.IGNORECASE)]
    return [line for part in parts for line in part.splitlines() if FIGURE.search(line) and "](http" not in line]


@EVERY_PAGE
def test_all_measured_figures_are_generated_from_records(page):
    """The whole report is generated (tests/benchmarks/test_readme_table.py)."""
    if page.parent.name != "benchmark-report":
        text = page.read_text(encoding="utf-8")
        assert measured_figures(text, predictions=page.name == PREDICTIONS) == []


@pytest.mark.parametrize(
    "figure",
    ["45 ms", "47 µs", "38.6 BLEU", "BLEU of 39", "7,255 tokens/s", "9 tokens a second", "1.98x", "1.4 times as long"],
)
def test_a_measured_figure_is_noticed(figure):
    text = f"<!-- table: a command -->\n1 ms\n<!-- end -->\n\nPredicted: 3 ms.\n\nOurs: {figure}.\n"
    assert measured_figures(text, predictions=True) == [f"Ours: {figure}."]
    assert len(measured_figures(text)) == 2


LONGEST_LINE = 120
"""Characters of code that fit in a line at 1280 pixels with docs/stylesheets/tables.css."""
PIXELS, A_CHARACTER, A_CELL = 872, 6.3, 14.4
"""Width of a table, a character and a cell's padding there, in pixels."""
SMALL, MOST_COLUMNS = 12, 19
"""Tables with more columns than SMALL have smaller type and break words anywhere."""


@EVERY_PAGE
def test_a_line_of_code_fits_the_site(page):
    code = re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert [line for block in code for line in block.splitlines() if len(line) > LONGEST_LINE] == []


def least_width(table: str) -> float:
    """Minimum width of a table in pixels, from its longest unbreakable words."""
    lines = [line for line in table.splitlines() if not re.match(r"\|[-:| ]+\|$", line)]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    width = 0.0
    for number, cells in enumerate(zip(*rows, strict=True)):
        words = [word for cell in cells for word in re.sub(r"`[^`]*`|\]\([^)]*\)|<br>|[*\[]", " ", cell).split()]
        longest = 0 if number == len(rows[0]) - 1 else max(map(len, words), default=0)
        width += max(52.0, longest * A_CHARACTER + A_CELL)
    return width


@EVERY_PAGE
def test_a_table_fits_the_site(page):
    for table in re.findall(r"(?:^\|.*\|\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        columns = len(re.split(r"(?<!\\)\|", table.splitlines()[0])) - 2
        assert columns <= MOST_COLUMNS, table.splitlines()[0]
        if columns <= SMALL:
            assert least_width(table) <= PIXELS, table.splitlines()[0]


def test_a_wide_table_is_noticed():
    assert least_width("| a | b |\n|---|---|\n| " + "x" * 150 + " | b |\n") > PIXELS
    assert least_width("| a | b |\n|---|---|\n| " + "x " * 150 + "| `" + "b" * 150 + "` |\n") < PIXELS
