"""The benchmarks of fine-tuning and of students: their commands, and records that fit their schemas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import finetuning, students
from benchmarks.measure.records import kind, problems
from fasttfm.errors import UserError
from tests.model_dirs import PAIRS, write_model_dir


def test_both_starts_are_trained_alike_and_recorded(tmp_path, monkeypatch):
    commands = []

    def run(*words):
        words = [*map(str, words)]
        commands.append(words)
        if "--log-interval" in words:
            out = Path(words[words.index("--out") + 1])
            out.mkdir()
            (out / "train.log.jsonl").write_text(json.dumps({"kind": "train", "step": 7, "nll": 2.5}) + "\n")
        return json.dumps({"command": "finetune evaluate", "exact": 1.0, "f1": 2.0 + len(commands), "total": 3})

    monkeypatch.setattr(finetuning.command, "python", run)
    for name in ("squad1_sample_train.json.gz", "squad1_sample_valid.json.gz"):
        (tmp_path / name).touch()
    words = ["--text", str(tmp_path / "text.txt"), "--qa", str(tmp_path), "--minutes", "0.5"]
    assert finetuning.main([*words, "--results", str(tmp_path)]) == 0
    trained = [words for words in commands if words[1:3] == ["finetune", "squad"]]
    assert [words[3] for words in trained] == ["--init-from", "--like"]
    same = [[word for word in words[4:] if "init-from" not in word and "like" not in word] for words in trained]
    assert same[0] == same[1]
    record = json.loads((tmp_path / "finetuning.jsonl").read_text())
    assert kind(record) == "finetuning"
    assert not problems(record, "finetuning")
    assert [row["weights"] for row in record["measured"]] == ["pre-trained", "fresh"]
    assert [row["updates"] for row in record["measured"]] == [7, 7]


def test_text_and_body_exclude_each_other(tmp_path):
    with pytest.raises(UserError, match="one of them"):
        finetuning.main(["--qa", str(tmp_path)])
    with pytest.raises(UserError, match="has no squad1_sample_train"):
        finetuning.main(["--qa", str(tmp_path), "--body", str(tmp_path)])


def test_a_student_stands_beside_its_teacher(tmp_path, capsys):
    teacher = write_model_dir(tmp_path / "teacher")
    student = write_model_dir(tmp_path / "student", beam=1)
    (tmp_path / "src").write_text("".join(f"{line}\n" for line in PAIRS))
    (tmp_path / "ref").write_text("".join(f"{line}\n" for line in PAIRS.values()))
    words = ["--teacher", str(teacher), "--student", str(student), "--src", str(tmp_path / "src"), "--rounds", "1"]
    assert students.main([*words, "--ref", str(tmp_path / "ref"), "--results", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "students.jsonl").read_text())
    assert kind(record) == "students"
    assert not problems(record, "students")
    assert [(row["model"], row["beam"]) for row in record["measured"]] == [("teacher", 4), ("student", 1)]
    assert all(row["bleu"] > 50 and row["sentences_per_second"] > 0 for row in record["measured"])
    assert "student: BLEU" in capsys.readouterr().out
    with pytest.raises(UserError, match="must align line by line"):
        students.main([*words, "--ref", str(tmp_path / "students.jsonl"), "--results", str(tmp_path)])
