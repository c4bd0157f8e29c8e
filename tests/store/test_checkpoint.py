"""Checkpoints: atomic saves, names, pruning, damaged and unreadable files, averages."""

import errno
import hashlib
import io
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from fasttfm.errors import UserError
from fasttfm.store import vocabulary
from fasttfm.store.checkpoint import (
    DamagedCheckpoint,
    TrainingState,
    read_meta,
    read_state,
    read_weights,
    save_checkpoint,
)
from fasttfm.store.ownership import recover
from fasttfm.store.steps import prune, resolve_checkpoint, resume_advice, saved_steps, step_folder
from fasttfm.store.weights import load_weights, model_weights
from fasttfm.training.average import average_last

STATE = TrainingState(tensors={"moment": torch.arange(3.0)}, values={"step": 1, "best": [[1.5, 1]]})
READERS = {"model.safetensors": read_weights, "state.safetensors": read_state, "meta.json": read_meta}


def save(model_dir, step, value=0.0, state=STATE, **meta):
    weights = {"weight": torch.full((2, 3), value)}
    save_checkpoint(step_folder(model_dir, step), weights, {"step": step, "best_step": None, **meta}, state)
    return step_folder(model_dir, step)


def save_steps(model_dir, *steps):
    for step in steps:
        save(model_dir, step, float(step))


def test_a_checkpoint_is_read_back_and_its_digests_are_in_sha256sums_format(tmp_path):
    folder = save(tmp_path, 7, 1.25)
    assert torch.equal(read_weights(folder)["weight"], torch.full((2, 3), 1.25))
    state = read_state(folder)
    assert torch.equal(state.tensors["moment"], STATE.tensors["moment"])
    assert state.values == STATE.values
    files = ["model.safetensors", "state.safetensors"]
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}" for name in files]
    assert (folder / "sha256sums").read_text().splitlines() == lines
    (folder / "sha256sums").write_bytes(b"")  # does not disable the check
    with pytest.raises(DamagedCheckpoint, match="is missing from sha256sums"):
        read_weights(folder)
    (folder / "sha256sums").unlink()  # as of another program
    assert read_weights(folder)["weight"][0, 0] == 1.25


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    save(tmp_path, 7, 1.0)
    folder = tmp_path / "checkpoints"
    os.replace(step_folder(tmp_path, 7), folder / ".replaced-step-000000007")
    recover(folder)
    assert read_weights(step_folder(tmp_path, 7))["weight"][0, 0] == 1.0
    assert os.listdir(folder) == ["step-000000007"]


# Names


def test_names_of_checkpoints(tmp_path):
    save_steps(tmp_path, 1, 2)
    assert resolve_checkpoint(tmp_path, "best") == step_folder(tmp_path, 2)  # a run without validation
    save(tmp_path, 3, best_step=2)
    other = tmp_path / "mine.safetensors"
    other.write_bytes(b"")
    for name, step in (("last", 3), ("best", 2), ("1", 1)):
        assert resolve_checkpoint(tmp_path, name) == step_folder(tmp_path, step)
    assert resolve_checkpoint(tmp_path, str(other)) == other
    for model_dir, name in ((tmp_path, "average"), (tmp_path, "9"), (tmp_path / "empty", "last")):
        with pytest.raises(UserError):
            resolve_checkpoint(model_dir, name)


def test_an_unreadable_folder_is_not_an_empty_one(tmp_path, monkeypatch):
    folder = tmp_path / "M" / "checkpoints"
    assert saved_steps(tmp_path / "M") == []

    def refused(message):
        with pytest.raises(UserError, match=message):
            saved_steps(tmp_path / "M")

    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "unmounted")
    refused(r"is a link to .*unmounted, which does not exist: mount that disk")
    folder.unlink()
    folder.mkdir()

    def refusing(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refusing)
    refused("checkpoints: cannot be read: Permission denied; it may be intact")


def test_a_checkpoint_deleted_by_training_during_the_lookup_is_looked_up_again(tmp_path, monkeypatch):
    save_steps(tmp_path, 10, 20)
    resolve = vocabulary.resolve_checkpoint

    def slow(model_dir, which):
        path = resolve(model_dir, which)
        if path == step_folder(tmp_path, 20):
            shutil.rmtree(path)
        return path

    monkeypatch.setattr(vocabulary, "resolve_checkpoint", slow)
    weights, saved = vocabulary.read_checkpoint(tmp_path, "last")
    assert (weights["weight"].unique().item(), saved) == (10.0, step_folder(tmp_path, 10))


# Pruning and resuming


def test_pruning_keeps_the_newest_and_the_best_and_the_state_of_the_newest_two(tmp_path):
    save_steps(tmp_path, *range(1, 7))
    prune(tmp_path, keep_last=3, keep={2})
    assert saved_steps(tmp_path) == [2, 4, 5, 6]
    with_state = [s for s in saved_steps(tmp_path) if (step_folder(tmp_path, s) / "state.safetensors").exists()]
    assert with_state == [5, 6]
    assert "state" not in (step_folder(tmp_path, 4) / "sha256sums").read_text()
    prune(tmp_path, keep_last=-1, keep=set())
    assert saved_steps(tmp_path) == [2, 4, 5, 6]


def test_the_advice_for_resuming_names_the_newest_intact_state_or_weights(tmp_path):
    save_steps(tmp_path, 4, 8, 12, 16)
    for step, file in ((16, "model.safetensors"), (12, "state.safetensors")):
        (step_folder(tmp_path, step) / file).write_bytes(b"cut")
    advice = resume_advice(tmp_path)
    assert "move step-000000012 and step-000000016 out of" in advice
    assert "to resume from update 8, the newest that can be resumed" in advice
    prune(tmp_path, keep_last=-1, keep=set())
    for step in (12, 16):
        shutil.rmtree(step_folder(tmp_path, step))
    advice = resume_advice(tmp_path)
    assert advice.endswith(f"with another --out and --init-from {step_folder(tmp_path, 8)}")


