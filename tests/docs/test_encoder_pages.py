"""The commands of docs/bert.md, albert.md and electra.md go from a text file to pictures; their Python runs."""

import shlex
from pathlib import Path

import pytest

from fasttfm.cli.main import main

from .blocks import blocks, run

SMALL = (
    "--max-update 2 --warmup-updates 0 --d-model 16 --heads 2 --d-ff 16 --layers 2 --row-length 32 --max-tokens 512 "
    "--workers 1 --threads 1 --no-tensorboard"
)
SHORTER = {"prepare": ["--vocab-size", "300"], "train": shlex.split(SMALL), "attention": ["--layers", "1"]}


@pytest.mark.sample(1)
@pytest.mark.parametrize("page", ["bert.md", "albert.md", "electra.md"])
def test_the_commands_run_one_after_the_other(page, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    paragraphs = "\n".join(f"Once upon a time there were {n} mice.\nThey ran.\n" for n in range(200))
    Path("mine.txt").write_text(f"{paragraphs}\n")
    ran = []
    for line in [*blocks(page, "")[0].splitlines(), "fasttfm mlm export MODEL --out for-transformers"]:
        words = shlex.split(line)[1:]
        if words[0] == "finetune":
            continue
        assert main([*words, *SHORTER.get(words[1], [])]) == 0, line
        ran.append(words[1])
    assert ran == ["prepare", "train", "evaluate", "attention", "export"]
    for picture in ("MODEL/curve.png", "attention.png"):
        assert Path(picture).stat().st_size > 1000


@pytest.mark.parametrize("page", ["bert.md", "albert.md", "electra.md"])
def test_the_python_runs(page, tmp_path):
    assert run("\n".join(blocks(page)), tmp_path)["hidden"].shape == (2, 10, 32)
