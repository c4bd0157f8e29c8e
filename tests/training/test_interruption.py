"""Runs interrupted at any moment resume to the same result: signals, kills, full disks, damaged files."""

import errno
import json
import os
import random
import shutil
import signal
import time

import pytest
import torch
from waiting import PATIENCE

from fasttfm.config import gather
from fasttfm.data.prepared import PreparedData
from fasttfm.errors import Stopped, UserError
from fasttfm.store import model_dir
from fasttfm.store.model_dir import prepare_model_dir
from fasttfm.store.run_log import read_log
from fasttfm.store.steps import saved_steps
from fasttfm.system import files
from fasttfm.training.callback import Callback
from fasttfm.training.interrupt import Interruption
from fasttfm.training.run import train

from .runs import CPU, assert_same_weights, log_without_times, make_trainer, records, weights_of
from .tiny import TINY, run, start, train_command


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ema_decay": 0.9, "clip_norm": 1.0, "optimizer": "adamw", "weight_decay": 0.01},
        {"precision": "bf16", "update_freq": 2, "subword_sampling": 0.1, "packed": True},
        {"precision": "fp16"},
        {"optimizer": "muon", "weight_decay": 0.01, "ema_decay": 0.9, "rates": "encoder.*=0.5"},
    ],
    ids=["plain", "ema", "bf16 packed", "fp16", "muon"],
)
def test_a_run_in_two_sessions_equals_one_in_a_single_session(tiny_data, tiny_values, tmp_path, changes):
    train(tiny_values(**changes), tiny_data, tmp_path / "whole", CPU)
    train(tiny_values(max_update=5, **changes), tiny_data, tmp_path / "parts", CPU)
    assert saved_steps(tmp_path / "parts") == [4, 5]
    train(tiny_values(**changes), tiny_data, tmp_path / "parts", CPU)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    whole, parts = (
        [record for record in log_without_times(tmp_path / name) if record["kind"] == "train"]
        for name in ("whole", "parts")
    )
    assert whole == parts
    shapes = [record["batch_shapes"] for record in whole]
    assert shapes == sorted(shapes)
    assert 1 <= shapes[0] < shapes[-1]


@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_a_model_directory_that_is_gone_is_not_recreated(tiny_data, tiny_values, tmp_path, how):
    class Strike(Callback):
        def on_save(self, checkpoint):
            path = tmp_path / "M"
            path.rename(tmp_path / "elsewhere")
            if how == "removed":
                shutil.rmtree(tmp_path / "elsewhere")
            if how == "replaced":
                path.mkdir()
                (path / ".lock").touch()

    # far apart, so that no other checkpoint is being written when the first is complete
    saving = {"max_update": 400, "save_interval_updates": 60, "valid_interval_updates": 0, "tensorboard": False}
    values = tiny_values(**saving)
    with pytest.raises(UserError, match="M: was moved or removed while training wrote into it"):
        train(values, tiny_data, tmp_path / "M", CPU, callbacks=[Strike()])
    assert sorted(each.name for each in tmp_path.glob("M/*")) == ([".lock"] if how == "replaced" else [])
    assert (tmp_path / "elsewhere/checkpoints").exists() == (how != "removed")


@pytest.mark.slow
def test_kill_9_at_random_moments_ends_in_the_same_bits(tmp_path, tiny_data):
    seed = int(os.environ.get("FASTTFM_KILL_SEED") or int.from_bytes(os.urandom(3), "big"))
    print(f"FASTTFM_KILL_SEED={seed}")
    draw, changes = random.Random(seed), {"max_update": 60, "valid_interval_updates": 7, "save_interval_updates": 2}
    whole, killed = (
        train_command(tiny_data, tmp_path / name, clip_norm=1.0, **changes) for name in ("whole", "killed")
    )
    began = time.monotonic()
    assert run(whole).returncode == 0
    duration = time.monotonic() - began
    for _ in range(4):
        process = start(killed)
        time.sleep(draw.uniform(0.1, 0.5) * duration)
        process.kill()
        process.communicate()
    assert run(killed).returncode == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")
    assert log_without_times(tmp_path / "whole") == log_without_times(tmp_path / "killed")


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_update_saves_and_says_how_to_resume(tiny_data, tmp_path, number):
    changes = {"max_update": 100_000, "valid_interval_updates": 0, "save_interval_updates": 0, "log_interval": 2}
    process = start(train_command(tiny_data, tmp_path / "M", **changes))
    for line in process.stderr:
        if "update" in line and "epoch 1" in line:
            break
    process.send_signal(number)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("fasttfm train: stopped after update ")
    assert last.endswith("which is saved: run the same command again to resume")
    assert "Traceback" not in stderr
    (step,) = saved_steps(tmp_path / "M")
    assert f"update {step:,}," in last
    repeated = run(train_command(tiny_data, tmp_path / "M", **{**changes, "max_update": step + 3}))
    assert repeated.returncode == 0
    assert f"resuming from update {step:,}" in repeated.stderr


def test_a_second_ctrl_c_stops_at_once_and_a_second_sigterm_does_not():
    with Interruption() as interruption:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert interruption.requested
        with pytest.raises(Stopped) as stopped:
            signal.raise_signal(signal.SIGINT)
    assert stopped.value.number == signal.SIGTERM