# Files that are damaged, missing or unreadable


@pytest.mark.parametrize("file", READERS)
def test_a_damaged_file_is_reported_with_the_remedy(tmp_path, file):
    """Truncated, or with a single flipped bit, which safetensors would not notice."""
    folder = save(tmp_path, 5, best_step=5)
    path = folder / file
    whole = path.read_bytes()
    damaged = [whole[:left] for left in (0, 1, 4, -3)]
    for place in (len(whole) - 1, len(whole) // 2, 9) if file != "meta.json" else ():
        damaged.append(bytes([*whole[:place], whole[place] ^ 1, *whole[place + 1 :]]))
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{path}: is truncated or damaged .*copy the file back") as error:
            READERS[file](folder)
        assert "delete" not in str(error.value)
    path.write_bytes(whole)
    READERS[file](folder)
    path.unlink()
    with pytest.raises(UserError, match=f"{file}: is missing"):
        READERS[file](folder)


@pytest.mark.parametrize("file", [*READERS, "sha256sums"])
def test_an_unreadable_file_is_not_called_damaged(tmp_path, monkeypatch, file):
    folder, opened = save(tmp_path, 5), io.open

    def refusing(path, *arguments, **settings):
        if str(path) == str(folder / file):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path, *arguments, **settings)

    monkeypatch.setattr(io, "open", refusing)
    with pytest.raises(UserError, match="cannot be read: Input/output error; it may be intact") as error:
        READERS.get(file, read_weights)(folder)
    assert not isinstance(error.value, DamagedCheckpoint)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nonfinite_weights_are_refused(tmp_path, dtype, value):
    weight = torch.zeros(3, 4, dtype=dtype)
    weight[1, 2] = value
    save_checkpoint(step_folder(tmp_path, 3), {"weight": weight}, {"step": 3})
    with pytest.raises(UserError, match=r"model\.safetensors: weight contains NaN or infinity"):
        read_weights(step_folder(tmp_path, 3))


# Weights of models


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


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"embedding.weight": torch.zeros(5, 3)}, r"another vocabulary: embedding\.weight has shape \(5, 3\)"),
        ({"embedding.weight": torch.zeros(4, 2)}, r"another model: embedding\.weight has shape"),
        ({"other.weight": torch.zeros(4, 3)}, r"has no embedding\.weight"),
        ({"embedding.weight": torch.zeros(4, 3), "more.weight": torch.zeros(1)}, r"it has more\.weight"),
        *(({"embedding.weight": torch.ones(4, 3, dtype=dtype)}, f"x: embedding.weight is {name} without a scale")
          for name, dtype in (("int64", torch.int64), ("uint8", torch.uint8), ("bool", torch.bool))),
    ],
)  # fmt: skip
def test_weights_of_another_model_vocabulary_or_kind_are_refused(weights, message):
    model = Tied()
    before = model.embedding.weight.detach().clone()
    with pytest.raises(UserError, match=message):
        load_weights(model, weights, Path("x"))
    assert torch.equal(model.embedding.weight, before)


def test_weights_that_overflow_float32_are_refused():
    with pytest.raises(UserError, match=r"x: embedding\.weight contains NaN or infinity"):
        load_weights(Tied(), {"embedding.weight": torch.full((4, 3), 1e300, dtype=torch.float64)}, Path("x"))


# Averages


def test_average_does_not_mix_vocabularies_or_models(tmp_path):
    (tmp_path / "spm.model").write_bytes(b"second")
    for step in (1, 2, 3):
        save(tmp_path, step, vocabulary="first" if step == 1 else vocabulary.vocabulary_digest(tmp_path))
    with pytest.raises(UserError, match="step-000000001: was trained with another vocabulary than the SentencePiece"):
        average_last(tmp_path, 3)
    assert average_last(tmp_path, 2)[1] == [2, 3]
    save_checkpoint(step_folder(tmp_path, 4), {"weight": torch.zeros(3, 3)}, {})
    with pytest.raises(UserError, match="another model"):
        average_last(tmp_path, 2)


def test_average_excludes_an_old_checkpoint_kept_for_its_score(tmp_path):
    for previous, step in ((None, 10), (10, 20), (20, 30), (30, 40)):
        save(tmp_path, step, previous_step=previous)
    prune(tmp_path, keep_last=2, keep={10})
    assert saved_steps(tmp_path) == [10, 30, 40]
    with pytest.raises(UserError, match=r"has 2 checkpoints in a row \(that of update 10 .* give --last 2"):
        average_last(tmp_path, 3)
    assert average_last(tmp_path, 2)[1] == [30, 40]


def test_average_is_the_mean_of_the_newest_five_by_default_and_never_of_more_than_exist(tmp_path):
    with pytest.raises(UserError, match="has no checkpoints"):
        average_last(tmp_path, None)
    save_steps(tmp_path, 1)
    for last, message in ((5, "has 1 checkpoint, fewer than --last 5: give --last 1"), (0, "at least 1")):
        with pytest.raises(UserError, match=message):
            average_last(tmp_path, last)
    save_steps(tmp_path, 2)
    assert average_last(tmp_path, None)[1] == [1, 2]
    save_steps(tmp_path, 3, 4, 5, 6)
    assert average_last(tmp_path, None)[1] == [2, 3, 4, 5, 6]
    target, steps = average_last(tmp_path, 2)
    assert steps == [5, 6]
    assert torch.equal(read_weights(target)["weight"], torch.full((2, 3), 5.5))
    assert resolve_checkpoint(tmp_path, "average") == target
