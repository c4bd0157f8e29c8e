"""The trainer: what it computes, when it stops, and that stopping at any moment changes nothing."""

import errno
import itertools
import json
import os
import shutil
import signal
import sys
import time
import types

import pytest
import torch

from fasttfm import files
from fasttfm.checkpoints import model_dir
from fasttfm.checkpoints.checkpoint import is_resumable, read_meta, read_state, read_weights
from fasttfm.checkpoints.model_dir import prepare_model_dir
from fasttfm.checkpoints.run_log import read_log
from fasttfm.checkpoints.steps import resolve_checkpoint, saved_steps, step_folder
from fasttfm.data.batches import TokenBatches
from fasttfm.data.prepared import PreparedData
from fasttfm.decoding.translator import Translator
from fasttfm.errors import Stopped, UserError
from fasttfm.models import Transformer
from fasttfm.training.interrupt import Interruption
from fasttfm.training.run import train
from fasttfm.training.trainer import Trainer

from .tiny import PATIENCE, TINY, run, start, train_command

CPU = torch.device("cpu")
TIMES = ("seconds", "tokens_per_second", "peak_memory")


def weights_of(model_dir, which="last"):
    return read_weights(resolve_checkpoint(model_dir, which))


def assert_same_weights(one, other):
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def log_without_times(model_dir):
    return [{key: value for key, value in record.items() if key not in TIMES} for record in read_log(model_dir)]


def test_a_run_learns_logs_validates_saves_and_averages(tiny_data, tiny_values, tmp_path):
    values = tiny_values(max_update=120, valid_interval_updates=40, save_interval_updates=20, average_last=3, lr=1e-2)
    outcome = train(values, tiny_data, tmp_path / "M", CPU)
    records = read_log(tmp_path / "M")
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert losses[-1] < 0.7 * losses[0]
    scores = [record for record in records if record["kind"] == "valid"]
    assert [record["step"] for record in scores] == [40, 80, 120]
    assert all(0 <= record["bleu"] <= 100 for record in scores)
    hypotheses = (tmp_path / "M" / "hypotheses" / "valid.step-000000120.txt").read_text().splitlines()
    assert len(hypotheses) == 12
    assert outcome.score.bleu == scores[-1]["bleu"]
    assert outcome.average is not None
    assert outcome.reason == "max_update 120 is reached"
    assert records[-1]["kind"] == "average"
    assert records[-1]["average_of"] == [80, 100, 120]
    assert records[-1]["bleu"] == outcome.average.bleu
    assert outcome.average.loss != outcome.score.loss
    translator = Translator.from_directory(tmp_path / "M", "average", beam=1)
    assert outcome.average.outputs == translator.translate(PreparedData.open(tiny_data).valid_source_text)
    averaged = weights_of(tmp_path / "M", "average")
    for name, tensor in averaged.items():
        parts = [read_weights(step_folder(tmp_path / "M", step))[name] for step in (80, 100, 120)]
        torch.testing.assert_close(tensor, torch.stack(parts).mean(0))


def test_one_seed_gives_the_same_run_twice_and_another_does_not(tiny_data, tiny_values, tmp_path):
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        train(tiny_values(seed=seed), tiny_data, tmp_path / name, CPU)
    assert_same_weights(tmp_path / "one", tmp_path / "same")
    assert log_without_times(tmp_path / "one") == log_without_times(tmp_path / "same")
    one, other = weights_of(tmp_path / "one"), weights_of(tmp_path / "other")
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ema_decay": 0.9, "clip_norm": 1.0, "optimizer": "adamw", "weight_decay": 0.01},
        {"precision": "bf16", "update_freq": 2, "subword_sampling": 0.1, "packed": True},
        {"precision": "fp16"},
    ],
    ids=["plain", "ema", "bf16 packed", "fp16"],
)
def test_a_run_in_two_sessions_equals_one_in_a_single_session(tiny_data, tiny_values, tmp_path, changes):
    train(tiny_values(**changes), tiny_data, tmp_path / "whole", CPU)
    train(tiny_values(max_update=5, **changes), tiny_data, tmp_path / "parts", CPU)
    assert saved_steps(tmp_path / "parts") == [4, 5]
    train(tiny_values(**changes), tiny_data, tmp_path / "parts", CPU)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    trained = [
        [record for record in log_without_times(tmp_path / name) if record["kind"] == "train"]
        for name in ("whole", "parts")
    ]
    assert trained[0] == trained[1]


