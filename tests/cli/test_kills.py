"""Commands that write, with SIGKILL before any of their system calls, and on a full disk."""

import ast
import errno
import io
import os
import sys
from pathlib import Path

import pytest
from forked import run
from full_disk import largest_file
from killed import environment
from kills import WRITERS
from model_dirs import LINES, write_model_dir
from waiting import PATIENCE

from fasttfm.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", WRITERS)
def test_after_a_kill_the_output_is_old_new_or_refused_and_a_rerun_succeeds(name, tmp_path):
    """Runs tests/cli/kills.py."""
    command = [sys.executable, str(Path(__file__).with_name("kills.py")), str(tmp_path), name]
    done = run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    found = ast.literal_eval(done.stdout)
    assert found["new"] >= 1
    assert found["old"] >= 4


COMMANDS = {
    "quantize": "quantize M --out out",
    "export": "export M --format pretrained --out out",
    "prepare": "prepare --src t --tgt t --valid-src t --valid-tgt t --no-byte-fallback --threads 1 --vocab-size 60 "
    "--out out",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("size", [0, 300, 4000])
def test_a_full_disk_leaves_nothing_half_made(name, size, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write_model_dir(Path("M"), trained=False)
    Path("t").write_text("".join(f"{line}\n" for line in LINES) * 30)
    capfd.readouterr()
    monkeypatch.setattr(sys, "stdout", open(os.devnull, "w"))  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", (tmp_path / "errors").open("w"))
    with largest_file(size):
        assert main(COMMANDS[name].split()) == 2
    assert not Path("out").exists()
    assert main(COMMANDS[name].split()) == 0


def test_a_full_disk_is_reported_with_the_file(tmp_path, monkeypatch, capfd):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(tmp_path)
    write_model_dir(Path("M"), trained=False)
    Path("alignment").write_text("old")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a dog\n")))
    capfd.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main(["translate", "M", "--device", "cpu", "--max-len-b", "3", "--alignment", "alignment"]) == 2
    assert "fasttfm translate: alignment: No space left on device: free some space" in capfd.readouterr().err
    assert Path("alignment").read_text() == "old"