def test_a_signal_in_or_just_before_an_interruptible_block_stops_it():
    with Interruption() as interruption, pytest.raises(Stopped), interruption.at_once():
        signal.raise_signal(signal.SIGTERM)
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped) as stopped, interruption.at_once():
            pytest.fail("it began")
    assert stopped.value.number == signal.SIGTERM


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_run_stopped_at_a_validation_saves_and_validates_after_resuming(tiny_data, tiny_config, tmp_path, moment):
    """A scheduler kills soon after SIGTERM, and a validation may take minutes."""
    data, out = PreparedData.open(tiny_data), tmp_path / "M"
    config = tiny_config(valid_interval_updates=4, max_update=8)
    prepare_model_dir(out, config, data)
    trainer = make_trainer(config, data, out)
    perform = trainer.updates.perform

    def struck(*given):
        if moment == "before" and trainer.updates.position.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return perform(*given)

    def validate(*given):
        assert moment == "during"
        raise KeyboardInterrupt

    trainer.updates.perform, trainer.validator = struck, validate
    with pytest.raises(KeyboardInterrupt, match="after update 4, which is saved"):
        trainer.run()
    assert saved_steps(out) == [4]
    train(config.to_values(), tiny_data, out, CPU)
    assert [record["step"] for record in records(out, "valid")] == [4, 8]


def test_sigterm_ends_an_update_of_ten_million_batches(tiny_data, tiny_config, tmp_path):
    """After a signal at the ninth batch, within the next ninety."""
    trainer = make_trainer(tiny_config(update_freq=9_999_999), PreparedData.open(tiny_data), tmp_path)
    drawn, next_batch = [], trainer.updates.next_batch

    def counted(*given):
        drawn.append(given)
        if len(drawn) == 9:
            signal.raise_signal(signal.SIGTERM)
        assert len(drawn) < 99
        return next_batch(*given)

    trainer.updates.next_batch = counted
    with pytest.raises(Stopped, match="nothing to save yet: run the same command again to resume"):
        trainer.run()


def test_restarting_a_finished_run_changes_nothing(tiny_data, tiny_values, tmp_path):
    train(tiny_values(average_last=2), tiny_data, tmp_path / "M", CPU)
    before, weights = json.dumps(read_log(tmp_path / "M")), weights_of(tmp_path / "M")
    outcome = train(tiny_values(average_last=2), tiny_data, tmp_path / "M", CPU)
    assert outcome.reason == "max_update 12 is reached"
    assert json.dumps(read_log(tmp_path / "M")) == before
    torch.testing.assert_close(weights_of(tmp_path / "M"), weights, rtol=0, atol=0)


@pytest.mark.parametrize("left", [".config.yaml.unfinished", "config.yaml"])
def test_a_kill_during_the_creation_of_the_directory_is_recovered(tiny_data, tiny_config, tmp_path, monkeypatch, left):
    data, out = PreparedData.open(tiny_data), tmp_path / "MODEL"

    def killed(path, content, write=files.replace_file):
        if left.startswith("."):
            files.unfinished(path).write_bytes(content[:10])
        else:
            write(path, content)
        raise SystemExit(9)

    out.mkdir()
    config = tiny_config()
    with monkeypatch.context() as patch:
        patch.setattr(model_dir, "replace_file", killed)
        with pytest.raises(SystemExit):
            prepare_model_dir(out, config, data)
    assert os.listdir(out) == [left]
    model_dir.refuse_strangers(out)
    prepare_model_dir(out, config, data)
    assert sorted(os.listdir(out)) == ["config.yaml", "data.yaml", "spm.model"]


def test_too_many_open_files_are_one_line_with_the_remedy(tiny_data, tiny_values, tmp_path, monkeypatch):
    def fails(self, record):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("fasttfm.training.log.RunLog.write", fails)
    with pytest.raises(UserError, match=r"MODEL: .*; checkpoints saved before .* allow more open files"):
        train(tiny_values(), tiny_data, tmp_path / "MODEL")


@pytest.fixture(scope="module")
def begun(tiny_data, tmp_path_factory):
    """A model directory after one update."""
    out = tmp_path_factory.mktemp("begun") / "MODEL"
    train(gather(overrides={**TINY, "max_update": 1}), tiny_data, out, CPU)
    return out


RECORD, CUT_OFF = (
    r"MODEL.data\.yaml: is missing or damaged",
    r"is truncated or from another version: it has no \w+\.\w+",
)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("MODEL/data.yaml", b"", RECORD),
        ("MODEL/data.yaml", b"a: [", RECORD),
        ("MODEL/config.yaml", b"", CUT_OFF),
        ("MODEL/config.yaml", b"kind: transformer\nmodel:\n  vocab_size: 64\n", CUT_OFF),
        ("DATA/train.src.npy", None, r"train\.src\.npy: is damaged or was changed, its SHA-256"),
        ("DATA/valid.tgt.txt", b"", r"valid\.tgt\.txt: is damaged or was changed"),
        ("DATA/sha256sums", b"", "sha256sums: is empty"),
    ],
)
def test_a_damaged_file_is_named_before_training(begun, tiny_data, tiny_values, tmp_path, file, content, said):
    """content: None flips a bit of a token, which stays in the vocabulary: only the digest detects it."""
    out, data, path = tmp_path / "MODEL", shutil.copytree(tiny_data, tmp_path / "DATA"), tmp_path / file
    if file.startswith("MODEL"):
        data = tiny_data
        shutil.copytree(begun, out)
    *rest, last, end = path.read_bytes()
    path.write_bytes(bytes([*rest, last ^ 1, end]) if content is None else content)
    with pytest.raises(UserError, match=said):
        train(tiny_values(max_update=2), data, out, CPU)
    assert (saved_steps(out) == [1]) if file.startswith("MODEL") else not out.exists()