def make_trainer(config, data, tmp_path):
    torch.manual_seed(3)
    batches = TokenBatches(data.train, config.data.max_tokens, config.training.seed)
    model = Transformer(config.model)
    return Trainer(model, batches, config.training, tmp_path, validator=None, device=CPU)


def test_gradient_is_the_mean_over_all_target_tokens_of_the_update(tiny_data, tiny_config, tmp_path):
    """Accumulating over 3 batches equals one gradient of the summed loss over the token count, whatever their sizes."""
    data = PreparedData.open(tiny_data)
    config = tiny_config(update_freq=3, dropout=0.0, label_smoothing=0.1)
    trainer = make_trainer(config, data, tmp_path)
    seen = {}

    def step(lr):
        seen.update(gradients=[parameter.grad.clone() for parameter in trainer.model.parameters()])
        return torch.ones(())

    trainer.updates.optimization.step = step
    trainer.updates.perform()
    for parameter in trainer.model.parameters():
        parameter.grad = None
    chosen = [trainer.updates.batches.batch(indices) for indices in trainer.updates.batches.epoch(0)[:3]]
    assert len({batch.target_tokens for batch in chosen}) > 1
    total = sum(
        trainer.model.loss(
            b.source, b.target_in, b.target_out, b.source_lengths, b.target_lengths, label_smoothing=0.1
        )[0]
        for b in chosen
    )
    (total / sum(batch.target_tokens for batch in chosen)).backward()
    for gradient, parameter in zip(seen["gradients"], trainer.model.parameters()):
        torch.testing.assert_close(gradient, parameter.grad)


def test_a_packed_run_learns_what_a_padded_one_learns(tiny_data, tiny_config, tmp_path):
    losses = []
    for packed in (False, True):
        trainer = make_trainer(tiny_config(packed=packed, dropout=0.0), PreparedData.open(tiny_data), tmp_path)
        batch = trainer.updates.batches.batch(trainer.updates.batches.largest())
        losses.append(torch.stack(trainer.updates.loss(batch)).detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)


def test_rehearsing_the_largest_batch_changes_nothing(tiny_data, tiny_config, tmp_path):
    trainer = make_trainer(tiny_config(), PreparedData.open(tiny_data), tmp_path)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    state = torch.get_rng_state()
    trainer.updates.rehearse()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert (trainer.updates.position.step, trainer.updates.position.batch) == (0, 0)


def test_memory_that_does_not_suffice_ends_in_a_remedy(tiny_data, tiny_values, tmp_path, monkeypatch):
    def exhausted(*args, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Transformer, "loss", exhausted)
    with pytest.raises(
        UserError, match="out of memory with batches of 256 tokens: give --max-tokens 128 --update-freq 2"
    ):
        train(tiny_values(), tiny_data, tmp_path / "M", CPU)


def test_every_pair_is_seen_once_an_epoch(tiny_data, tiny_config, tmp_path):
    data = PreparedData.open(tiny_data)
    trainer = make_trainer(tiny_config(), data, tmp_path)
    rows = 0
    while trainer.updates.position.epoch == 0:
        rows += len(trainer.updates.next_batch())
    assert rows == len(data.train)
    assert trainer.updates.position.batch == 0


