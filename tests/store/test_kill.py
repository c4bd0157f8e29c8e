"""kill -9 before each system call of a save, and the order of system calls that survives a power cut."""

import os
import sys

import pytest
import torch
from forked import run
from killed import environment
from waiting import PATIENCE

from fasttfm.store.checkpoint import save_checkpoint
from fasttfm.store.steps import step_folder

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

EVERY_CALL = """
import shutil, sys
from pathlib import Path
import torch
from fasttfm.store.checkpoint import TrainingState, is_resumable, read_weights, save_checkpoint
from fasttfm.store.ownership import recover
from fasttfm.store.steps import prune, resolve_checkpoint, saved_steps, step_folder
from fasttfm.training.average import average_last
from killed import calls_of

def save_beside_training(folder, step, value):
    from fasttfm.training.saving import Saving
    saving = Saving(model_dir=folder, updates=None)
    saving.write(lambda: save(folder, step, value))
    saving.written(wait=True)

def save(folder, step, value):
    state = TrainingState(tensors={"moment": torch.full((500,), value)}, values={})
    meta = {"step": step, "best_step": step}
    save_checkpoint(step_folder(folder, step), {"weight": torch.full((700,), value)}, meta, state)
    prune(folder, 2, set())

BEFORE = [(1, 1.0), (2, 2.0), (3, 3.0)]  # of which the first is pruned
SCENARIOS = {  # name -> checkpoints before, the killed action, possible weights of each step afterwards
    "first": ([], lambda folder: save(folder, 4, 4.0), {4: [4.0]}),
    "next": (BEFORE, lambda folder: save(folder, 4, 4.0), {2: [2.0], 3: [3.0], 4: [4.0]}),
    "beside": (BEFORE, lambda folder: save_beside_training(folder, 4, 4.0), {2: [2.0], 3: [3.0], 4: [4.0]}),
    "again": (BEFORE, lambda folder: save(folder, 3, 30.0), {2: [2.0], 3: [3.0, 30.0]}),
    "average": (BEFORE, lambda folder: average_last(folder, 2), {2: [2.0], 3: [3.0]}),
}
root, scenario = Path(sys.argv[1]), sys.argv[2]
before, action, allowed = SCENARIOS[scenario]
original = root / "original"
original.mkdir()
for step, value in before:
    save(original, step, value)
number = 0
while True:
    number += 1
    folder = root / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    was_killed = calls_of(number, lambda: action(folder)) == number
    if (folder / "checkpoints").exists():
        recover(folder / "checkpoints")
    steps = saved_steps(folder)
    assert set(steps) <= set(allowed), (number, steps)
    newest = max((step for step, _ in before), default=0)
    assert not before or newest in steps, (number, steps)
    for step in steps:
        assert read_weights(step_folder(folder, step))["weight"][0].item() in allowed[step], (number, step)
    assert all(map(is_resumable, (step_folder(folder, step) for step in steps[-1:]))), (number, steps)
    if not was_killed:
        break
    action(folder)  # the same command again
    assert len(saved_steps(folder)) == min(len(allowed), 2), (number, saved_steps(folder))
    strangers = [*(folder / "checkpoints").glob(".*")]
    assert strangers == [], (number, strangers)
print(number - 1)
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("scenario", ["first", "next", "beside", "again", "average"])
def test_kill_9_before_each_call_of_a_save_leaves_complete_checkpoints(tmp_path, scenario):
    command = [sys.executable, "-c", EVERY_CALL, str(tmp_path), scenario]
    done = run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 12  # calls


def test_files_are_synced_before_they_are_renamed(tmp_path, monkeypatch):
    """After a power cut any subset of the unsynced writes may be on disk, so the order of the calls matters."""
    paths, calls = {}, []

    def recorded(name, original):
        def call(*arguments, **settings):
            result = original(*arguments, **settings)
            if name == "open":
                paths[result] = str(arguments[0])
            subject = paths.get(arguments[0], arguments[0]) if name in ("write", "fsync") else arguments[0]
            calls.append((name, str(subject).replace(str(tmp_path), "")))
            return result

        return call

    for name in ("open", "write", "fsync", "replace"):
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
    save_checkpoint(step_folder(tmp_path, 3), {"weight": torch.zeros(5)}, {"step": 3})
    monkeypatch.undo()
    (renamed,) = [index for index, (name, _) in enumerate(calls) if name == "replace"]
    folder = calls[renamed][1]
    written = {path for name, path in calls if name == "write"}
    assert written == {f"{folder}/{name}" for name in ("model.safetensors", "sha256sums", "meta.json")}
    for path in (*written, folder):
        last_write = max((i for i, call in enumerate(calls) if call == ("write", path)), default=0)
        assert last_write < calls.index(("fsync", path)) < renamed
    assert ("fsync", "/checkpoints") in calls[renamed:]
