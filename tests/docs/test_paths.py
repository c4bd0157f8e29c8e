"""Readers follow a page by its words alone, in an empty folder: one replaces torch.nn, one trains, one trains on WMT.

A block runs in its turn as it is printed: commands by a shell, each stretch of Python as one file. Nothing is
installed: `make dist` types README's words, installs included. Of lines that are alternatives ("# or" begins
the comment of the later ones) the last runs, which each page makes the small one.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import forked_children, write_programs

ROOT = Path(__file__).parents[2]
INSTALL = "pip install"


def stretches(page: str, end: str | None = None) -> list[tuple[str, str]]:
    """The page's blocks in order up to the heading `end`, as (language, text); neighbours in Python are one."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    text = text[: text.index(f"\n{end}\n")] if end else text
    result: list[tuple[str, str]] = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language == "python" and result and result[-1][0] == "python":
            result[-1] = language, f"{result[-1][1]}\n{block}"
        else:
            result.append((language, block))
    return result


def commands(block: str) -> list[str]:
    """The lines of a block of commands, without what only installs; the last of alternatives."""
    result: list[str] = []
    for line in block.replace("\\\n", " ").splitlines():
        command, _, comment = line.partition(" # ")
        if comment.startswith("or") and result:
            result.pop()
        if command.strip() and not command.startswith(INSTALL):
            result.append(command.strip())
    return result


class Reader:
    """Types what a page shows, in a folder that was empty."""

    def __init__(self, folder: Path, *, forks: bool = True) -> None:
        """forks: programs are forked from a process that has torch loaded, and so is what they start."""
        self.folder, self.said = folder, ""
        (folder / "bin").mkdir()
        if forks:
            write_programs(folder / "bin")
        else:
            for name, call in (("fasttfm", "-m fasttfm"), ("python", "")):  # as an activated environment has them
                script = folder / "bin" / name
                script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
                script.chmod(0o755)
        (folder / "empty").mkdir()
        self.here = folder / "empty"
        path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
        self.environment = {
            **(forked_children() if forks else os.environ),
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        self.environment.pop("TRITON_INTERPRET", None)  # a reader has not heard of it

    def type(self, command: str) -> None:
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.here, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, f"{command}\n{done.stderr}"
        self.said += done.stdout

    def walk(self, blocks: list[tuple[str, str]]) -> None:
        for number, (language, block) in enumerate(blocks):
            if language == "python":
                (self.here / f"block{number}.py").write_text(block, encoding="utf-8")
                self.type(f"python block{number}.py")
            elif not language:
                for command in commands(block):
                    self.type(command)


@pytest.fixture
def reader(tmp_path):
    return Reader(tmp_path)


@pytest.mark.slow
def test_a_reader_replaces_torch_nn(reader):
    pytest.importorskip("transformers")
    blocks = stretches("replace-torch-nn.md")
    assert [language for language, _ in blocks] == ["", "python"]
    assert blocks[1][1].count("import") >= 4
    reader.walk(blocks)
    assert "FusedBertOutput" in reader.said


@pytest.mark.slow
def test_a_reader_goes_from_text_to_bleu(reader):
    pytest.importorskip("matplotlib")
    reader.walk(stretches("tutorial.md"))
    assert "BLEU" in reader.said
    assert (reader.here / "attention.png").stat().st_size > 1000


@pytest.mark.whole
@pytest.mark.slow
def test_a_reader_trains_on_wmt(tmp_path):
    reader = Reader(tmp_path, forks=False)
    blocks = stretches("recipes.md", end="## Hours and money")
    assert commands(blocks[0][1])[0].startswith("fasttfm recipe paper-base-en-de --dry-run --train")
    reader.walk(blocks)
    assert "BLEU" in reader.said


def test_outside_of_a_clone_python_says_in_a_line_that_there_are_no_benchmarks(tmp_path):
    """What docs/benchmarks.md says of it."""
    command = [sys.executable, "-I", "-m", "benchmarks"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert re.fullmatch(r".*: No module named benchmarks\n", done.stderr)
    assert "`No module named benchmarks`" in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
