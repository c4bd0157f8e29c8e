"""GPT beside BERT: the record of a tiny run, what each of them sees of a hidden token, and the lines' files."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpt_and_bert
from benchmarks.measure.records import kind, problems
from fasttfm.cli.main import main
from fasttfm.config.gpt import GPTConfig
from fasttfm.errors import UserError
from fasttfm.models.gpt import GPT

TINY = ["--d-model", "16", "--d-ff", "16", "--layers", "1", "--heads", "2", "--precision", "fp32"]


@pytest.fixture
def texts(tmp_path, monkeypatch):
    first = "".join(f"the dog number {n} runs over green grass\n" for n in range(250))
    second = "".join(f"two ships of iron sail at {n} knots to port\n" for n in range(250))
    for name, text in (("first.txt", first), ("second.txt", second)):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(gpt_and_bert, "LINES", {"train": 4, "valid": 6})
    return [tmp_path / "first.txt", tmp_path / "second.txt"]


def test_both_are_trained_asked_and_recorded(texts, tmp_path, monkeypatch, capsys):
    def in_this_process(_, *words):
        words = [*map(str, words)]
        more = [*(TINY if words[1] == "train" else []), *(["--workers", "1"] if words[1] != "prepare" else [])]
        assert main([*words, *more]) == 0

    monkeypatch.setattr(gpt_and_bert.command, "python", in_this_process)
    words = ["--text", *map(str, texts), "--minutes", "0.01", "--vocab-size", "330", "--results", str(tmp_path)]
    assert gpt_and_bert.main(words) == 0
    record = json.loads((tmp_path / "gpt-and-bert.jsonl").read_text())
    assert kind(record) == "gpt_and_bert"
    assert not problems(record, "gpt_and_bert")
    gpt, bert = record["measured"]
    assert gpt["hidden_tokens"] == bert["hidden_tokens"] > 50
    assert gpt["bits_per_byte"] > 0
    assert "bits_per_byte" not in bert
    for row in (gpt, bert):
        assert row["updates"] >= 1
        assert 0 <= row["hidden_right"] < 1
        assert row["hidden_bits_per_byte"] > 0
        assert row["lines_right"] * 6 == pytest.approx(round(row["lines_right"] * 6), abs=1e-3)
    shown = capsys.readouterr().out
    assert f"| hidden tokens told right | {gpt['hidden_right']:.1%} | {bert['hidden_right']:.1%} |" in shown


def test_a_gpt_is_asked_for_a_hidden_token_by_what_stands_before_it():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=20, d_model=16, heads=2, d_ff=16, layers=1, max_length=8)).eval()
    batch = SimpleNamespace(
        tokens=torch.tensor([[2, 7, 4, 9, 3], [2, 11, 12, 4, 3]]),
        positions=torch.tensor([2, 8]),
        labels=torch.tensor([8, 13]),
    )
    said = gpt_and_bert.gpt_logits(model, batch, batch.positions)
    torch.testing.assert_close(said[0], model(torch.tensor([[7]]))[0, -1])
    torch.testing.assert_close(said[1], model(torch.tensor([[11, 12]]))[0, -1])
    later = gpt_and_bert.gpt_logits(model, batch, torch.tensor([3]))
    torch.testing.assert_close(later[0], model(torch.tensor([[7, 8]]))[0, -1])  # sees what was hidden before it


def test_lines_to_tell_are_of_the_end_of_each_text(texts, tmp_path):
    train, valid = gpt_and_bert.write_lines(texts, tmp_path)
    learnt, told = (list(csv.DictReader(path.open())) for path in (train, valid))
    assert [row["label"] for row in learnt] == ["first.txt"] * 2 + ["second.txt"] * 2
    assert [row["label"] for row in told] == ["first.txt"] * 3 + ["second.txt"] * 3
    assert all(len(row["text"].split()) == gpt_and_bert.LINE for row in learnt + told)
    numbers = [[int(word) for row in rows for word in row["text"].split() if word.isdigit()] for rows in (learnt, told)]
    assert max(numbers[0]) < 240 <= min(numbers[1])


def test_one_text_or_a_short_one_is_refused(texts, tmp_path):
    with pytest.raises(UserError, match="at least two files"):
        gpt_and_bert.write_lines(texts[:1], tmp_path)
    (tmp_path / "short.txt").write_text("a few words\n")
    with pytest.raises(UserError, match=r"short\.txt: its train part has 0 lines of 8 words, 2 are needed"):
        gpt_and_bert.write_lines([tmp_path / "short.txt", texts[0]], tmp_path)