KILLS_ITSELF = """
import os, signal, sys
from fasttfm.cli.main import main
from fasttfm.training import log, optimization
from fasttfm.checkpoints import checkpoint, ownership
places = {
    "update": ("step", optimization.Optimization),
    "checkpoint": ("write_file", checkpoint, ownership),
    "log": ("write", log.RunLog),
}
name, *owners = places[sys.argv[1]]
left, original = int(sys.argv[2]), getattr(owners[0], name)
def counted(*args):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)
for owner in owners:
    setattr(owner, name, counted)
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize("sampling", [0.0, 0.2])
def test_kill_9_and_the_same_command_again_ends_in_the_same_bits(tiny_data, tmp_path, sampling):
    changes = {"max_update": 60, "valid_interval_updates": 7, "save_interval_updates": 5, "clip_norm": 1.0}
    changes["subword_sampling"] = sampling
    assert run(train_command(tiny_data, tmp_path / "whole", **changes)).returncode == 0
    command = train_command(tiny_data, tmp_path / "killed", **changes)
    words = command[command.index("train") :]
    steps = []
    for place, times in (("update", 13), ("checkpoint", 21), ("log", 11)):
        killed = run([sys.executable, "-c", KILLS_ITSELF, place, str(times), *words])
        assert killed.returncode == -signal.SIGKILL
        steps.append(saved_steps(tmp_path / "killed")[-1])
    assert 0 < steps[0] < steps[1] < steps[2] < 60
    assert run(command).returncode == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")
    assert log_without_times(tmp_path / "whole") == log_without_times(tmp_path / "killed")
    assert read_meta(resolve_checkpoint(tmp_path / "whole", "last")) == read_meta(
        resolve_checkpoint(tmp_path / "killed", "last")
    )


RANDOM_MOMENTS = """
import json, os, random, shutil, signal, sys, time
from fasttfm.__main__ import command
import fasttfm.training.run, fasttfm.cli.train

def started(out):
    child = os.fork()
    if child:
        return child
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    sys.argv = ["fasttfm", *words, "--out", out]
    os._exit(command())

whole, killed, seed, words = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
began = time.monotonic()
assert os.waitpid(started(whole), 0)[1] == 0
duration = time.monotonic() - began
draw = random.Random(seed)
moments, statuses = [], []
while len(statuses) < 6 or signal.SIGKILL not in statuses:
    if statuses and signal.SIGKILL not in statuses:  # the machine is quicker than it was: the run ended by itself
        shutil.rmtree(killed)
        duration /= 2
    child = started(killed)
    moments.append(round(draw.uniform(0.1, 0.7), 3))
    time.sleep(moments[-1] * duration)
    os.kill(child, signal.SIGKILL)
    statuses.append(os.waitpid(child, 0)[1])
assert os.waitpid(started(killed), 0)[1] == 0
print(json.dumps({"moments": moments, "killed": statuses.count(signal.SIGKILL)}))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_kill_9_at_random_moments_ends_in_the_same_bits(tmp_path, tiny_data):
    seed = int(os.environ.get("FASTTFM_KILL_SEED") or int.from_bytes(os.urandom(3), "big"))
    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    changes = {"max_update": 60, "valid_interval_updates": 7, "save_interval_updates": 2, "clip_norm": 1.0}
    words = train_command(tiny_data, tmp_path, **changes)
    words = words[words.index("train") :]
    command = [sys.executable, "-c", RANDOM_MOMENTS, whole, killed, str(seed), *words]
    done = run(command)
    print(f"FASTTFM_KILL_SEED={seed}", done.stdout)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["killed"] >= 1
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")
    assert log_without_times(tmp_path / "whole") == log_without_times(tmp_path / "killed")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_update_saves_and_says_how_to_go_on(tiny_data, tmp_path, number):
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
    assert last.endswith("which is saved: run the same command again to go on")
    assert "Traceback" not in stderr
    (step,) = saved_steps(tmp_path / "M")
    assert f"update {step:,}," in last
    repeated = run(train_command(tiny_data, tmp_path / "M", **{**changes, "max_update": step + 3}))
    assert repeated.returncode == 0
    assert f"going on from update {step:,}" in repeated.stderr


def test_a_second_ctrl_c_stops_at_once_and_a_second_sigterm_does_not():
    with Interruption() as interruption:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert interruption.requested
        with pytest.raises(Stopped) as stopped:
            signal.raise_signal(signal.SIGINT)
    assert stopped.value.number == signal.SIGTERM


