"""The log of a run, its plot, TensorBoard and progress."""

import io
import json
import os
import sys
import threading

import pytest
from forked import run

from fasttfm.errors import UserError
from fasttfm.store.run_log import read_log
from fasttfm.training.log import RunLog
from fasttfm.training.plots import plot_curve
from fasttfm.training.progress import Progress, duration, hushed, tell
from fasttfm.training.tensorboard import TensorBoard

from .tiny import words

TRAIN = {"kind": "train", "epoch": 1, "loss": 4.0, "nll": 3.5, "lr": 1e-3, "tokens_per_second": 9000.0, "padding": 0.04}
VALID = {"kind": "valid", "epoch": 1, "loss": 4.0, "nll": 3.0, "bleu": 20.0}


def write(folder, steps, resume_step=0, tensorboard=False, bleu=20.0):
    log = RunLog(folder, resume_step)
    events = TensorBoard(folder / "tensorboard", resume_step) if tensorboard else None
    for step in steps:
        log.write({**TRAIN, "step": step})
        log.write({**VALID, "step": step, "bleu": bleu})
        if events is not None:
            events.on_log({**TRAIN, "step": step})
            events.on_validate({**VALID, "step": step, "bleu": bleu}, [])
    assert {record["step"] for record in read_log(folder)} >= {*steps}, "a kill loses no record"
    log.flush()
    log.close()


def kinds_and_steps(folder):
    return [(record["kind"], record["step"]) for record in read_log(folder)]


def test_resuming_drops_the_records_behind_the_checkpoint(tmp_path):
    write(tmp_path, [1, 2, 3])
    write(tmp_path, [3, 4], resume_step=2)
    assert [record["step"] for record in read_log(tmp_path) if record["kind"] == "train"] == [1, 2, 3, 4]


def test_the_settings_that_a_resume_changed_stay_in_the_log(tmp_path):
    write(tmp_path, [1, 2])
    log = RunLog(tmp_path, 2)
    log.write({"kind": "resumed", "step": 2, "lr": 0.1})
    log.write({**TRAIN, "step": 3})
    log.close()
    RunLog(tmp_path, 3).close()
    assert kinds_and_steps(tmp_path)[-2:] == [("resumed", 2), ("train", 3)]
    RunLog(tmp_path, 1).close()
    assert kinds_and_steps(tmp_path) == [("train", 1), ("valid", 1)]


def test_a_truncated_line_is_dropped(tmp_path):
    write(tmp_path, [1, 2])
    with (tmp_path / "train.log.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert len(read_log(tmp_path)) == 4
    write(tmp_path, [3], resume_step=2)
    lines = (tmp_path / "train.log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\n", b"\0" * 100 + b"\n", b"[1]\n3\nnull\n", b'{"a": 1}\n', b'{"kind": "train"}\n']
)
def test_a_damaged_line_is_skipped(tmp_path, damage):
    write(tmp_path, [1])
    with (tmp_path / "train.log.jsonl").open("ab") as file:
        file.write(damage)
    write(tmp_path, [2], resume_step=1)
    assert kinds_and_steps(tmp_path) == [("train", 1), ("valid", 1), ("train", 2), ("valid", 2)]


def test_tensorboard_gets_the_same_numbers(tmp_path):
    write(tmp_path, [1, 2], tensorboard=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("valid/bleu")] == [(1, 20.0), (2, 20.0)]
    assert [event.value for event in events.Scalars("train/loss")] == [4.0, 4.0]


def test_a_new_run_moves_existing_records_to_another_file(tmp_path):
    write(tmp_path, [1, 2])
    before = (tmp_path / "train.log.jsonl").read_bytes()
    write(tmp_path, [1])
    write(tmp_path, [7])
    assert (tmp_path / "train.log.1.jsonl").read_bytes() == before
    assert [record["step"] for record in read_log(tmp_path)] == [7, 7]
    assert (tmp_path / "train.log.2.jsonl").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_tensorboard_raises_for_a_full_disk(tmp_path):
    """In the caller's thread, not with a traceback from another thread."""
    threads = threading.enumerate()
    events = TensorBoard(tmp_path / "tensorboard", 0)
    assert set(threading.enumerate()) <= set(threads)
    with open("/dev/full", "ab", buffering=0) as full:
        events._writer = type(events._writer)(full)
        with pytest.raises(OSError, match="No space left"):
            events.on_log({**TRAIN, "step": 1})
        events.close()


