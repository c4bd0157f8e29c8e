"""Command lines of `fasttfm train` and `fasttfm average`."""

import os
import re
import shlex
import shutil
import sys

import pytest
import torch
from full_disk import largest_file

from fasttfm.cli.environment import choose_settings
from fasttfm.cli.main import main
from fasttfm.store.checkpoint import read_state, read_weights
from fasttfm.store.run_log import read_log
from fasttfm.store.steps import saved_steps, step_folder

SMALL = shlex.split(
    "--d-model 16 --heads 2 --d-ff 32 --encoder-layers 1 --decoder-layers 1 --max-tokens 256 --schedule constant "
    "--lr 0.005 --warmup-updates 2 --valid-interval-updates 4 --save-interval-updates 2 --log-interval 2 "
    "--average-last 2 --max-len-b 3 --no-tensorboard --device cpu --workers 1"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with prepared data: DATA, SEPARATE (two vocabularies) and LARGER (another vocabulary)."""
    folder = tmp_path_factory.mktemp("text with a space")
    lines = [
        f"the {color} {thing} is {size} .\n"
        for color in ("red", "blue")
        for thing in ("cat", "dog", "house")
        for size in ("big", "small")
    ]
    for name in ("train.en", "train.de", "valid.en", "valid.de"):
        (folder / name).write_text("".join(lines[:6] if "valid" in name else lines * 4))
    files = {"src": "train.en", "tgt": "train.de", "valid-src": "valid.en", "valid-tgt": "valid.de"}
    texts = [f"--{flag}={folder / name}" for flag, name in files.items()]
    for out, more in (("DATA", "32"), ("SEPARATE", "32 --separate-vocab"), ("LARGER", "34")):
        words = ["--vocab-size", *more.split(), "--no-byte-fallback", "--out", str(folder / out)]
        assert main(["prepare", *texts, *words]) == 0
    return folder


def train(data, out, *more):
    return main(["train", "--data", str(data), "--out", str(out), *SMALL, "--max-update", "6", *more])


@pytest.fixture(scope="module")
def said(data):
    """A run of 6 updates into TRAINED."""
    assert train(data / "DATA", data / "TRAINED") == 0


@pytest.fixture
def model(data, said, tmp_path):
    return shutil.copytree(data / "TRAINED", tmp_path / "MODEL")


# A run


def test_average_prints_the_averaged_updates(model, capsys):
    assert main(["average", str(model), "--last", "2"]) == 0
    assert "average of the checkpoints of updates 4, 6" in capsys.readouterr().out
    assert main(["average", str(model), "--last", "9"]) == 2
    assert "give --last 3" in capsys.readouterr().err


def test_init_from_starts_with_the_weights_of_another_run(data, model, tmp_path, capsys):
    settings = ("--valid-interval-updates", "0", "--lr", "1e-30", "--max-update", "2", "--init-from")
    old = read_weights(step_folder(model, 6))
    for source in (model, step_folder(model, 6), step_folder(model, 6) / "model.safetensors"):
        out = tmp_path / f"M{source.name}"
        assert train(data / "DATA", out, *settings, str(source)) == 0
        begun = read_weights(step_folder(out, 2))
        assert all(torch.allclose(begun[name], old[name], atol=1e-6) for name in old), source
    capsys.readouterr()
    (step_folder(model, 6) / "meta.json").write_text('{"vocabulary": "another"}')
    assert train(data / "DATA", tmp_path / "N", "--init-from", str(step_folder(model, 6))) == 2
    told = capsys.readouterr().err
    assert "another vocabulary than the data: prepare them with that of its model (fasttfm prepare --spm" in told


# Ends before the end


def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_when_there_is_room(data, said, tmp_path, capsys):
    """The log can be written, the checkpoint cannot."""
    with largest_file(9_000):
        assert train(data / "DATA", tmp_path / "M") == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"fasttfm train: .*step-000000002: cannot save the checkpoint", told)
    assert saved_steps(tmp_path / "M") == []
    assert train(data / "DATA", tmp_path / "M") == 0
    assert saved_steps(tmp_path / "M") == [2, 4, 6]


# The next session


def test_a_run_resumes_for_longer_with_another_learning_rate_and_logging(data, model, capsys):
    state = read_state(step_folder(model, 6)).tensors
    changes = ("--resume-with", "lr=0.002", "--log-interval", "1", "--beam", "2")
    assert train(data / "DATA", model, "--max-update", "8", *changes) == 0
    told = capsys.readouterr().err
    assert "resuming from update 6" in told
    assert "lr is 0.002 from here on, 0.005 before" in told
    records = read_log(model)
    assert {"kind": "resumed", "step": 6, "lr": 0.002} in records
    assert [record["lr"] for record in records if record["kind"] == "train"][-2:] == [0.002, 0.002]
    config = (model / "config.yaml").read_text()
    assert "\n  lr: 0.002" in config
    assert "beam: 2" in config
    after = read_state(step_folder(model, 8)).tensors
    name = next(name.removeprefix("adam.exp_avg.") for name in state if name.startswith("adam.exp_avg."))
    assert not torch.equal(after[f"adam.exp_avg.{name}"], state[f"adam.exp_avg.{name}"])
    assert (state[f"adam.step.{name}"], after[f"adam.step.{name}"]) == (6, 8)


def test_an_unmounted_checkpoint_disk_does_not_restart_a_run(data, model, tmp_path, capsys):
    log = (model / "train.log.jsonl").read_bytes()
    checkpoints = model / "checkpoints"
    checkpoints.rename(tmp_path / "disk")
    checkpoints.symlink_to(tmp_path / "unmounted")
    assert train(data / "DATA", model) == 2
    assert "checkpoints: is a link to" in capsys.readouterr().err
    assert (model / "train.log.jsonl").read_bytes() == log
    checkpoints.unlink()
    checkpoints.symlink_to(tmp_path / "disk")
    assert train(data / "DATA", model, "--max-update", "8") == 0
    assert saved_steps(model)[-1] == 8


def test_a_checkpoint_of_another_vocabulary_is_refused_by_every_command(data, model, capsys):
    """It would load and translate into nonsense."""
    step = step_folder(model, 6)
    meta = (step / "meta.json").read_text()
    (step / "meta.json").write_text(meta.replace('"vocabulary": "', '"vocabulary": "0'))
    for words in (
        ["translate", model, "--device", "cpu", "--checkpoint", "6"],
        ["translate", model, "--device", "cpu", "--checkpoint", "6", "--score", data / "valid.de"],
        ["average", model, "--last", "1"],
        ["train", "--data", data / "DATA", "--out", model, *SMALL, "--max-update", "8"],
    ):
        assert main([str(word) for word in words]) == 2
        assert f"{step}: was trained with another vocabulary" in capsys.readouterr().err.splitlines()[-1], words


def test_two_processes_do_not_train_into_one_directory(data, model, capsys):
    fcntl = pytest.importorskip("fcntl")
    with (model / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert train(data / "DATA", model) == 2
    assert "another process" in capsys.readouterr().err


CHANGED = {
    "COSINE": ("config.yaml", "schedule: constant", "schedule: cosine"),
    "OTHER": ("data.yaml", "max_length: 256", "max_length: 7"),
}
"""Copies of the model -> what is different."""


@pytest.mark.parametrize(
    ("data_dir", "out", "flags", "told"),
    [
        ("none", "NEW", "", "none: not a prepared data directory"),
        ("SEPARATE", "NEW", "", "--share-embeddings decoder or none"),
        ("TRAINED", "NEW", "", "TRAINED: is a model directory: --data takes the output directory of fasttfm prepare"),
        ("DATA", "NEW", "--max-tokens 8", "--max-tokens"),
        ("DATA", "NEW", "--threads 100000000", "must be at most 1,024"),
        ("DATA", "NEW", "--init-from nowhere", "does not exist"),
        ("DATA", "NEW", "--resume-with lr=0.1", "has no checkpoint to resume: use the plain option"),
        ("DATA", "", "", "neither empty nor a model directory"),
        ("DATA", "train.en", "", "is a file"),
        ("DATA", "TRAINED", "--d-ff 64", "model.d_ff 32, now it is 64"),
        ("DATA", "TRAINED", "--lr 0.1", "lr 0.005, now it is 0.1: change it with --resume-with lr=0.1, resume with"),
        ("DATA", "TRAINED", "--adam-betas 0.9,0.999", "training.adam_betas 0.9,0.98, now it is 0.9,0.999"),
        ("DATA", "TRAINED", "--max-len-b 5", "3, now it is 5: validation scores would not be comparable: resume with"),
        ("DATA", "COSINE", "--schedule cosine --max-update 8", "training.max_update 6, now it is 8"),
        ("DATA", "TRAINED", "--resume-with d_ff=64", "--resume-with"),
        ("DATA", "TRAINED", "--resume-with lr=fast", "--resume-with"),
        ("LARGER", "TRAINED", "", "another vocabulary than"),
        ("DATA", "OTHER", "", "other text than that of"),
    ],
)
def test_what_a_run_cannot_use_changes_nothing(data, said, capsys, data_dir, out, flags, told):
    if out in CHANGED:
        file, old, new = CHANGED[out]
        path = shutil.copytree(data / "TRAINED", data / out) / file
        path.write_text(path.read_text().replace(old, new))
    kept = [path for path in data.rglob("*") if path.is_file() and path.name != ".lock" and "NEW" not in path.parts]
    before = {path: path.read_bytes() for path in kept}
    assert train(data / data_dir, data / out, *flags.split()) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("fasttfm train: ")
    assert told in error
    assert before == {path: path.read_bytes() for path in before}


# Settings


def test_onednns_caches_are_chosen_unless_the_user_has(monkeypatch):
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    assert choose_settings() == "", "torch has read them"
    for given, chosen in ((None, names), ("9", names[:1])):
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "torch")
            patch.delenv(names[0], raising=False)
            patch.setenv(names[1], given) if given else patch.delenv(names[1], raising=False)
            assert re.findall(r"(\w+)=", choose_settings()) == list(chosen)
            assert all(os.environ[name] for name in chosen)


def test_dump_config_prints_the_resolved_configuration_and_needs_no_data(capsys):
    for words, lines in (
        ("--preset multi30k --d-model 64", ["  d_model: 64", "  d_ff: 256", "  adam_betas: [0.9, 0.98]"]),
        ("--preset demo --max-update 150", ["  warmup_updates: 15"]),
    ):
        assert main(["train", *words.split(), "--dump-config"]) == 0
        assert set(lines) <= set(capsys.readouterr().out.splitlines())
    assert main(["train", "--preset", "list"]) == 0
