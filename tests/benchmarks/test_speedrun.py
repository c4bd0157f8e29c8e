"""The speedrun: its commands are valid, its minutes cover all of them, its preset follows the rules."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import end_to_end
from benchmarks.measure import records
from fasttfm.cli.main import main
from fasttfm.config.presets import preset_section

NAME = "multi30k-fast"


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """fasttfm commands of a run, recorded instead of run."""
    recorded: list[list[str]] = []

    def fasttfm(words, **options):
        recorded.append(words)
        if words[0] == "train":
            out = Path(words[words.index("--out") + 1])
            out.mkdir(parents=True, exist_ok=True)
            counts = {"target_tokens": 100, "tokens_per_second": 50, "padding": 0.1}
            lines = [
                {"kind": "train", "step": step, "seconds": step / 5, "loss": 9 - step / 100, **counts}
                for step in (250, 500)
            ]
            (out / "train.log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        bleu = {"lines": 1, "bleu": 39.2, "bleu_signature": "nrefs:1", "chrf": 60.0, "chrf_signature": "nrefs:1"}
        return subprocess.CompletedProcess(words, 0, json.dumps(bleu) if words[0] == "score" else "")

    monkeypatch.setattr(end_to_end, "fasttfm", fasttfm)
    for name in ("train.en", "train.de", "valid.en", "valid.de"):
        (tmp_path / name).write_text("a\n")
    return recorded


def test_the_minutes_cover_all_steps_and_the_record_is_valid(tmp_path, commands, capsys):
    arguments = ["--text", str(tmp_path), "--results", str(tmp_path), "--note", "a test"]
    assert end_to_end.main([NAME, *arguments, "--", "--seed", "3", "--max-update", "500"]) == 0
    assert [words[0] for words in commands] == ["prepare", "train", "translate", "score"]
    train = commands[1]
    assert train[train.index("--seed") + 1] == "3"
    assert train[train.index("--max-update") + 1] == "500"
    assert commands[2][-2:] == ["--checkpoint", "last"]
    (record,) = map(json.loads, (tmp_path / "end-to-end-multi30k-fast.jsonl").read_text().splitlines())
    records.validate(record)
    assert (record["updates"], record["target_tokens"], record["note"]) == (500, 200, "a test")
    assert [*record["minutes_of"]] == ["prepare", "train", "translate", "score"]
    assert record["training_curve"] == [[250, 6.5], [500, 4.0]]
    assert "39.0 in 20 minutes is reached" in capsys.readouterr().out
    for words in (commands[0], train):
        with pytest.raises(SystemExit) as stop:
            raise SystemExit(main([*words, "--help"]))
        assert stop.value.code == 0


def test_a_resumed_run_has_no_minutes_and_claims_no_goal(tmp_path, commands, capsys):
    (tmp_path / "work" / "model").mkdir(parents=True)
    arguments = ["--text", str(tmp_path), "--results", str(tmp_path), "--work", str(tmp_path / "work")]
    assert end_to_end.main([NAME, *arguments]) == 0
    (record,) = map(json.loads, (tmp_path / "end-to-end-multi30k-fast.jsonl").read_text().splitlines())
    records.validate(record)
    assert "minutes_of" not in record
    assert "reached" not in capsys.readouterr().out


def test_the_preset_leaves_time_for_the_other_steps():
    """The longest time of any record, and ten seconds to save and end after the last update."""
    training = preset_section(NAME, "training")
    kept = records.read(records.RESULTS / f"end-to-end-{NAME}.jsonl")
    runs = [run["minutes_of"] for run in kept if "minutes_of" in run]  # not of a resumed run
    others = max(run["prepare"] + run["translate"] + run["score"] for run in runs)
    assert 0 < training["max_minutes"] <= end_to_end.CORPORA[NAME].goal[1] - others - 10 / 60
    assert training["schedule"] == "cosine-minutes"  # the rate is 0 at the end, on any machine
    assert training["valid_interval_updates"] == 0
