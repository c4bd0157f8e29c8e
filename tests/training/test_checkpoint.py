"""Checkpoints: complete or not there, told apart, found by name, and never at the cost of an earlier one."""

import hashlib
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from fasttfm.errors import UserError
from fasttfm.training.average import average_last
from fasttfm.training.checkpoint import (
    TrainingState,
    load_weights,
    model_weights,
    prune,
    read_state,
    read_weights,
    recover,
    resolve_checkpoint,
    save_checkpoint,
    saved_steps,
    step_folder,
)

STATE = TrainingState(tensors={"moment": torch.arange(3.0)}, values={"step": 1, "best": [[1.5, 1]]})


def save(model_dir, step, value=0.0, best_step=None, state=STATE):
    meta = {"step": step, "best_step": best_step}
    save_checkpoint(step_folder(model_dir, step), {"weight": torch.full((2, 3), value)}, meta, state)


def test_what_is_saved_is_what_is_read(tmp_path):
    save(tmp_path, 7, 1.25)
    folder = step_folder(tmp_path, 7)
    assert torch.equal(read_weights(folder)["weight"], torch.full((2, 3), 1.25))
    state = read_state(folder)
    assert torch.equal(state.tensors["moment"], STATE.tensors["moment"])
    assert state.values == STATE.values


def test_saving_a_step_again_replaces_it_and_leaves_nothing_beside_it(tmp_path):
    save(tmp_path, 7, 1.0)
    save(tmp_path, 7, 2.0)
    assert read_weights(step_folder(tmp_path, 7))["weight"][0, 0] == 2.0
    assert os.listdir(tmp_path / "checkpoints") == ["step-000000007"]


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    save(tmp_path, 7, 1.0)
    folder = tmp_path / "checkpoints"
    os.replace(step_folder(tmp_path, 7), folder / ".replaced-step-000000007")
    recover(folder)
    assert read_weights(step_folder(tmp_path, 7))["weight"][0, 0] == 1.0
    assert os.listdir(folder) == ["step-000000007"]


def test_names_of_checkpoints(tmp_path):
    save(tmp_path, 1, best_step=1)
    save(tmp_path, 2, best_step=2)
    save(tmp_path, 3, best_step=2)
    assert resolve_checkpoint(tmp_path, "last") == step_folder(tmp_path, 3)
    assert resolve_checkpoint(tmp_path, "best") == step_folder(tmp_path, 2)
    assert resolve_checkpoint(tmp_path, "1") == step_folder(tmp_path, 1)
    other = tmp_path / "mine.safetensors"
    other.write_bytes(b"")
    assert resolve_checkpoint(tmp_path, str(other)) == other
    with pytest.raises(UserError, match="fasttfm average"):
        resolve_checkpoint(tmp_path, "average")
    with pytest.raises(UserError, match=r"'9' was not found .* a step \(1, 2, 3\)"):
        resolve_checkpoint(tmp_path, "9")
    with pytest.raises(UserError, match="no checkpoint"):
        resolve_checkpoint(tmp_path / "empty", "last")


