"""The trainer: learning, stopping, saving and averaging."""

import itertools
import time
import types
from dataclasses import replace

import pytest
import torch

from fasttfm.data.batches import TokenBatches
from fasttfm.data.prepared import PreparedData
from fasttfm.data.scoring import bleu
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.store.checkpoint import read_meta, read_weights
from fasttfm.store.model_dir import prepare_model_dir
from fasttfm.store.run_log import read_log
from fasttfm.store.steps import resolve_checkpoint, saved_steps, step_folder
from fasttfm.store.weights import load_weights, model_weights
from fasttfm.training.run import train
from fasttfm.training.translation import Translation
from fasttfm.translate.translator import Translator
from tests.model_dirs import write_model_dir

from .runs import CPU, make_trainer, records, weights_of
from .tiny import TINY


def test_a_run_learns_logs_validates_saves_and_averages(tiny_data, tiny_values, tmp_path):
    """Scores while training are those of translating with valid_beam, final ones those with the options of decoding."""
    saving = {"valid_interval_updates": 40, "save_interval_updates": 20, "average_last": 3}
    values = tiny_values(max_update=120, lr=1e-2, valid_beam=2, **saving)
    values["decoding"] = {"length_penalty": "avg"}
    out, data = tmp_path / "M", PreparedData.open(tiny_data)
    outcome = train(values, tiny_data, out, CPU)
    trained = records(out, "train")
    assert trained[-1]["loss"] < 0.7 * trained[0]["loss"]
    assert all(record["peak_memory"] > 50 << 20 for record in trained)
    assert [record["step"] for record in records(out, "valid")] == [40, 80, 120]
    assert outcome.reason == "max_update 120 is reached"

    hypotheses = (out / "hypotheses" / "valid.step-000000120.txt").read_text(encoding="utf-8").splitlines()
    assert hypotheses == Translator.from_directory(out, "120", beam=2).translate(data.valid_source_text)
    assert outcome.best.outputs == Translator.from_directory(out).translate(data.valid_source_text)
    finals = records(out, "final")
    assert outcome.score.bleu == max(finals, key=lambda record: record["step"])["bleu"], "with the final decoding"
    assert outcome.score.outputs == Translator.from_directory(out, "last").translate(data.valid_source_text)
    assert bleu(outcome.score.outputs, data.valid_target_text).value == outcome.score.bleu > 0

    last = read_log(out)[-1]
    assert (last["kind"], last["average_of"], last["bleu"]) == ("average", [80, 100, 120], outcome.average.bleu)
    assert outcome.average.loss != outcome.score.loss
    assert outcome.average.outputs == Translator.from_directory(out, "average").translate(data.valid_source_text)
    for name, tensor in weights_of(out, "average").items():
        parts = [read_weights(step_folder(out, step))[name] for step in (80, 100, 120)]
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


def test_another_seed_gives_another_run(tiny_data, tiny_values, tmp_path):
    weights = []
    for seed in (1, 2):
        train(tiny_values(seed=seed, max_update=1), tiny_data, tmp_path / str(seed), CPU)
        weights.append(weights_of(tmp_path / str(seed)))
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


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
    changes["keep_interval_updates"] = 1
    train(tiny_values(max_update=4, patience=3, **changes), tiny_data, tmp_path / "M", CPU)
    outcome = train(tiny_values(max_update=100, patience=3, **changes), tiny_data, tmp_path / "M", CPU)
    assert outcome.reason == "3 validations without improvement (patience 3)"
    assert saved_steps(tmp_path / "M") == [2, 8], "the best one outlives newer ones"
    assert resolve_checkpoint(tmp_path / "M", "best") == step_folder(tmp_path / "M", 2)
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


def test_a_student_of_fewer_layers_begins_with_its_teacher_s(tmp_path, capsys):
    """The only decoder layer is the teacher's second and last; all else is the teacher's."""
    teacher = write_model_dir(tmp_path / "teacher")
    model = Transformer.from_pretrained(teacher)
    weights, config = model_weights(model), replace(model.config, decoder_layers=1)
    student, task = Transformer(config), Translation()
    load_weights(student, task.weights_for(student, weights), teacher)
    for name, tensor in model_weights(student).items():
        assert torch.equal(tensor, weights[name.replace("decoder.layers.0", "decoder.layers.1")]), name
    assert capsys.readouterr().err == "--init-from: of 2 decoder layers 2\n"
    deep = Transformer(replace(config, decoder_layers=3))
    with pytest.raises(UserError, match=r"it has no decoder\.layers\.2"):
        load_weights(deep, task.weights_for(deep, weights), teacher)
