"""The benchmark of BERT's students: one tiny run, and its record."""

from __future__ import annotations

import json

from benchmarks import distilling
from benchmarks.measure.records import kind, problems
from fasttfm.cli.main import main

TINY = ["--d-model", "16", "--d-ff", "16", "--heads", "2", "--row-length", "32"]


def test_students_stand_beside_their_teacher_and_their_shape_alone(tmp_path, monkeypatch):
    text = "\n".join(f"the dog number {n} runs over green grass in a small town" for n in range(250))
    (tmp_path / "text.txt").write_text(text + "\n")
    commands = []

    def in_this_process(_, *words):
        words = [*map(str, words)]
        commands.append(words)
        more = [] if words[1] == "prepare" else ["--workers", "1", "--precision", "fp32", *TINY]
        assert main([*words, *more]) == 0

    monkeypatch.setattr(distilling.command, "python", in_this_process)
    words = ["--text", str(tmp_path / "text.txt"), "--minutes", "0.004", "--vocab-size", "330"]
    assert distilling.main([*words, "--results", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "distilling.jsonl").read_text())
    assert kind(record) == "distilling"
    assert not problems(record, "distilling")
    rows = record["measured"]
    assert [row["model"].split(",")[0] for row in rows] == ["teacher", "student", "student", "no teacher"]
    assert rows[1]["parameters"] == rows[3]["parameters"] < rows[0]["parameters"]
    assert all(row["updates"] >= 1 and row["masked_nats"] > 0 for row in rows)
    assert [words[words.index("--preset") + 1] for words in commands[1:]] == [
        "bert-tiny", "distilbert", "tinybert", "bert-tiny",
    ]  # fmt: skip
