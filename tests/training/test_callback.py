"""Callbacks get the log's records and complete checkpoints, which are written during training."""

import threading

import pytest
from waiting import PATIENCE

from fasttfm.store.checkpoint import is_resumable, save_checkpoint
from fasttfm.store.run_log import read_log
from fasttfm.store.steps import step_folder
from fasttfm.training.callback import Callback
from fasttfm.training.run import train
from fasttfm.training.saving import Saving

from .runs import records

SAVE = "fasttfm.training.saving.save_checkpoint"


class Silent(Callback):
    """Hears nothing."""


class Heard(Callback):
    def __init__(self):
        self.logged, self.validated, self.saved = [], [], []

    def on_log(self, record):
        self.logged.append(dict(record))

    def on_validate(self, record, translations):
        self.validated.append((dict(record), list(translations)))

    def on_save(self, checkpoint):
        assert is_resumable(checkpoint)
        self.saved.append(checkpoint.name)


def test_callbacks_hear_what_the_log_says(tiny_data, tiny_values, tmp_path):
    heard = Heard()
    train(tiny_values(average_last=2), tiny_data, tmp_path / "M", callbacks=[heard, Silent()])
    assert heard.logged == records(tmp_path / "M", "train")
    validated = [record for record in read_log(tmp_path / "M") if record["kind"] in ("valid", "final", "average")]
    assert [record for record, _ in heard.validated] == validated
    assert {len(translations) for _, translations in heard.validated} == {12}
    assert heard.saved[-1] == "step-000000012"
    assert heard.saved == sorted(set(heard.saved))


def test_training_goes_on_while_a_checkpoint_is_written(tiny_data, tiny_values, tmp_path, monkeypatch):
    """The first checkpoint waits until a later update has been logged."""
    logged = threading.Event()
    order = []

    def slow(folder, *rest):
        assert logged.wait(timeout=PATIENCE)
        order.append(folder.name)
        save_checkpoint(folder, *rest)

    class Listener(Callback):
        def on_log(self, record):
            order.append(record["step"])
            if record["step"] == 6:
                logged.set()

    monkeypatch.setattr(SAVE, slow)
    values = tiny_values(save_interval_updates=5, valid_interval_updates=0)
    train(values, tiny_data, tmp_path / "slow", callbacks=[Listener()])
    assert order.index(6) < order.index("step-000000005") < order.index("step-000000010")
    monkeypatch.undo()
    train(values, tiny_data, tmp_path / "M")
    for step in (5, 10, 12):
        files = [step_folder(tmp_path / name, step) / "model.safetensors" for name in ("slow", "M")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_one_at_a_time_and_errors_are_told_once(tmp_path):
    saving = Saving(model_dir=tmp_path, updates=None)
    ended = []

    def write(name):
        def run():
            assert len(ended) == int(name)
            ended.append(name)
            return tmp_path / name

        return run

    for number in range(5):
        saving.write(write(str(number)))
    assert [path.name for path in saving.written(wait=True)] == list("01234")
    saving.write(write("9"))
    with pytest.raises(AssertionError):
        saving.write(write("5"))
    saving.write(write("9"))
    saving.close()
    with pytest.raises(AssertionError):
        saving.written()
    assert saving.written(wait=True) == []