def test_only_the_first_signal_interrupts_what_may_be_interrupted():
    unwound = []

    def block():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            unwound.append(True)

    with Interruption() as interruption, interruption.at_once(), pytest.raises(Stopped):
        block()
    assert unwound
    assert interruption.requested


def test_ctrl_c_while_validating_saves_and_validates_when_it_goes_on(tiny_data, tiny_config, tmp_path, monkeypatch):
    data = PreparedData.open(tiny_data)
    config = tiny_config(valid_interval_updates=4, max_update=8)
    prepare_model_dir(tmp_path / "M", config, data)

    def interrupted(model, *rest):
        raise KeyboardInterrupt

    trainer = make_trainer(config, data, tmp_path / "M")
    trainer.validator = interrupted
    with pytest.raises(KeyboardInterrupt, match="after update 4, which is saved"):
        trainer.run()
    assert saved_steps(tmp_path / "M") == [4]
    train(config.to_values(), tiny_data, tmp_path / "M", CPU)
    assert [record["step"] for record in read_log(tmp_path / "M") if record["kind"] == "valid"] == [4, 8]


def test_patience_stops_and_survives_a_restart(tiny_data, tiny_values, tmp_path):
    """With a learning rate that never moves the weights, no validation after the first is better."""
    changes = {"lr": 1e-30, "valid_bleu": False, "valid_interval_updates": 2, "save_interval_updates": 2}
    train(tiny_values(max_update=4, patience=3, **changes), tiny_data, tmp_path / "M", CPU)
    outcome = train(tiny_values(max_update=100, patience=3, **changes), tiny_data, tmp_path / "M", CPU)
    assert outcome.reason == "3 validations without improvement (patience 3)"
    assert saved_steps(tmp_path / "M")[-1] == 8
    assert read_meta(resolve_checkpoint(tmp_path / "M", "last"))["best_step"] == 2


def test_max_epoch_and_max_minutes_stop(tiny_data, tiny_values, tmp_path):
    outcome = train(tiny_values(max_update=1000, max_epoch=2), tiny_data, tmp_path / "epochs", CPU)
    assert outcome.reason == "max_epoch 2 is reached"
    batches = TokenBatches(PreparedData.open(tiny_data).train, TINY["max_tokens"])
    assert saved_steps(tmp_path / "epochs")[-1] == 2 * len(batches)
    outcome = train(tiny_values(max_update=10**6, max_minutes=0.02), tiny_data, tmp_path / "minutes", CPU)
    assert outcome.reason == "max_minutes 0.02 are over"


def test_a_cosine_over_minutes_ends_with_them(tiny_data, tiny_values, tmp_path, monkeypatch):
    """By a clock that goes on by a second when the trainer looks at it."""
    moments = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(moments)), perf_counter=time.perf_counter)
    monkeypatch.setattr("fasttfm.training.trainer.time", clock)
    recipe = {"schedule": "cosine-minutes", "warmup_updates": 0, "lr": 0.01, "max_update": 10**6, "log_interval": 1}
    values = tiny_values(**recipe, max_minutes=0.5)
    assert train(values, tiny_data, tmp_path / "M", CPU).reason == "max_minutes 0.5 are over"
    rates = [record["lr"] for record in read_log(tmp_path / "M") if record["kind"] == "train"]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.009
    assert 0 < rates[-1] < 0.0005
    with pytest.raises(UserError, match=r"training.max_minutes 0.5, now it is 1"):
        train(tiny_values(**recipe, max_minutes=1.0), tiny_data, tmp_path / "M", CPU)


