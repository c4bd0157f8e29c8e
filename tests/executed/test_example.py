"""The example that docs/ptx.md shows finds what was planted, and nothing else."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_names_the_race_and_the_lines(capsys):
    runpy.run_path(str(ROOT / "examples/check_your_kernel.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert printed.startswith("programs: global memory (32 bytes)")
    assert "check_your_kernel.py:21" in printed
    assert "check_your_kernel.py:19" in printed


def test_the_page_shows_what_the_example_prints(capsys):
    runpy.run_path(str(ROOT / "examples/check_your_kernel.py"), run_name="__main__")
    kinds = capsys.readouterr().out.split(" at byte")[0]
    assert kinds in (ROOT / "docs/ptx.md").read_text()
