"""What the README says can be typed works as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fasttfm.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_a_python_block_runs(block):
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("line", re.findall(r"^fasttfm .*$", README, re.MULTILINE))
def test_a_command_line_is_understood(line, capsys):
    words = shlex.split(line.split("<")[0])[1:]
    with pytest.raises(SystemExit) as stop:  # --help parses everything before it
        raise SystemExit(main.main([*words, "--help"]))
    assert stop.value.code == 0
    assert words[0] in capsys.readouterr().out


def test_every_file_that_readme_and_contributing_name_exists():
    text = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:fasttfm|kernels|tests|benchmarks|docs|scripts)/[\w./-]+\.\w+)`", text))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_preset_is_in_the_table():
    presets = {file.stem for file in (ROOT / "fasttfm" / "presets").glob("*.yaml")}
    assert {name for name in presets if f"`{name}`" not in README} == set()
