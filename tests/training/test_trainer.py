"""The trainer: gradients, stopping, saving and averaging."""

import itertools
import time
import types

import pytest
import torch

from fasttfm.data.batches import TokenBatches
from fasttfm.data.prepared import PreparedData
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.store.checkpoint import read_meta, read_weights
from fasttfm.store.model_dir import prepare_model_dir
from fasttfm.store.run_log import read_log
from fasttfm.store.steps import resolve_checkpoint, saved_steps, step_folder
from fasttfm.training.run import train
from fasttfm.translate.translator import Translator

from .runs import CPU, assert_same_weights, log_without_times, make_trainer, records, weights_of
from .tiny import TINY


def test_a_run_learns_logs_validates_saves_and_averages(tiny_data, tiny_values, tmp_path):
    values = tiny_values(max_update=120, valid_interval_updates=40, save_interval_updates=20, average_last=3, lr=1e-2)
    outcome = train(values, tiny_data, tmp_path / "M", CPU)
    losses = [record["loss"] for record in records(tmp_path / "M", "train")]
    assert losses[-1] < 0.7 * losses[0]
    scores = records(tmp_path / "M", "valid")
    assert [record["step"] for record in scores] == [40, 80, 120]
    assert all(0 <= record["bleu"] <= 100 for record in scores)
    hypotheses = (tmp_path / "M" / "hypotheses" / "valid.step-000000120.txt").read_text().splitlines()
    assert len(hypotheses) == 12
    finals = records(tmp_path / "M", "final")
    assert outcome.score.bleu == max(finals, key=lambda record: record["step"])["bleu"], "with the final decoding"
    assert outcome.average is not None
    assert outcome.reason == "max_update 120 is reached"
    last = read_log(tmp_path / "M")[-1]
    assert last["kind"] == "average"
    assert last["average_of"] == [80, 100, 120]
    assert last["bleu"] == outcome.average.bleu
    assert outcome.average.loss != outcome.score.loss
    translator = Translator.from_directory(tmp_path / "M", "average")
    assert outcome.average.outputs == translator.translate(PreparedData.open(tiny_data).valid_source_text)
    averaged = weights_of(tmp_path / "M", "average")
    for name, tensor in averaged.items():
        parts = [read_weights(step_folder(tmp_path / "M", step))[name] for step in (80, 100, 120)]
        torch.testing.assert_close(tensor, torch.stack(parts).mean(0))


def test_learned_positions_are_trained_and_must_be_enough(tiny_data, tiny_values, tmp_path):
    values = tiny_values(positional_encoding="learned", max_length=64, max_sentence_tokens=63, max_update=4)
    train(values, tiny_data, tmp_path / "M", CPU)
    trained, drawn = weights_of(tmp_path / "M"), Transformer.from_pretrained(tmp_path / "M", "4").config
    assert drawn.positions == 64
    for side in ("source", "target"):
        assert trained[f"{side}_positions.weight"].shape == (64, 32)
    for changes, message in (
        ({"max_length": 63, "max_sentence_tokens": 63}, "--max-sentence-tokens needs 64 learned positions"),
        ({"max_length": 4, "max_sentence_tokens": 3}, "a validation sentence needs"),
        ({"max_length": 64, "subword_sampling": 0.1}, "--subword-sampling, whose draws have up to --max-tokens"),
    ):
        with pytest.raises(UserError, match=message):
            train(tiny_values(positional_encoding="learned", **changes), tiny_data, tmp_path / "N", CPU)


