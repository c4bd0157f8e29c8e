"""docs/gpt.md, bert.md, albert.md and electra.md: their commands and their Python run."""

import shlex
from pathlib import Path

import pytest

from fasttfm.cli.main import main

from .blocks import blocks, run

SMALL = "--max-update 2 --warmup-updates 0 --d-model 16 --heads 2 --d-ff 16 --layers 2 --workers 1 --threads 1"
SHORTER = {
    "prepare": ["--vocab-size", "300"],
    "train": [*SMALL.split(), "--no-tensorboard"],
    "attention": ["--layers", "1"],
    "generate": ["--tokens", "5"],
}
ROWS = ["--row-length", "32", "--max-tokens", "512"]
ENCODER = ["prepare", "train", "evaluate", "attention", "export"]
VERBS = {
    "gpt.md": ["prepare", "train", "evaluate", "generate", "prompt", "few-shot", "export"],
    **dict.fromkeys(("bert.md", "albert.md", "electra.md"), ENCODER),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("page", VERBS)
def test_the_commands_run_in_order(page, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("".join(f"Once upon a time there were {n} mice.\nThey ran.\n\n" for n in range(300)))
    for questions in blocks(page, "json")[:1]:
        Path("questions.json").write_text(questions)
    lines = (
        blocks(page, "")
        if page == "gpt.md"
        else [blocks(page, "")[0], "fasttfm mlm export MODEL --out for-transformers"]
    )
    ran = []
    for line in "\n".join(lines).splitlines():
        words = shlex.split(line)[1:]
        if not words or words[0] == "finetune" or "gpt2-folder" in line or "GPT2" in line:
            continue
        more = ROWS if words[:2] == ["mlm", "train"] else []
        assert main([*words, *SHORTER.get(words[1], []), *more]) == 0, line
        ran.append(words[1])
    assert ran == VERBS[page]
    assert Path("MODEL/curve.png").stat().st_size > 1000
    told = capsys.readouterr().out
    assert (
        ("bits per byte" in told and "of 3 right" in told)
        if page == "gpt.md"
        else Path("attention.png").stat().st_size > 1000
    )


@pytest.mark.parametrize("page", VERBS)
def test_the_python_runs(page, tmp_path):
    names = run("\n".join(blocks(page)), tmp_path)
    assert (names["logits"].shape == (2, 16, 300)) if page == "gpt.md" else (names["hidden"].shape == (2, 10, 32))
