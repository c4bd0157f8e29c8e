"""The benchmark of workers: its turns, its command, and which updates it counts."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import workers
from fasttfm.cli.main import main


def test_the_cases_take_turns_and_the_record_has_a_row_for_each(tmp_path, monkeypatch):
    monkeypatch.setattr(workers.end_to_end, "prepare", lambda name, text, work: work)
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 4)
    order = []

    def train(data, out, count, minutes):
        order.append((out.name, count, minutes))
        return {"tokens_per_second": 100.0 * len(order), "updates": 7, "peak_memory": len(order)}

    monkeypatch.setattr(workers, "train", train)
    arguments = ["--text", str(tmp_path), "--rounds", "2", "--minutes", "0.5", "--results", str(tmp_path)]
    assert workers.main(arguments) == 0
    assert order[:3] == [("1-0-0", 1, 0.5), ("4-0-0", 4, 0.5), ("1-1-0", 1, 0.5)]
    assert len(set(order)) == 8
    record = json.loads((tmp_path / "workers.jsonl").read_text())
    assert [(row["workers"], row["threads"], row["neighbours"]) for row in record["measured"]] == [
        (1, 4, 0),
        (4, 1, 0),
        (1, 4, 1),
        (4, 1, 1),
    ]
    assert record["measured"][0]["tokens_per_second_of_rounds"] == [100, 500]
    assert record["measured"][0]["tokens_per_second"] == 300
    assert record["machine"]["command"]


def test_its_training_command_is_one_that_train_takes_and_its_second_half_counts(tmp_path, monkeypatch, capsys):
    commands = []

    def run(words, env, **settings):
        commands.append((words, env))
        lines = [
            {"kind": "train", "step": step, "target_tokens": 10, "tokens_per_second": rate, "peak_memory": 7}
            for step, rate in enumerate((1, 1, 10, 5), 1)
        ]
        (Path(tmp_path) / "train.log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return subprocess.CompletedProcess(words, 0, stdout="")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(workers.subprocess, "run", run)
    result = workers.train(tmp_path / "data", tmp_path, 2, 0.5)
    assert result == {"tokens_per_second": pytest.approx(20 / 3), "updates": 4, "peak_memory": 7}
    ((words, environment),) = commands
    assert main([*words[words.index("train") :], "--dump-config"]) == 0
    assert "OMP_NUM_THREADS" not in environment


def test_the_neighbours_end_with_the_block():
    with workers.busy(2, 19):
        listed = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args"], capture_output=True, text=True)
        if listed.returncode:
            pytest.skip("no ps")
        assert listed.stdout.count("while True") == 2
    listed = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args"], capture_output=True, text=True)
    assert "while True" not in listed.stdout
