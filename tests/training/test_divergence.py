"""Non-finite losses and gradients: updates are skipped and named, and a run that does not recover stops."""

import pytest
import torch

from fasttfm.data.batches import TokenBatches
from fasttfm.data.prepared import PreparedData
from fasttfm.errors import UserError
from fasttfm.store.checkpoint import is_resumable, read_state, read_weights
from fasttfm.store.model_dir import prepare_model_dir
from fasttfm.store.steps import saved_steps, step_folder
from fasttfm.training.run import train
from fasttfm.training.updates import Updates

from .runs import CPU, make_trainer, records
from .tiny import TINY


def test_a_diverged_run_stops_with_a_remedy_and_saves_no_nan(tiny_data, tiny_config, tmp_path):
    data = PreparedData.open(tiny_data)
    config = tiny_config(max_update=10, save_interval_updates=2, log_interval=1000, valid_interval_updates=0)
    prepare_model_dir(tmp_path, config, data)
    trainer = make_trainer(config, data, tmp_path)
    step, said = trainer.updates.optimization.step, r"a weight is nan at update 4; the checkpoint of update 2 is kept"

    def poisoned(lr):
        result = step(lr)
        if trainer.updates.position.step == 3:
            with torch.no_grad():
                trainer.updates.optimization.parameters[0].fill_(float("nan"))
        return result

    trainer.updates.optimization.step = poisoned
    with pytest.raises(UserError, match=rf"diverged: {said}.*--lr"):
        trainer.run()
    assert saved_steps(tmp_path) == [2]


def poison(monkeypatch, steps, value=float("nan")):
    """Multiply the loss of the updates after these steps by value."""
    loss = Updates.loss

    def poisoned(self, batch):
        real, nll = loss(self, batch)
        return (real * value, nll * value) if self.position.step in steps else (real, nll)

    monkeypatch.setattr(Updates, "loss", poisoned)


@pytest.mark.parametrize("changes", [{"ema_decay": 0.9}, {"precision": "fp16", "update_freq": 2}], ids=["fp32", "fp16"])
def test_an_update_with_a_nan_loss_is_skipped_and_named(tiny_data, tiny_values, tmp_path, monkeypatch, capsys, changes):
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
    skipped, trained = (records(tmp_path / "M", kind) for kind in ("skipped", "train"))
    assert [record["step"] for record in skipped] == [5, 8]
    per_update = changes.get("update_freq", 1)
    batches = TokenBatches(PreparedData.open(tiny_data).train, TINY["max_tokens"], 1, 256, together=per_update)
    expected = [pair for batch in batches.epoch(0)[4 * per_update : 5 * per_update] for pair in batch.tolist()]
    assert skipped[0]["pairs"] == expected
    assert [record.get("skipped", 0) for record in trained] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert [record["step"] for record in trained if record["loss"] is None] == [5, 8]
    assert "warning: update 5 was skipped: the gradient of its " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("first", "save", "good", "at", "is_stopped"),
    [(6, 5, 5, 10, False), (6, 1, 6, 10, False), (6, 1, 6, 10, True), (6, 4, 4, 10, True), (1, 2, 4, 5, False)],
)
def test_a_loss_that_stays_infinite_ends_the_run_with_the_last_good_checkpoint(
    tiny_data, tiny_values, tmp_path, monkeypatch, first, save, good, at, is_stopped
):
    """That of the last update before the first skipped one, even if a session was stopped in between; else the newest.

    first: updates with a finite loss; save: interval; at: update at which the run ends.
    """
    poison(monkeypatch, range(first, 100), float("inf"))
    changes = {"valid_interval_updates": 0, "skip_limit": 4, "save_interval_updates": save, "keep_interval_updates": 1}
    if is_stopped:
        train(tiny_values(max_update=9, **changes), tiny_data, tmp_path / "M", CPU)
        assert saved_steps(tmp_path / "M") == [good, 9]
    expected = rf"the gradient of the last 4 updates is nan at update {at}; the checkpoint of update {good} is kept"
    with pytest.raises(UserError, match=expected):
        train(tiny_values(max_update=99, **changes), tiny_data, tmp_path / "M", CPU)
    assert saved_steps(tmp_path / "M") == [good]
    assert is_resumable(step_folder(tmp_path / "M", good))


def test_gradient_norms_are_logged_whether_or_not_they_are_clipped(tiny_data, tiny_values, tmp_path, monkeypatch):
    """Averaged over the updates that were not skipped."""
    changes = {"valid_interval_updates": 0, "max_update": 3, "dropout": 0.0, "warmup_updates": 0, "lr": 1e-30}
    norms = {}
    for name, interval, clip_norm in (("each", 1, 0.0), ("three", 3, 0.0), ("clipped", 3, 1e-3)):
        train(tiny_values(**changes, log_interval=interval, clip_norm=clip_norm), tiny_data, tmp_path / name, CPU)
        norms[name] = [record["gradient_norm"] for record in records(tmp_path / name, "train")]
    assert all(norm > 0 for norm in norms["each"])
    assert norms["three"] == norms["clipped"] == [pytest.approx(sum(norms["each"]) / 3, rel=1e-5)]
    poison(monkeypatch, (1,))
    train(tiny_values(**changes, log_interval=3), tiny_data, tmp_path / "skipped", CPU)
    (record,) = records(tmp_path / "skipped", "train")
    assert record["gradient_norm"] == pytest.approx((norms["each"][0] + norms["each"][2]) / 2, rel=1e-5)


def test_a_loss_scale_that_collapses_ends_the_run(tiny_data, tiny_values, tmp_path, monkeypatch):
    """Every second gradient overflows: never many in a row, but each halves the scale."""
    poison(monkeypatch, range(1, 200, 2), float("inf"))
    changes = {"valid_interval_updates": 0, "save_interval_updates": 0, "max_update": 99, "precision": "fp16"}
    with pytest.raises(UserError, match=r"the loss scale of fp16 is 0\.5 at update 34; no checkpoint was saved yet"):
        train(tiny_values(**changes), tiny_data, tmp_path / "M", CPU)
