"""The benchmark of training beside busy programs: its turns, its environment and its command."""

import json
import os
import subprocess

import pytest

from benchmarks import neighbours
from fasttfm.cli.main import main


def test_the_cases_take_turns_and_the_record_has_a_row_for_each(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(neighbours, "prepared", lambda folder: folder)
    order = []

    def train(data, out, updates, threads, environment):
        order.append(out.name)
        return {"tokens_per_second": 100.0 * len(order), "peak_memory": len(order), "batch_shapes": 40}

    monkeypatch.setattr(neighbours, "train", train)
    assert neighbours.main(["--rounds", "2", "--results", str(tmp_path)]) == 0
    assert order[:3] == ["chosen-0-0", "default-0-0", "chosen-1-0"]
    assert len(set(order)) == 12
    record = json.loads((tmp_path / "neighbours.jsonl").read_text())
    first = record["measured"][0]
    assert (first["waiting"], first["neighbours"], first["tokens_per_second"]) == ("chosen", 0, 400.0)
    assert first["tokens_per_second_of_rounds"] == [100.0, 700.0]
    assert len(record["measured"]) == 6
    assert record["machine"]["command"]


def test_the_neighbours_end_with_the_block():
    with neighbours.busy(2, 19):
        listed = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args"], capture_output=True, text=True)
        if listed.returncode:
            pytest.skip("no ps")
        assert listed.stdout.count("while True") == 2
    listed = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args"], capture_output=True, text=True)
    assert "while True" not in listed.stdout


def test_its_training_command_is_one_that_train_takes(tmp_path, monkeypatch, capsys):
    commands = []

    def run(words, env, **settings):
        commands.append((words, env))
        lines = [
            {"kind": "train", "tokens_per_second": rate, "peak_memory": 7, "batch_shapes": 3} for rate in (1, 1, 8)
        ]
        (tmp_path / "train.log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setenv("GOMP_SPINCOUNT", "9")
    monkeypatch.setattr(neighbours.subprocess, "run", run)
    result = neighbours.train(tmp_path, tmp_path, 5, 2, neighbours.WAITING["default"])
    assert result == {"tokens_per_second": 8, "peak_memory": 7, "batch_shapes": 3}
    ((words, environment),) = commands
    assert main([*words[words.index("train") :], "--dump-config"]) == 0
    assert "GOMP_SPINCOUNT" not in environment
    assert environment["KMP_BLOCKTIME"] == "200"