def test_the_best_checkpoint_outlives_newer_ones(tiny_data, tiny_config, tmp_path):
    """Scores fall after update 2; its checkpoint stays although only one newest is kept."""
    data = PreparedData.open(tiny_data)
    config = tiny_config(valid_interval_updates=2, save_interval_updates=2, keep_interval_updates=1, max_update=8)
    prepare_model_dir(tmp_path, config, data)
    trainer = make_trainer(config, data, tmp_path)
    from fasttfm.training.translation import Validation

    losses = iter([3.0, 4.0, 5.0, 6.0])
    trainer.validator = lambda model, *rest: Validation(loss=1.0, nll=next(losses), bleu=None)
    trainer.run()
    assert saved_steps(tmp_path) == [2, 8]
    assert resolve_checkpoint(tmp_path, "best") == step_folder(tmp_path, 2)


def test_the_moving_average_is_what_is_saved(tiny_data, tiny_config, tmp_path):
    data = PreparedData.open(tiny_data)
    config = tiny_config(ema_decay=0.5, max_update=3, valid_interval_updates=0)
    prepare_model_dir(tmp_path, config, data)
    trainer = make_trainer(config, data, tmp_path)
    name = trainer.updates.optimization.names[0]
    seen = [trainer.updates.optimization.parameters[0].detach().clone()]
    step = trainer.updates.optimization.step

    def recorded(lr):
        result = step(lr)
        seen.append(trainer.updates.optimization.parameters[0].detach().clone())
        return result

    trainer.updates.optimization.step = recorded
    trainer.run()
    expected = seen[0]
    for raw in seen[1:]:
        expected = expected + 0.5 * (raw - expected)
    torch.testing.assert_close(weights_of(tmp_path)[name], expected)
    assert torch.equal(trainer.updates.optimization.parameters[0], seen[-1])


def test_a_diverged_run_stops_with_a_remedy_and_saves_no_nan(tiny_data, tiny_config, tmp_path):
    data = PreparedData.open(tiny_data)
    config = tiny_config(max_update=10, save_interval_updates=2, log_interval=1000, valid_interval_updates=0)
    prepare_model_dir(tmp_path, config, data)
    trainer = make_trainer(config, data, tmp_path)
    step = trainer.updates.optimization.step

    def poisoned(lr):
        result = step(lr)
        if trainer.updates.position.step == 3:
            with torch.no_grad():
                trainer.updates.optimization.parameters[0].fill_(float("nan"))
        return result

    trainer.updates.optimization.step = poisoned
    with pytest.raises(
        UserError, match=r"diverged: a weight is nan at update 4; the checkpoint of update 2 is kept.*--lr"
    ):
        trainer.run()
    assert saved_steps(tmp_path) == [2]


def poison(monkeypatch, steps, value=float("nan")):
    """Let the loss of the updates after these steps be no number."""
    from fasttfm.training.updates import Updates

    loss = Updates.loss

    def poisoned(self, batch):
        real, nll = loss(self, batch)
        return (real * value, nll * value) if self.position.step in steps else (real, nll)

    monkeypatch.setattr(Updates, "loss", poisoned)


@pytest.mark.parametrize("changes", [{"ema_decay": 0.9}, {"precision": "fp16", "update_freq": 2}], ids=["fp32", "fp16"])
def test_a_loss_that_is_no_number_is_skipped_and_named(tiny_data, tiny_values, tmp_path, monkeypatch, capsys, changes):
    changes = {"valid_interval_updates": 0, "log_interval": 1, "save_interval_updates": 1, **changes}
    with monkeypatch.context() as patch:
        poison(patch, (4, 7))
        train(tiny_values(max_update=8, **changes), tiny_data, tmp_path / "M", CPU)
        train(tiny_values(**changes), tiny_data, tmp_path / "M", CPU)
    before, after = (read_weights(step_folder(tmp_path / "M", step)) for step in (4, 5))
    raw = [read_state(step_folder(tmp_path / "M", step)).tensors for step in (11, 12)]
    if "ema_decay" not in changes:
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert raw[1][next(name for name in raw[1] if name.startswith("adam.step."))] == 10
    records = read_log(tmp_path / "M")
    skipped = [record for record in records if record["kind"] == "skipped"]
    assert [record["step"] for record in skipped] == [5, 8]
    per_update = changes.get("update_freq", 1)
    batches = TokenBatches(PreparedData.open(tiny_data).train, TINY["max_tokens"], 1, 256, together=per_update)
    expected = [pair for batch in batches.epoch(0)[4 * per_update : 5 * per_update] for pair in batch.tolist()]
    assert skipped[0]["pairs"] == expected
    trained = [record for record in records if record["kind"] == "train"]
    assert [record.get("skipped", 0) for record in trained] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert [record["step"] for record in trained if record["loss"] is None] == [5, 8]
    assert "warning: update 5 was skipped: the gradient of its " in capsys.readouterr().err


