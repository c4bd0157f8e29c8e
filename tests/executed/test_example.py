"""The examples in docs/ptx.md find the planted faults and nothing else."""

import re
import runpy
from pathlib import Path

import pytest

from ptx_check import FaultyKernel

ROOT = Path(__file__).parents[2]


def test_the_example_names_the_race_and_the_lines(capsys):
    runpy.run_path(str(ROOT / "examples/check_your_kernel.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert printed.startswith("programs: global memory (32 bytes)")
    assert "check_your_kernel.py:21" in printed
    assert "check_your_kernel.py:19" in printed
    assert printed.split(" at byte")[0] in (ROOT / "docs/ptx.md").read_text()


def test_the_code_of_the_page_runs_verbatim(tmp_path):
    page = (ROOT / "docs/ptx.md").read_text()
    file = tmp_path / "mine.py"
    file.write_text(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0])
    with pytest.raises(FaultyKernel, match=r"programs: .* at neighbours, PTX line \d+, mine\.py:12") as raised:
        runpy.run_path(str(file))
    assert len(raised.value.faults) == 1
