"""The speedrun: its commands are ones that fasttfm takes, its clock covers all of them, its preset fits its rules."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import speedrun
from benchmarks.measure import records
from fasttfm.cli.main import main
from fasttfm.presets import preset_section


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The commands of fasttfm that were given, none of them run."""
    given: list[list[str]] = []

    def fasttfm(words, **options):
        given.append(words)
        if words[0] == "train":
            out = Path(words[words.index("--out") + 1])
            out.mkdir()
            lines = [
                {"kind": "train", "step": step, "seconds": step / 5, "target_tokens": 100, "nll": 9 - step / 100}
                for step in (100, 200, 300, 400)
            ]
            (out / "train.log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        score = json.dumps({"bleu": 39.2, "bleu_signature": "nrefs:1"}) if words[0] == "score" else ""
        return subprocess.CompletedProcess(words, 0, score)

    monkeypatch.setattr(speedrun.end_to_end, "fasttfm", fasttfm)
    for name in ("train.en", "train.de", "valid.en", "valid.de"):
        (tmp_path / name).write_text("a\n")
    return given


def test_the_clock_covers_text_to_score_and_the_record_is_whole(tmp_path, commands, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["--text", str(tmp_path), "--seed", "3", "--results", str(tmp_path), "--note", "a test"]
    assert speedrun.main([*arguments, "--", "--max-update", "500"]) == 0
    assert [words[0] for words in commands] == ["prepare", "train", "translate", "score"]
    train = commands[1]
    assert train[train.index("--seed") + 1] == "3"
    assert train[train.index("--max-update") + 1] == "500"
    assert commands[2][-2:] == ["--checkpoint", "last"]
    (record,) = map(json.loads, (tmp_path / "speedrun.jsonl").read_text().splitlines())
    records.validate(record)
    assert (record["seed"], record["updates"], record["target_tokens"]) == (3, 400, 400)
    assert [*record["minutes_of"]] == ["prepare", "train", "translate", "score"]
    assert record["training_curve"] == [[200, 7], [400, 5]]
    assert "39.0 in 20 minutes is reached" in capsys.readouterr().out
    for words in (commands[0], train):
        with pytest.raises(SystemExit) as stop:
            raise SystemExit(main([*words, "--help"]))
        assert stop.value.code == 0


def test_the_preset_leaves_time_for_what_is_not_training():
    training = preset_section(speedrun.NAME, "training")
    assert 0 < training["max_minutes"] <= speedrun.MINUTES - 0.7
    assert training["schedule"] == "cosine-minutes"  # its rate is 0 when they are over, on any machine
    assert training["valid_interval_updates"] == 0
