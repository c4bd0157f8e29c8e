"""The commands of docs/gpt.md go from a text file to a model, one after the other."""

import json
import shlex
from pathlib import Path

import pytest

from fasttfm.cli.main import main

from .blocks import blocks, run

PAGE = "gpt.md"
SMALL = "--max-update 4 --warmup-updates 1 --d-model 16 --heads 2 --d-ff 16 --layers 1 --workers 1 --threads 1"
SHORTER = {"prepare": ["--vocab-size", "300"], "train": shlex.split(SMALL), "generate": ["--tokens", "5"]}


def test_the_commands_of_the_first_half_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("".join(f"Once upon a time there were {n} mice.\n" for n in range(900)))
    Path("questions.json").write_text(blocks(PAGE, "json")[0])
    assert len(json.loads(blocks(PAGE, "json")[0])) == 3
    ran = []
    for line in "".join(blocks(PAGE, "")).splitlines():
        words = shlex.split(line)[1:]
        if "gpt2-folder" in line or "GPT2" in line:
            continue
        assert main([*words, *SHORTER.get(words[1], [])]) == 0, line
        ran.append(words[1])
    assert ran == ["prepare", "train", "evaluate", "generate", "prompt", "few-shot", "export"]
    told = capsys.readouterr().out
    assert "bits per byte" in told
    assert "of 3 right" in told
    assert (tmp_path / "MODEL" / "curve.png").stat().st_size > 1000


def test_its_python_runs(tmp_path, capsys):
    assert run("\n".join(blocks(PAGE)), tmp_path)["logits"].shape == (2, 16, 300)
    assert "tensor" in capsys.readouterr().out
