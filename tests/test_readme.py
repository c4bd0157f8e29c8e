"""What the README says can be typed works as it stands there."""

import importlib.util
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


def commands() -> list[str]:
    """Every command that README, CONTRIBUTING and docs/ show, in blocks and in lines of text."""
    results: dict[str, None] = {}
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
        lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
        for line in [*lines, *re.findall(r"`([^`\n]+)`", text)]:
            command = re.split(r"\s{2,}|\s#|\s[<>|]\s", line.strip().replace("\\|", "|"))[0]
            command = re.sub(r"^[A-Z_]+=\S+ ", "", command).removeprefix(".venv/bin/")
            if re.match(r"(fasttfm [a-z]|python -m (?!pip|pytest|venv))", command):
                command, _, training = command.partition(" --train ")  # which a recipe hands on
                results[command.replace("...", "").strip()] = None
                if training:
                    results[f"fasttfm train {training}"] = None
    return list(results)


@pytest.mark.parametrize("command", commands())
def test_a_command_line_is_understood(command, capsys):
    words = shlex.split(command)
    if words[0] == "fasttfm":
        program, words = main.main, words[1:]
    else:
        name, words = words[2], words[3:]
        package = importlib.util.find_spec(name)
        assert package is not None, f"there is no module {name}"
        name = f"{name}.__main__" if package.submodule_search_locations else name
        program = importlib.import_module(name).main
    with pytest.raises(SystemExit) as stop:  # --help parses everything before it
        raise SystemExit(program([*words, "--help"]))
    assert stop.value.code == 0, capsys.readouterr().err
    assert "usage" in capsys.readouterr().out


def test_every_file_that_readme_and_contributing_name_exists():
    text = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:fasttfm|kernels|tests|benchmarks|docs|scripts)/[\w./-]+\.\w+)`", text))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_preset_is_in_the_table():
    presets = {file.stem for file in (ROOT / "fasttfm" / "config" / "presets").glob("*.yaml")}
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert presets
    assert {name for name in presets if f"`{name}`" not in page} == set()


def test_readme_is_short():
    assert README.count("\n") <= 120
    assert len(re.search(r"<!-- measured: .*?\n(.*?)<!-- end", README, re.DOTALL)[1].splitlines()) <= 15