@pytest.mark.parametrize(("save", "good", "is_stopped"), [(5, 5, False), (1, 6, False), (1, 6, True), (4, 4, True)])
def test_losses_that_stay_no_number_end_the_run_with_the_last_good_checkpoint(
    tiny_data, tiny_values, tmp_path, monkeypatch, save, good, is_stopped
):
    """Which is of an update before the first that was skipped, whatever was saved and deleted since, also by a session
    that was stopped among them."""
    poison(monkeypatch, range(6, 100), float("inf"))
    changes = {"valid_interval_updates": 0, "skip_limit": 4, "save_interval_updates": save, "keep_interval_updates": 1}
    if is_stopped:
        train(tiny_values(max_update=9, **changes), tiny_data, tmp_path / "M", CPU)
        assert saved_steps(tmp_path / "M") == [good, 9]
    expected = rf"the gradient of the last 4 updates is nan at update 10; the checkpoint of update {good} is kept"
    with pytest.raises(UserError, match=expected):
        train(tiny_values(max_update=99, **changes), tiny_data, tmp_path / "M", CPU)
    assert saved_steps(tmp_path / "M") == [good]
    assert is_resumable(step_folder(tmp_path / "M", good))


def test_without_a_checkpoint_before_the_first_skipped_update_the_newest_is_kept(
    tiny_data, tiny_values, tmp_path, monkeypatch
):
    poison(monkeypatch, range(1, 100), float("inf"))
    changes = {"valid_interval_updates": 0, "skip_limit": 4, "save_interval_updates": 2}
    with pytest.raises(UserError, match="at update 5; the checkpoint of update 4 is kept"):
        train(tiny_values(max_update=99, **changes), tiny_data, tmp_path / "M", CPU)


def test_gradient_norms_are_logged_whether_or_not_they_are_clipped(tiny_data, tiny_values, tmp_path, monkeypatch):
    """And are the mean over the updates that changed something."""
    changes = {"valid_interval_updates": 0, "max_update": 3, "dropout": 0.0, "warmup_updates": 0, "lr": 1e-30}
    norms = {}
    for name, more in {
        "each": {"log_interval": 1},
        "three": {"log_interval": 3},
        "clipped": {"log_interval": 3, "clip_norm": 1e-3},
    }.items():
        train(tiny_values(**{**changes, **more}), tiny_data, tmp_path / name, CPU)
        norms[name] = [each["gradient_norm"] for each in read_log(tmp_path / name) if each["kind"] == "train"]
    assert all(norm > 0 for norm in norms["each"])
    assert norms["three"] == norms["clipped"] == [pytest.approx(sum(norms["each"]) / 3, rel=1e-5)]
    poison(monkeypatch, (1,))
    train(tiny_values(**changes, log_interval=3), tiny_data, tmp_path / "skipped", CPU)
    (record,) = [each for each in read_log(tmp_path / "skipped") if each["kind"] == "train"]
    assert record["gradient_norm"] == pytest.approx((norms["each"][0] + norms["each"][2]) / 2, rel=1e-5)


def test_a_loss_scale_that_collapses_ends_the_run(tiny_data, tiny_values, tmp_path, monkeypatch):
    """Every second gradient overflows: never many in a row, but the scale is halved again and again."""
    poison(monkeypatch, range(1, 200, 2), float("inf"))
    changes = {"valid_interval_updates": 0, "save_interval_updates": 0, "max_update": 99, "precision": "fp16"}
    with pytest.raises(UserError, match=r"the loss scale of fp16 is 0\.5 at update 34; no checkpoint was saved yet"):
        train(tiny_values(**changes), tiny_data, tmp_path / "M", CPU)


