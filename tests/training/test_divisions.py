"""--workers time: trials of all divisions of the cores, then training with the fastest."""

import subprocess
import types

import pytest

from fasttfm.cli import divisions, train
from fasttfm.cli.divisions import Division, fastest_division, replaced
from fasttfm.cli.main import main
from fasttfm.errors import UserError


def test_flags_take_the_place_of_those_given(monkeypatch):
    """In a trial's folder there is nothing to resume, so --resume-with would be refused."""
    given = ["train", "--out", "M", "--workers=time", "--quiet", "--workers", "time", "--data", "--out"]
    changed = ["train", "--quiet", "--data", "--out", "T", "--workers", "2"]
    assert replaced(given, {"--out": "T", "--workers": "2"}) == changed
    commands, failed = [], types.SimpleNamespace(stderr="", returncode=1)
    monkeypatch.setattr(divisions, "run_to_end", lambda command, **options: (commands.append(command), failed)[1])
    divisions._target_tokens_per_second(["train", "--resume-with", "lr=1e-4", "--resume-with=min_lr=0", "--data", "D"])
    assert commands[0][3:6] == ["train", "--data", "D"]


def test_the_fastest_that_can_train_is_taken_and_all_are_told(monkeypatch):
    assert divisions.divisions(8) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert divisions.divisions(6) == [(6, 1), (3, 2)]
    speeds = {"4": 100.0, "2": 300.0, "1": "--data D: no such folder"}
    tried = []

    def speed(arguments):
        tried.append(arguments)
        return speeds[arguments[arguments.index("--workers") + 1]]

    monkeypatch.setattr(divisions, "_target_tokens_per_second", speed)
    told = []
    assert fastest_division(["train", "--workers", "time"], 4, told.append) == Division(2, 2)
    assert tried[1] == ["train", "--workers", "2", "--threads", "2"]
    assert told == [
        "4 workers of 1 thread: 100 target tokens/s",
        "2 workers of 2 threads: 300 target tokens/s",
        "1 worker of 4 threads: cannot train (--data D: no such folder)",
    ]
    speeds.update({"4": "killed", "2": "killed"})
    with pytest.raises(UserError, match="no division of the cores can train: --data D: no such folder"):
        fastest_division(["train"], 4, told.append)
    assert fastest_division(["train"], 1, told.append) == Division(1, 1), "nothing to choose from, nothing to time"


@pytest.mark.parametrize(("speeds", "median"), [([1, 9, 5, 6, 7, 8], 6.5), ([4, 6], 5), ([], "why")])
def test_an_epoch_may_be_shorter_than_a_trial(speeds, median, monkeypatch):
    done = subprocess.CompletedProcess([], 0, None, "first\nwhy\n")
    monkeypatch.setattr(divisions, "run_to_end", lambda command, **options: done)
    log = [{"kind": "train", "tokens_per_second": speed} for speed in speeds]
    monkeypatch.setattr("fasttfm.store.run_log.read_log", lambda out: [*log, {"kind": "valid"}])
    assert divisions._target_tokens_per_second(["train"]) == median


def test_a_run_begins_anew_with_the_fastest_division(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    launched = []
    monkeypatch.setattr(train, "usable_cores", lambda: 4)
    monkeypatch.setattr("fasttfm.cli.workers.usable_cores", lambda: 4)
    monkeypatch.setattr(train, "time", types.SimpleNamespace(monotonic=lambda: 1e6))
    monkeypatch.setattr(train, "fastest_division", lambda *_: Division(2, 2))
    monkeypatch.setattr(train, "launch", lambda *given: launched.append(given) or 0)
    words = ["--data", "none", "--out", str(tmp_path / "M")]
    assert main(["train", *words, "--workers", "time"]) == 0
    assert launched == [(2, ["train", *words, "--workers", "2", "--threads", "2"], 1e6)]
