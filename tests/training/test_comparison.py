"""Plots of several runs."""

import json
import re

import pytest

from fasttfm.cli.main import main
from fasttfm.errors import UserError
from fasttfm.training import plots
from fasttfm.training.plots import plot_runs


def run_of(folder, bleu=True, steps=(10, 20, 30)):
    folder.mkdir()
    lines = []
    for step in steps:
        lines.append({"kind": "train", "step": step, "loss": 5 - step / 10, "nll": 4 - step / 10, "seconds": step * 6})
        valid = {"kind": "valid", "step": step, "loss": 5, "nll": 3.5, "seconds": step * 6 + 1}
        lines.append(valid | ({"bleu": step / 2} if bleu else {}))
    (folder / "train.log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_several_runs_are_one_picture(tmp_path, capsys, ending):
    runs = [run_of(tmp_path / "pre$norm"), run_of(tmp_path / "_post", bleu=False)]
    assert main(["plot", *map(str, runs), "--over", "minutes", "--out", str(tmp_path / f"curves.{ending}")]) == 0
    content = (tmp_path / f"curves.{ending}").read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert capsys.readouterr().out.strip() == str(tmp_path / f"curves.{ending}")


def test_what_is_drawn_are_the_records(tmp_path, monkeypatch):
    """The x axis is the step or seconds / 60; BLEU, if any, has a panel; the legend names the runs."""
    drawn = []
    draw = plots._draw_runs
    monkeypatch.setattr(plots, "_draw_runs", lambda figure, *rest: (draw(figure, *rest), drawn.append(figure)))
    runs = [run_of(tmp_path / "one"), run_of(tmp_path / "two", steps=(40,))]
    for over, first in (("updates", [10, 20, 30]), ("minutes", [1, 2, 3])):
        plot_runs(runs, tmp_path / "curves.png", over)
        losses, bleu = drawn[-1].axes
        assert list(losses.lines[0].get_xdata()) == first
        assert list(losses.lines[0].get_ydata()) == [3, 2, 1]
        assert list(bleu.lines[0].get_ydata()) == [5, 10, 15]
        assert [text.get_text() for text in drawn[-1].legends[0].get_texts()] == ["one", "two"]
    plot_runs([run_of(tmp_path / "loss alone", bleu=False)], tmp_path / "curves.png")
    assert len(drawn[-1].axes) == 1


def test_wrong_arguments_and_logs_are_refused(tmp_path):
    run = run_of(tmp_path / "M")
    for runs, target, words in (
        ([run], "curves.pdf", "ends in .png or .svg"),
        ([tmp_path / "none"], "curves.png", "has no record"),
        ([run] * 11, "curves.png", "at most 10"),
        ([run], "none/curves.png", "cannot be written"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            plot_runs(runs, tmp_path / target)