def test_a_closed_pipe_does_not_stop_a_run(tmp_path):
    """Later output is discarded, and the interpreter exits without an error message."""
    program = (
        "import sys; from fasttfm.training.progress import Progress, tell\n"
        "progress = Progress()\n"
        "for _ in range(3): progress.say('line'); tell('another')\n"
        "progress.close(); sys.exit(7)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    assert run([sys.executable, "-c", program], stderr=writer).returncode == 7
    os.close(writer)


def test_the_curve_is_a_picture_of_training_and_validation(tmp_path):
    write(tmp_path, [100, 200, 300])
    with_bleu = plot_curve(tmp_path).read_bytes()
    assert with_bleu.startswith(b"\x89PNG")
    write(tmp_path / "..", [100, 200, 300], bleu=None)
    without = plot_curve(tmp_path / "..", tmp_path / "other.png").read_bytes()
    assert without.startswith(b"\x89PNG")
    assert without != with_bleu


def test_there_is_no_curve_without_records(tmp_path):
    with pytest.raises(UserError, match=r"train\.log\.jsonl: holds no record"):
        plot_curve(tmp_path)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    progress = Progress(stream)
    progress.update(99, 0.4, 10)
    progress.train({**TRAIN, "step": 100}, 0.5, 75)
    progress.say("validation loss 3.0")
    progress.close()
    first, second = stream.getvalue().splitlines()
    assert first == " 50%, update 100, epoch 1, loss 4.000, lr 1.00e-03, 9,000 tokens/s, 4% padding, 1:15 left"
    assert second == "validation loss 3.0"


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr("fasttfm.training.progress._SECONDS_BETWEEN_DRAWINGS", 0.0)
    stream = Terminal()
    progress = Progress(stream)
    progress.train({**TRAIN, "step": 100}, 0.5, 75)
    progress.update(100, 0.5, 75)
    progress.say("validation loss 3.0")
    progress.close()
    shown = stream.getvalue()
    assert "\r" in shown
    assert " 50%|" in shown
    assert "1:15 left, update 100, loss 4.000, lr 1.00e-03, 9,000 tokens/s, 4% padding" in shown
    assert "validation loss 3.0\n" in shown


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (75.4, "1:15"), (3725, "1:02:05"), (-3, "0:00")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_a_validation_after_the_checkpoint_is_dropped(tmp_path):
    write(tmp_path, [1, 2])
    RunLog(tmp_path, 2, validated=1).close()
    assert kinds_and_steps(tmp_path) == [("train", 1), ("valid", 1), ("train", 2)]


def test_a_curve_on_a_full_disk_is_one_line(tmp_path):
    write(tmp_path, [1, 2])
    with pytest.raises(UserError, match=r"nowhere.curve\.png: cannot be written"):
        plot_curve(tmp_path, tmp_path / "nowhere" / "curve.png")


def test_without_tensorboard_a_run_trains_with_a_hint(tiny_data, tmp_path, monkeypatch, capsys):
    from fasttfm.cli.main import main

    monkeypatch.setattr("fasttfm.training.recorder.find_spec", lambda name: None)
    arguments = words(tiny_data, tmp_path / "M", max_update=2, tensorboard=True, valid_interval_updates=0)
    assert main([*arguments, "--workers", "1"]) == 0
    assert 'pip install "./fasttfm[tensorboard]"' in capsys.readouterr().err
    assert not (tmp_path / "M" / "tensorboard").exists()


def test_hushed_prints_warnings_only(capsys):
    def stopped():
        with hushed():
            tell("a note")
            tell("warning: a warning")
            raise UserError("stopped")

    with pytest.raises(UserError):
        stopped()
    with hushed(False):
        tell("another note")
    assert capsys.readouterr().err == "warning: a warning\nanother note\n"
