"""The log of a run, its plots, TensorBoard and progress."""

import io
import json
import os
import re
import sys
from functools import partial

import pytest
from forked import run

from fasttfm.cli.main import main
from fasttfm.errors import UserError
from fasttfm.store.run_log import read_log
from fasttfm.training import plots
from fasttfm.training.log import RunLog
from fasttfm.training.plots import plot_curve, plot_runs
from fasttfm.training.progress import Progress, duration, hushed, tell
from fasttfm.training.tensorboard import TensorBoard

from .tiny import words

TRAIN = {"kind": "train", "epoch": 1, "loss": 4.0, "nll": 3.5, "lr": 1e-3, "tokens_per_second": 9000.0, "padding": 0.04}
VALID = {"kind": "valid", "epoch": 1, "loss": 4.0, "nll": 3.0, "bleu": 20.0}


def write(folder, steps, resume_step=0):
    log = RunLog(folder, resume_step)
    for step in steps:
        log.write({**TRAIN, "step": step})
        log.write({**VALID, "step": step})
    assert {record["step"] for record in read_log(folder)} >= {*steps}, "a kill loses no record"
    log.flush()
    log.close()


def kinds_and_steps(folder):
    return [(record["kind"], record["step"]) for record in read_log(folder)]


def test_resuming_drops_the_records_behind_the_checkpoint(tmp_path):
    """Changed settings belong to the checkpoint at which they changed; an interrupted validation is repeated."""
    write(tmp_path, [1, 2, 3])
    log = RunLog(tmp_path, 2)
    log.write({"kind": "resumed", "step": 2, "lr": 0.1})
    log.close()
    write(tmp_path, [3, 4], resume_step=2)
    assert [record["step"] for record in read_log(tmp_path) if record["kind"] == "train"] == [1, 2, 3, 4]
    for resume_step, validated, last in (
        (4, 3, [("valid", 3), ("train", 4)]),
        (2, None, [("valid", 2), ("resumed", 2)]),
        (1, None, [("train", 1), ("valid", 1)]),
    ):
        RunLog(tmp_path, resume_step, validated).close()
        assert kinds_and_steps(tmp_path)[-2:] == last


@pytest.mark.parametrize(
    "damage",
    [
        b'{"kind": "train", "st',
        b"\xff\xfe\n",
        b"\0" * 100 + b"\n",
        b"[1]\n3\nnull\n",
        b'{"a": 1}\n{"kind": "train"}\n',
    ],
)
def test_a_damaged_line_is_skipped_and_dropped_by_the_next_session(tmp_path, damage):
    write(tmp_path, [1])
    good = [("train", 1), ("valid", 1)]
    with (tmp_path / "train.log.jsonl").open("ab") as file:
        file.write(damage)
        if damage.endswith(b"\n"):  # and what follows it counts
            file.write(b'{"kind": "train", "step": 1}\n')
            good.append(("train", 1))
    assert kinds_and_steps(tmp_path) == good
    write(tmp_path, [2], resume_step=1)
    lines = (tmp_path / "train.log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1] * len(good) + [2, 2]


def test_a_new_run_moves_existing_records_to_another_file(tmp_path):
    write(tmp_path, [1, 2])
    before = (tmp_path / "train.log.jsonl").read_bytes()
    write(tmp_path, [1])
    write(tmp_path, [7])
    assert (tmp_path / "train.log.1.jsonl").read_bytes() == before
    assert [record["step"] for record in read_log(tmp_path)] == [7, 7]
    assert (tmp_path / "train.log.2.jsonl").exists()


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, 0)
    for step in (1, 2):
        board.on_log({**TRAIN, "step": step})
        board.on_validate({**VALID, "step": step}, [])
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("valid/bleu")] == [(1, 20.0), (2, 20.0)]
    assert [event.value for event in events.Scalars("train/loss")] == [4.0, 4.0]