def test_a_loss_far_worse_than_guessing_is_pointed_out_once(tiny_data, tiny_values, tmp_path, capsys):
    train(tiny_values(lr=1e3, max_update=9, valid_interval_updates=0), tiny_data, tmp_path / "M", CPU)
    said = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(said) == 1
    assert "is far worse than guessing (4.2), training seems to diverge" in said[0]
    train(tiny_values(max_update=9, valid_interval_updates=0), tiny_data, tmp_path / "GOOD", CPU)
    assert "warning" not in capsys.readouterr().err


def test_a_finished_run_started_again_does_nothing_and_says_so(tiny_data, tiny_values, tmp_path):
    train(tiny_values(average_last=2), tiny_data, tmp_path / "M", CPU)
    before = json.dumps(read_log(tmp_path / "M"))
    weights = weights_of(tmp_path / "M")
    outcome = train(tiny_values(average_last=2), tiny_data, tmp_path / "M", CPU)
    assert outcome.reason == "max_update 12 is reached"
    assert json.dumps(read_log(tmp_path / "M")) == before
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_of(tmp_path / "M").items())


@pytest.mark.parametrize("left", [".config.yaml.unfinished", "config.yaml"])
def test_a_kill_while_the_directory_is_made_can_be_gone_on_from(tiny_data, tiny_config, tmp_path, monkeypatch, left):
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


def test_a_damaged_record_of_the_data_is_named(tiny_data, tiny_values, tmp_path):
    train(tiny_values(max_update=1), tiny_data, tmp_path / "MODEL")
    for broken in (b"", b"a: [", b"- 1"):
        (tmp_path / "MODEL" / "data.yaml").write_bytes(broken)
        with pytest.raises(UserError, match=r"MODEL.data\.yaml: is missing or damaged"):
            train(tiny_values(max_update=2), tiny_data, tmp_path / "MODEL")


def test_a_log_that_cannot_be_written_is_one_line_with_the_remedy(tiny_data, tiny_values, tmp_path, monkeypatch):
    def full(self, record):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fasttfm.training.log.RunLog.write", full)
    with pytest.raises(UserError, match=r"MODEL: No space left on device; checkpoints saved before .* make room"):
        train(tiny_values(), tiny_data, tmp_path / "MODEL")


@pytest.mark.parametrize("lines", [0, 3, 20])
def test_a_configuration_that_was_cut_off_is_named(tiny_data, tiny_values, tmp_path, lines):
    train(tiny_values(max_update=1), tiny_data, tmp_path / "MODEL")
    path = tmp_path / "MODEL" / "config.yaml"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    with pytest.raises(UserError, match=r"is cut off or of another version: it has no \w+\.\w+; copy"):
        train(tiny_values(max_update=2), tiny_data, tmp_path / "MODEL")


def test_memory_that_does_not_suffice_is_one_line_with_the_remedy(tiny_data, tiny_values, tmp_path, monkeypatch):
    def too_large(self, batch):
        return torch.empty(1 << 55)

    monkeypatch.setattr("fasttfm.training.updates.Updates.loss", too_large)
    with pytest.raises(UserError, match=r"out of memory with batches of .* --update-freq"):
        train(tiny_values(), tiny_data, tmp_path / "MODEL", torch.device("cpu"))


def test_a_flipped_bit_of_the_data_ends_a_run_before_it_saves_anything(tiny_data, tiny_values, tmp_path):
    """Both tokens are of the vocabulary: only the digest tells them apart."""
    copy = shutil.copytree(tiny_data, tmp_path / "DATA")
    content = bytearray((copy / "train.src.npy").read_bytes())
    content[-2] ^= 1
    (copy / "train.src.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"train\.src\.npy: is damaged or changed"):
        train(tiny_values(max_update=1, valid_interval_updates=0), copy, tmp_path / "MODEL", CPU)
    assert saved_steps(tmp_path / "MODEL") == []