def test_one_seed_gives_the_same_run_twice_and_another_does_not(tiny_data, tiny_values, tmp_path):
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        train(tiny_values(seed=seed), tiny_data, tmp_path / name, CPU)
    assert_same_weights(tmp_path / "one", tmp_path / "same")
    assert log_without_times(tmp_path / "one") == log_without_times(tmp_path / "same")
    one, other = weights_of(tmp_path / "one"), weights_of(tmp_path / "other")
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_gradient_is_the_mean_over_all_target_tokens_of_the_update(tiny_data, tiny_config, tmp_path):
    """Accumulation over 3 batches of different sizes equals the gradient of the summed loss over all tokens."""
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
    total = sum(trainer.model.batch_loss(batch, label_smoothing=0.1)[0] for batch in chosen)
    (total / sum(batch.target_tokens for batch in chosen)).backward()
    for gradient, parameter in zip(seen["gradients"], trainer.model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_rehearsing_the_largest_batch_changes_nothing(tiny_data, tiny_config, tmp_path):
    trainer = make_trainer(tiny_config(), PreparedData.open(tiny_data), tmp_path)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    state = torch.get_rng_state()
    trainer.updates.rehearse()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert (trainer.updates.position.step, trainer.updates.position.batch) == (0, 0)


@pytest.mark.parametrize("is_gpu", [True, False])
def test_memory_that_does_not_suffice_ends_in_a_remedy(tiny_data, tiny_values, tmp_path, monkeypatch, is_gpu):
    def exhausted(*args, **settings):
        if is_gpu:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(1 << 55)

    monkeypatch.setattr(Transformer, "batch_loss", exhausted)
    remedy = "out of memory with batches of 256 tokens: give --max-tokens 128 --update-freq 2"
    with pytest.raises(UserError, match=remedy):
        train(tiny_values(), tiny_data, tmp_path / "M", CPU)


def test_patience_stops_and_survives_a_restart(tiny_data, tiny_values, tmp_path):
    """With a vanishing learning rate no validation after the first is better."""
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


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by a second per reading."""
    moments = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(moments)), perf_counter=time.perf_counter)
    for module in ("run", "trainer"):
        monkeypatch.setattr(f"fasttfm.training.{module}.time", clock)
    return clock


def test_the_minutes_begin_with_the_command_in_every_session(tiny_data, tiny_values, tmp_path, clock):
    seconds, step = [], 0
    for minutes in (2.0, 4.0):
        values = tiny_values(max_update=10**6, max_minutes=minutes, log_interval=1)
        outcome = train(values, tiny_data, tmp_path / "M", CPU, started=clock.monotonic() - 100)
        assert outcome.reason == f"max_minutes {minutes:g} are over"
        trained = records(tmp_path / "M", "train")
        seconds += [record["seconds"] for record in trained if record["step"] > step]
        step = trained[-1]["step"]
    assert 100 < seconds[0] < 120  # 20 seconds of updates beside 100 of the command, in both sessions
    assert seconds[-1] > 220
    assert max(later - earlier for earlier, later in itertools.pairwise(seconds)) > 100
    assert 20 / 4 < len(seconds) < 40


def test_a_cosine_over_minutes_ends_with_them(tiny_data, tiny_values, tmp_path, clock):
    recipe = {"schedule": "cosine-minutes", "warmup_updates": 0, "lr": 0.01, "max_update": 10**6, "log_interval": 1}
    values = tiny_values(**recipe, max_minutes=0.5)
    assert train(values, tiny_data, tmp_path / "M", CPU).reason == "max_minutes 0.5 are over"
    rates = [record["lr"] for record in records(tmp_path / "M", "train")]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.009
    assert 0 < rates[-1] < 0.0005
    with pytest.raises(UserError, match=r"training.max_minutes 0.5, now it is 1"):
        train(tiny_values(**recipe, max_minutes=1.0), tiny_data, tmp_path / "M", CPU)


def test_the_best_checkpoint_outlives_newer_ones(tiny_data, tiny_config, tmp_path):
    """Scores fall after update 2, whose checkpoint is kept besides the newest."""
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
    config = tiny_config(ema_decay=0.75, max_update=3, valid_interval_updates=0)
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
        expected = expected + 0.25 * (raw - expected)
    torch.testing.assert_close(weights_of(tmp_path)[name], expected)
    assert torch.equal(trainer.updates.optimization.parameters[0], seen[-1])
