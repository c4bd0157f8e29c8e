"""docs/how-to-fine-tune.md: its commands run in order on a small model."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from forked import run

from fasttfm.cli.main import main
from fasttfm.data.demo import write_demo_corpus
from fasttfm.system.children import command_line

PAGE = Path(__file__).parents[2] / "docs" / "how-to-fine-tune.md"
SMALL = "--d-model 16 --heads 2 --d-ff 32 --encoder-layers 1 --decoder-layers 1 --max-tokens 512 --max-update 3"


@pytest.mark.whole
def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_demo_corpus(tmp_path / "demo")
    for name, split, count in (("old", "train", 300), ("new", "train", 100), ("dev", "valid", 8), ("test", "test", 5)):
        for language in ("en", "de"):
            lines = (tmp_path / "demo" / f"{split}.{language}").read_text().splitlines()
            (tmp_path / f"{name}.{language}").write_text("\n".join(lines[:count]) + "\n")
    shutil.rmtree(tmp_path / "demo")
    old = "--src old.en --tgt old.de --valid-src dev.en --valid-tgt dev.de --vocab-size 400 --out OLD"
    assert main(["prepare", *old.split()]) == 0
    assert main(f"train --data OLD --out MODEL {SMALL} --device cpu --workers 1 --no-tensorboard".split()) == 0
    commands = re.findall(r"^ +fasttfm (.*)$", PAGE.read_text(encoding="utf-8"), re.M)
    assert [line.split()[0] for line in commands] == ["prepare", "train", "translate", "translate", "score"]
    for line in commands:
        words, _, write = line.partition(" > ")
        words, _, read = words.partition(" < ")
        more = ["--device", "cpu", "--workers", "1"] if words.split()[0] in ("train", "translate") else []
        more += ["--max-update", "2"] if words.split()[0] == "train" else []
        text = Path(read).read_bytes() if read else b""
        done = run(command_line(*shlex.split(words), *more), input=text, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        if write:
            Path(write).write_bytes(done.stdout)
    assert (tmp_path / "DATA" / "spm.model").read_bytes() == (tmp_path / "MODEL" / "spm.model").read_bytes()
    assert b" -> " in done.stdout  # before and after
