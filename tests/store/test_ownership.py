"""Unfinished checkpoints of others, wherever they run, are left alone; what a dead owner left goes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch
from waiting import wait_until

from fasttfm.errors import UserError
from fasttfm.store.checkpoint import save_checkpoint
from fasttfm.store.ownership import claimed, published, recover
from fasttfm.store.steps import step_folder
from fasttfm.system.locks import locked

pytest.importorskip("fcntl")

A_DAY = 25 * 3600


def unfinished(folder, name, owner=None, age=0):
    """Somebody's unfinished checkpoint, changed `age` seconds ago."""
    path = folder / f".writing-{name}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"half")
    if owner is not None:
        (path / ".owner").write_text(owner)
    for each in (*path.iterdir(), path):
        os.utime(each, (time.time() - age, time.time() - age))
    return path


@pytest.mark.parametrize("owner", [None, "", "\xff", "another"])
def test_unfinished_work_of_another_kernel_or_of_no_named_owner_is_left_alone_for_a_day(tmp_path, owner):
    young = unfinished(tmp_path, "young", owner)
    old = unfinished(tmp_path, "old", owner, A_DAY)
    recover(tmp_path)
    assert (young / "model.safetensors").read_bytes() == b"half"
    assert not old.exists()


CLAIM = """
import sys
from pathlib import Path
from fasttfm.store.ownership import claimed
with claimed(Path(sys.argv[1]), "step-000000007"):
    print("claimed", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    "namespace", [[], ["unshare", "--pid", "--fork", "--kill-child"]], ids=["process", "container"]
)
def test_the_lock_tells_whether_an_owner_lives_whatever_its_process_number(tmp_path, namespace):
    if namespace and subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no process namespace may be made here")
    command = [*namespace, sys.executable, "-c", CLAIM, str(tmp_path)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "claimed\n"
    (path,) = tmp_path.glob(".writing-*")
    for each in (path, *path.iterdir()):
        os.utime(each, (1, 1))  # a long time for a large model on a slow disk
    save_checkpoint(tmp_path / "average", {"weight": torch.zeros(2)}, {})
    assert path.is_dir()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    wait_until(lambda: recover(tmp_path) or not path.exists())  # a namespace takes a moment to end


def test_what_is_claimed_is_deleted_unless_it_was_published(tmp_path):
    with suppress(KeyboardInterrupt), claimed(tmp_path, "one") as path:
        (path / "file").touch()
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    with claimed(tmp_path, "two") as path:
        (path / "file").touch()
        published(path, tmp_path / "two")
    assert os.listdir(tmp_path) == ["two"]
    assert os.listdir(tmp_path / "two") == ["file"]


def test_another_process_that_tidies_up_between_two_renames_waits(tmp_path, monkeypatch):
    """Without the lock it would put the replaced directory back, and the second rename would fail."""
    save_checkpoint(tmp_path / "average", {"weight": torch.zeros(2)}, {})
    tidy = "import sys; from pathlib import Path; from fasttfm.store.ownership import recover; "
    tidy += "print(1, flush=True); recover(Path(sys.argv[1]))"
    other, replace = [], os.replace

    def interleaved(source, target):
        replace(source, target)
        if "replaced" in str(target):
            other.append(subprocess.Popen([sys.executable, "-c", tidy, str(tmp_path)], stdout=subprocess.PIPE))
            other[0].stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                other[0].wait(0.3)

    monkeypatch.setattr(os, "replace", interleaved)
    save_checkpoint(tmp_path / "average", {"weight": torch.ones(2)}, {})
    assert other[0].wait() == 0
    other[0].stdout.close()
    assert os.listdir(tmp_path) == ["average"]


def test_half_a_deletion_is_finished_at_once(tmp_path):
    (tmp_path / ".deleting-step-000000003-1").mkdir()
    save_checkpoint(step_folder(tmp_path, 1), {"weight": torch.zeros(2)}, {})
    recover(tmp_path)
    assert not (tmp_path / ".deleting-step-000000003-1").exists()


def test_who_trains_into_a_directory_is_named(tmp_path):
    with (
        locked(tmp_path),
        pytest.raises(UserError, match=rf"another process \(number {os.getpid()} on "),
        locked(tmp_path),
    ):
        pass
    with locked(tmp_path):
        pass


def test_a_disk_without_locks_is_told_in_one_line(tmp_path, monkeypatch):
    import fcntl

    def missing(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", missing)
    with pytest.raises(UserError, match=r"its disk has no locks \(No locks available\)"), locked(tmp_path):
        pass
    save_checkpoint(step_folder(tmp_path, 1), {"weight": torch.zeros(2)}, {})  # age decides there