def test_without_tensorboard_a_run_trains_with_a_hint(tiny_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fasttfm.training.recorder.find_spec", lambda name: None)
    arguments = words(tiny_data, tmp_path / "M", max_update=2, tensorboard=True, valid_interval_updates=0)
    assert main([*arguments, "--workers", "1"]) == 0
    assert 'pip install "./fasttfm[tensorboard]"' in capsys.readouterr().err
    assert not (tmp_path / "M" / "tensorboard").exists()


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


def test_progress_is_a_bar_on_a_terminal_and_plain_lines_elsewhere(monkeypatch):
    monkeypatch.setattr("fasttfm.training.progress._SECONDS_BETWEEN_DRAWINGS", 0.0)
    for is_terminal, told in (
        (True, "1:15 left, update 100, loss 4.000"),
        (False, " 50%, update 100, epoch 1, loss 4.000"),
    ):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        progress = Progress(stream)
        progress.train({**TRAIN, "step": 100}, 0.5, 75)
        progress.update(100, 0.5, 75)
        progress.say("validation loss 3.0")
        progress.close()
        assert told in stream.getvalue()
        assert "validation loss 3.0\n" in stream.getvalue()
        assert ("\r" in stream.getvalue()) == is_terminal


def test_durations_and_hushed_output(capsys):
    assert [duration(seconds) for seconds in (0, 75.4, 3725, -3)] == ["0:00", "1:15", "1:02:05", "0:00"]
    for quiet in (True, False):
        with hushed(quiet):
            tell("a note")
            tell("warning: a warning")
    assert capsys.readouterr().err == "warning: a warning\na note\nwarning: a warning\n"


def run_of(folder, bleu=True, steps=(10, 20, 30)):
    folder.mkdir()
    lines = []
    for step in steps:
        lines.append({"kind": "train", "step": step, "loss": 5 - step / 10, "nll": 4 - step / 10, "seconds": step * 6})
        valid = {"kind": "valid", "step": step, "loss": 5, "nll": 3.5, "seconds": step * 6 + 1}
        lines.append(valid | ({"bleu": step / 2} if bleu else {}))
    (folder / "train.log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_is_drawn_are_the_records(tmp_path, monkeypatch):
    """The x axis is the step or seconds / 60; BLEU, if any, has a panel."""
    drawn = []
    draw = plots._draw_runs
    monkeypatch.setattr(plots, "_draw_runs", lambda figure, *rest: (draw(figure, *rest), drawn.append(figure)))
    runs = [run_of(tmp_path / "one"), run_of(tmp_path / "two", steps=(40,))]
    for over, first in (("updates", [10, 20, 30]), ("minutes", [1, 2, 3])):
        words = [*map(str, runs), "--over", over, "--out", str(tmp_path / "curves.svg")]
        assert main(["plot", *words]) == 0
        assert (tmp_path / "curves.svg").read_bytes().startswith(b"<?xml")
        losses, bleu = drawn[-1].axes
        assert list(losses.lines[0].get_xdata()) == first
        assert list(losses.lines[0].get_ydata()) == [3, 2, 1]
        assert list(bleu.lines[0].get_ydata()) == [5, 10, 15]
    without = run_of(tmp_path / "loss alone", bleu=False)
    plot_runs([without], tmp_path / "curves.png")
    assert len(drawn[-1].axes) == 1
    assert plot_curve(runs[0]).read_bytes().startswith(b"\x89PNG")
    assert list(drawn[-1].axes[0].lines[1].get_ydata()) == [3.5] * 3


def test_what_cannot_be_drawn_is_one_line(tmp_path):
    run = run_of(tmp_path / "M")
    for draw, said in (
        (partial(plot_runs, [run], tmp_path / "curves.pdf"), "ends in .png or .svg"),
        (partial(plot_runs, [tmp_path / "none"], tmp_path / "curves.png"), "has no record"),
        (partial(plot_runs, [run], tmp_path / "none/curves.png"), "curves.png: cannot be written"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            draw()
