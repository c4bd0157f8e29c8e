"""Walks through pages in an empty folder: replacing torch.nn, training, fine-tuning, training on WMT.

Blocks run in order as printed: commands in a shell, consecutive Python blocks as one file. Installs are skipped; `make
dist` runs README's, installs included. Of alternatives (comments that begin with "# or") the last one runs, which is
the small one on each page.
"""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import forked_children, write_programs

from fasttfm.data.demo import write_demo_corpus

from .blocks import DOCS, all_blocks

ROOT = DOCS.parent


def commands(block: str) -> list[str]:
    """Commands of a block without installs; of alternatives the last."""
    result: list[str] = []
    for line in block.replace("\\\n", " ").splitlines():
        command, _, comment = line.partition(" # ")
        if comment.startswith("or") and result:
            result.pop()
        if command.strip() and not command.startswith("pip install"):
            result.append(command.strip())
    return result


class Reader:
    """Runs the blocks of a page in an empty folder."""

    def __init__(self, folder: Path, *, forks: bool = True) -> None:
        """forks: programs and their children are forked from a process that has torch loaded."""
        (folder / "bin").mkdir()
        if forks:
            write_programs(folder / "bin")
        else:
            for name, call in (("fasttfm", "-m fasttfm"), ("python", "")):  # as in an activated environment
                script = folder / "bin" / name
                script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
                script.chmod(0o755)
        self.output, self.here = "", folder / "empty"
        self.here.mkdir()
        path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
        variables = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.environment = {**(forked_children() if forks else os.environ), **variables}
        self.environment.pop("TRITON_INTERPRET", None)

    def type(self, command: str) -> None:
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.here, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, f"{command}\n{done.stderr}"
        self.output += done.stdout

    def walk(self, blocks: list[tuple[str, str]]) -> None:
        for number, (language, group) in enumerate(itertools.groupby(blocks, key=lambda block: block[0])):
            code = "\n".join(block for _, block in group)
            if language == "python":
                (self.here / f"block{number}.py").write_text(code, encoding="utf-8")
                self.type(f"python block{number}.py")
            elif not language:
                for command in commands(code):
                    self.type(command)


@pytest.fixture
def reader(tmp_path):
    return Reader(tmp_path)


@pytest.mark.slow
def test_replace_torch_nn(reader):
    pytest.importorskip("transformers")
    reader.walk(all_blocks("replace-torch-nn.md"))
    assert "FusedBertOutput" in reader.output


@pytest.mark.slow
def test_from_text_to_bleu(reader):
    pytest.importorskip("matplotlib")
    reader.walk(all_blocks("tutorial.md"))
    assert "BLEU" in reader.output
    assert (reader.here / "attention.png").stat().st_size > 1000


SMALL = "--d-model 16 --heads 2 --d-ff 32 --encoder-layers 1 --decoder-layers 1 --max-tokens 512 --max-update 3"
CPU = "--device cpu --workers 1"
QUICK = {"train": f"{CPU} --max-update 2", "translate": CPU}


@pytest.mark.whole
def test_fine_tuning(reader):
    write_demo_corpus(reader.here / "demo")
    for name, split, count in (("old", "train", 300), ("new", "train", 100), ("dev", "valid", 8), ("test", "test", 5)):
        for language in ("en", "de"):
            reader.type(f"head -n {count} demo/{split}.{language} > {name}.{language}")
    reader.type("rm -r demo")
    old = "--src old.en --tgt old.de --valid-src dev.en --valid-tgt dev.de --vocab-size 400 --out OLD"
    reader.type(f"fasttfm prepare {old} && fasttfm train --data OLD --out MODEL {SMALL} {CPU} --no-tensorboard")
    page = (DOCS / "how-to-fine-tune.md").read_text(encoding="utf-8")
    found = re.findall(r"^ +fasttfm (\w+) (.*)$", page, re.MULTILINE)
    assert [verb for verb, _ in found] == ["prepare", "train", "translate", "translate", "score"]
    for verb, words in found:
        reader.type(f"fasttfm {verb} {QUICK.get(verb, '')} {words}")
    models = [(reader.here / folder / "spm.model").read_bytes() for folder in ("DATA", "MODEL")]
    assert models[0] == models[1]
    assert " -> " in reader.output  # before and after


@pytest.mark.whole
@pytest.mark.slow
def test_training_on_wmt(tmp_path):
    reader = Reader(tmp_path, forks=False)
    blocks = all_blocks("recipes.md", end="## Hours and money")
    assert commands(blocks[0][1])[0].startswith("fasttfm recipe paper-base-en-de --dry-run --train")
    reader.walk(blocks)
    assert "BLEU" in reader.output