def test_what_only_looks_like_a_checkpoint_is_none(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    for name in ("step-9", "step-00000000009", "step-\u0661\u0662", "step-copy"):
        (folder / name).mkdir()
    (folder / "step-000000009").touch()
    assert saved_steps(tmp_path) == [1]


def test_best_of_a_run_that_never_validated_is_the_last(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert resolve_checkpoint(tmp_path, "best") == step_folder(tmp_path, 2)


def test_pruning_keeps_the_newest_and_the_best_and_the_state_of_the_newest_two(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step)
    prune(tmp_path, keep_last=3, keep={2})
    assert saved_steps(tmp_path) == [2, 4, 5, 6]
    with_state = [s for s in saved_steps(tmp_path) if (step_folder(tmp_path, s) / "state.safetensors").exists()]
    assert with_state == [5, 6]
    prune(tmp_path, keep_last=-1, keep=set())
    assert saved_steps(tmp_path) == [2, 4, 5, 6]


@pytest.mark.parametrize("file", ["model.safetensors", "state.safetensors", "meta.json"])
@pytest.mark.parametrize("left", [0, 1, 4, -1])
def test_a_cut_off_file_is_named_with_the_remedy(tmp_path, file, left):
    save(tmp_path, 5, best_step=5)
    path = step_folder(tmp_path, 5) / file
    content = path.read_bytes()
    path.write_bytes(content[:left] if file != "meta.json" or left >= 0 else content[:-3])
    readers = {
        "model.safetensors": lambda: read_weights(path.parent),
        "state.safetensors": lambda: read_state(path.parent),
        "meta.json": lambda: resolve_checkpoint(tmp_path, "best"),
    }
    with pytest.raises(UserError) as error:
        readers[file]()
    assert str(path) in str(error.value)
    assert "cut off" in str(error.value)
    assert f"delete {path.parent}" in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    save(tmp_path, 5, state=None)
    with pytest.raises(UserError, match=r"state\.safetensors: is missing"):
        read_state(step_folder(tmp_path, 5))


class Tied(nn.Module):
    def __init__(self, rows=4, width=3):
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.output = nn.Linear(width, rows, bias=False)
        self.output.weight = self.embedding.weight


def test_a_shared_weight_is_saved_once_and_stays_shared(tmp_path):
    model, other = Tied(), Tied()
    assert list(model_weights(model)) == ["embedding.weight"]
    save_checkpoint(step_folder(tmp_path, 1), model_weights(model), {})
    load_weights(other, read_weights(step_folder(tmp_path, 1)), tmp_path)
    assert torch.equal(other.output.weight, model.embedding.weight)
    assert other.output.weight is other.embedding.weight


def test_weights_of_another_model_or_vocabulary_are_refused(tmp_path):
    model = Tied()
    weight = model.embedding.weight.detach().clone()
    with pytest.raises(UserError, match=r"x: is of another vocabulary: embedding\.weight is \(5, 3\), .* \(4, 3\)"):
        load_weights(model, {"embedding.weight": torch.zeros(5, 3)}, "x")
    with pytest.raises(UserError, match=r"another model: embedding\.weight is"):
        load_weights(model, {"embedding.weight": torch.zeros(4, 2)}, "x")
    with pytest.raises(UserError, match=r"has no embedding\.weight"):
        load_weights(model, {"other": torch.zeros(4, 3)}, "x")
    with pytest.raises(UserError, match=r"it has more\.weight"):
        load_weights(model, {"embedding.weight": torch.zeros(4, 3), "more.weight": torch.zeros(1)}, "x")
    assert torch.equal(model.embedding.weight, weight)


FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from fasttfm.errors import UserError
from fasttfm.training.checkpoint import save_checkpoint, step_folder
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # no file may grow larger, as on a full disk
try:
    save_checkpoint(step_folder(sys.argv[1], 2), {"weight": torch.zeros(100_000)}, {})
except UserError as error:
    print(error)
    sys.exit(2)
"""


def test_a_full_disk_while_saving_loses_nothing_and_says_what_to_do(tmp_path):
    save(tmp_path, 1, 1.5)
    script = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    result = subprocess.run(script, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert result.stderr == ""
    assert str(step_folder(tmp_path, 2)) in result.stdout
    assert "earlier checkpoints are untouched" in result.stdout
    assert os.listdir(tmp_path / "checkpoints") == ["step-000000001"]
    assert read_weights(step_folder(tmp_path, 1))["weight"][0, 0] == 1.5


SAVE_FOR_EVER = """
import sys, torch
from fasttfm.training.checkpoint import prune, save_checkpoint, step_folder
print("ready", flush=True)
step = 0
while True:
    step += 1
    save_checkpoint(step_folder(sys.argv[1], step), {"weight": torch.full((50_000,), float(step))}, {"step": step})
    prune(sys.argv[1], 2, set())
    print(step, flush=True)
"""


def test_kill_9_while_saving_leaves_only_complete_checkpoints(tmp_path):
    for attempt in range(4):
        process = subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(3 + attempt):  # what it says, not how long it took, tells that it has saved
            process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.01 + attempt * 0.007)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for step in saved_steps(tmp_path):
            weight = read_weights(resolve_checkpoint(tmp_path, str(step)))["weight"]
            assert torch.equal(weight, torch.full((50_000,), float(step)))
    assert saved_steps(tmp_path)


def test_average_is_the_mean_of_the_newest(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, value=float(step))
    target, steps = average_last(tmp_path, 2)
    assert steps == [2, 3]
    assert torch.equal(read_weights(target)["weight"], torch.full((2, 3), 2.5))
    assert resolve_checkpoint(tmp_path, "average") == target


def test_average_of_more_than_there_are_is_refused_with_the_number(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(UserError, match="has 1 checkpoints, 5 were to be averaged: give --last 1"):
        average_last(tmp_path, 5)
    with pytest.raises(UserError, match="at least 1"):
        average_last(tmp_path, 0)


def test_average_over_two_models_is_refused(tmp_path):
    save(tmp_path, 1)
    save_checkpoint(step_folder(tmp_path, 2), {"weight": torch.zeros(3, 3)}, {})
    with pytest.raises(UserError, match="another model"):
        average_last(tmp_path, 2)


def test_what_another_process_is_writing_is_left_alone(tmp_path):
    folder = tmp_path / "checkpoints"
    alive, dead = folder / f".writing-step-000000002-{os.getppid()}", folder / ".writing-step-000000003-999999999"
    for path in (alive, dead):
        path.mkdir(parents=True)
    save(tmp_path, 1)
    assert sorted(os.listdir(folder)) == [alive.name, "step-000000001"]


def test_deleting_is_advised_for_nothing_but_a_checkpoint_of_the_run(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="is missing; give a checkpoint directory") as error:
        read_weights(tmp_path / "mine")
    assert "delete" not in str(error.value)
    save(tmp_path, 1)
    average_last(tmp_path, 1)
    (tmp_path / "checkpoints" / "average" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="make it anew with fasttfm average"):
        read_weights(tmp_path / "checkpoints" / "average")


def test_weights_in_the_place_of_the_training_state_are_refused(tmp_path):
    save(tmp_path, 1)
    folder = step_folder(tmp_path, 1)
    (folder / "state.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="holds no training state"):
        read_state(folder)


@pytest.mark.parametrize(("file", "read"), [("model.safetensors", read_weights), ("state.safetensors", read_state)])
def test_a_single_flipped_bit_is_noticed(tmp_path, file, read):
    save(tmp_path, 3, 1.0)
    path = step_folder(tmp_path, 3) / file
    whole = path.read_bytes()
    for place in (len(whole) - 1, len(whole) // 2, 9):
        broken = bytearray(whole)
        broken[place] ^= 1
        path.write_bytes(broken)
        with pytest.raises(UserError, match=rf"{file}: is cut off or not what its name says .*delete"):
            read(path.parent)
    path.write_bytes(whole)
    read(path.parent)


def test_the_digests_are_what_sha256sum_checks(tmp_path):
    save(tmp_path, 3)
    folder = step_folder(tmp_path, 3)
    lines = (folder / "sha256sums").read_text().splitlines()
    files = ["model.safetensors", "state.safetensors"]
    assert lines == [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}" for name in files]


def test_weights_of_another_program_need_no_digest(tmp_path):
    save(tmp_path, 3, 2.0)
    (step_folder(tmp_path, 3) / "sha256sums").unlink()
    assert read_weights(step_folder(tmp_path, 3))["weight"][0, 0] == 2.0
