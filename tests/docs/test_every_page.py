"""Rules for every documentation page: GPU status, figures from records, defined names, widths; CONTRIBUTING's hour."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .blocks import blocks

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
}


def test_a_page_that_mentions_cuda_says_which_devices_have_run_the_kernels():
    status = re.compile("an H100 has run (these kernels|them)|No other device has run these kernels", re.IGNORECASE)
    of_gpus = {name: text for name, text in PAGES.items() if re.search("cuda|rocm", text, re.IGNORECASE)}
    assert [name for name, text in of_gpus.items() if not status.search(text)] == []


def test_the_python_of_a_page_has_no_undefined_name(tmp_path):
    pytest.importorskip("ruff")
    for name in PAGES:
        (tmp_path / f"{name.replace('/', '-')}.py").write_text("\n".join(blocks(ROOT / name)), encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F823", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


GENERATED = re.compile(r"<!-- (?!end|the end)[^>]*-->.*?<!-- (?:the )?end.*?-->", re.DOTALL)
FIGURE = re.compile(
    r"\d[\d.,]* ?(?:[mnuµ]s|microseconds|milliseconds|BLEU|(?:tokens|sentences|requests)/s|[GT]B/s|TFLOP/s)\b"
    r"|\d[\d.,]* (?:tokens|sentences|requests) a second|\bBLEU (?:of )?\d"
    r"|\b\d[\d.]* times (?:as|the time)\b|\b\d+\.\d+ ?x\b"
)


def measured_figures(text: str, *, predictions: bool = False) -> list[str]:
    """Lines with times, rates, scores or ratios, except generated blocks and lines with a link (others' figures).

    predictions: paragraphs and tables may have figures that they call predicted.
    """
    parts = re.split(r"\n\s*\n", re.sub(r"`[^`\n]*`", "", GENERATED.sub("", text)))
    if predictions:
        parts = [part for part in parts if not re.search("predict", part, re.IGNORECASE)]
    return [line for part in parts for line in part.splitlines() if FIGURE.search(line) and "](http" not in line]


def test_all_measured_figures_are_generated_from_records():
    """The whole report is generated (tests/benchmarks/test_report.py)."""
    written = {name: text for name, text in PAGES.items() if "/benchmark-report/" not in name}
    found = {name: measured_figures(text, predictions="predictions" in name) for name, text in written.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_newcomers_hour_has_fewer_than_2000_lines_and_its_ten_answers_exist():
    text = PAGES["CONTRIBUTING.md"]
    hour = text[text.index("### A newcomer's hour") : text.index("## Rings of proof")]
    files = re.findall(r"^\d\. `([^`]+)`", hour, re.MULTILINE)
    assert len(files) == 7
    assert sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in files) < 2000
    rows = re.findall(r"^\| [^|]+\? \| `([^`]+)`: `(\w+)` \| `([^`]+)` \|$", text, re.MULTILINE)
    assert len(rows) == 10
    for file, name, _ in rows:
        assert re.search(rf"^(?:def|class) {name}\b", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), name
    named = re.findall(r"`((?:fasttfm|kernels|tests)/[\w/]+\.py)`", hour) + [test for _, _, test in rows]
    assert [name for name in named if not (ROOT / name).is_file()] == []
