"""One process at a time writes checkpoints into a directory; leftovers of a killed one are removed."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from fasttfm.errors import UserError
from fasttfm.store.checkpoint import save_checkpoint
from fasttfm.store.ownership import recover
from fasttfm.store.steps import step_folder
from fasttfm.system.locks import locked

pytest.importorskip("fcntl")

WRITE = """
import sys
from pathlib import Path
from fasttfm.store.ownership import publishing
with publishing(Path(sys.argv[1]) / "step-000000007"):
    print("begun", flush=True)
    sys.stdin.read()
"""


def test_a_writer_is_waited_for_and_its_leftovers_are_removed_after_a_kill(tmp_path):
    command = [sys.executable, "-c", WRITE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "begun\n"
        tidy = "import sys; from pathlib import Path; from fasttfm.store.ownership import recover; "
        tidy += "print(1, flush=True); recover(Path(sys.argv[1]))"
        with subprocess.Popen([sys.executable, "-c", tidy, str(tmp_path)], stdout=subprocess.PIPE) as other:
            other.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(0.3)
            assert os.listdir(tmp_path) == [".writing-step-000000007"]
            writer.send_signal(signal.SIGKILL)
            assert other.wait() == 0
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch):
    import fcntl

    def missing(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", missing)
    with pytest.raises(UserError, match=r"its file system has no locks \(No locks available\)"), locked(tmp_path):
        pass
    save_checkpoint(step_folder(tmp_path, 1), {"weight": torch.zeros(2)}, {})


def test_an_interrupted_deletion_is_completed(tmp_path):
    (tmp_path / ".deleting-step-000000003-1").mkdir()
    recover(tmp_path)
    assert os.listdir(tmp_path) == []
