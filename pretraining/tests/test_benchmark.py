"""The benchmark of pre-training: its turns, its commands, and that both sides read the same tokens."""

import json

import numpy as np
import pytest

from benchmarks.measure.records import kind, problems
from fasttfm.cli.main import main
from fasttfm_pretraining.data.documents import PreparedDocuments
from pretraining import benchmark


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(300)))
    return tmp_path / "text.txt"


@pytest.mark.whole
def test_both_take_turns_and_the_record_has_a_row_for_each(text, tmp_path, monkeypatch):
    order = []

    def train(provider):
        def run(model, preset, data, out, minutes):
            PreparedDocuments.open(data)
            order.append((provider, out.name, minutes))
            return {"tokens_per_second": 100.0 * len(order), "updates": 7, "peak_memory": 9}

        return run

    monkeypatch.setattr(benchmark, "ours", train("ours"))
    monkeypatch.setattr(benchmark, "theirs", train("theirs"))
    measured = benchmark.Kind("gpt-tiny", ["lm", "train"], lambda data, out, is_theirs: 2.0 + is_theirs)
    monkeypatch.setattr(benchmark, "KINDS", {"gpt": measured})
    words = ["gpt", "--text", str(text), "--rounds", "2", "--minutes", "0.5", "--vocab-size", "300"]
    assert benchmark.main([*words, "--results", str(tmp_path)]) == 0
    assert [provider for provider, _, _ in order] == ["ours", "theirs"] * 2
    assert len({out for _, out, _ in order}) == 4
    record = json.loads((tmp_path / "pretraining.jsonl").read_text())
    assert kind(record) == "pretraining"
    assert not problems(record, "pretraining")
    assert [row["tokens_per_second"] for row in record["measured"]] == [200, 300]
    assert [row["bits_per_byte"] for row in record["measured"]] == [2.0, 3.0]


def test_our_command_is_one_that_lm_train_takes(tmp_path, monkeypatch):
    commands = []

    def run(*words):
        commands.append([*map(str, words)])
        lines = [
            {"kind": "train", "step": step, "target_tokens": 10, "tokens_per_second": rate, "peak_memory": 7}
            for step, rate in enumerate((1, 1, 10, 5), 1)
        ]
        (tmp_path / "train.log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(benchmark.command, "python", run)
    result = benchmark.ours("gpt", "gpt-tiny", tmp_path / "data", tmp_path, 0.5)
    assert result == {"tokens_per_second": pytest.approx(20 / 3), "updates": 4, "peak_memory": 7}
    (words,) = commands
    assert main([*words[1:], "--dump-config"]) == 0


@pytest.mark.whole
def test_their_model_is_ours_and_reads_the_same_tokens(text, tmp_path):
    pytest.importorskip("transformers")
    from fasttfm_pretraining.interop.gpt import read
    from fasttfm_pretraining.models.gpt import GPT
    from pretraining.huggingface_trainer import Blocks, gpt_model

    assert main(["lm", "prepare", "--text", str(text), "--out", str(tmp_path / "D"), "--vocab-size", "300"]) == 0
    data = PreparedDocuments.open(tmp_path / "D")
    blocks = Blocks(data, 64)
    ids = np.concatenate([blocks[number]["input_ids"].numpy() for number in range(len(blocks))])
    assert (ids == data.train.read(0, len(ids))).all()
    assert data.train.tokens - len(ids) < 64
    gpt_model(data, "gpt-tiny").save_pretrained(tmp_path / "theirs")
    theirs = read(tmp_path / "theirs")
    assert theirs.config == GPT.from_preset("gpt-tiny", vocab_size=len(data.tokenizer)).config
    # a model that knows nothing pays for each token what guessing costs
    guessing = np.log2(len(data.tokenizer)) * data.valid.tokens / data.valid.bytes
    assert benchmark.bits_per_byte(tmp_path / "D", tmp_path / "theirs", True) == pytest.approx(guessing, rel=0.05)


@pytest.mark.whole
def test_a_bert_s_command_its_tokens_and_what_hidden_tokens_cost(text, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from pretraining.huggingface_trainer import Blocks, bert_model, masked_collator

    assert main(["lm", "prepare", "--text", str(text), "--out", str(tmp_path / "D"), "--vocab-size", "300"]) == 0
    assert benchmark.tokens_per_hidden(tmp_path / "D", "bert-tiny") == pytest.approx(1 / 0.15, rel=0.02)
    data = PreparedDocuments.open(tmp_path / "D")
    batch = masked_collator(data)([Blocks(data, 128)[number] for number in range(8)])
    hidden = batch["labels"] != -100
    assert 0.1 < float(hidden.double().mean()) < 0.2
    assert 0.7 < float((batch["input_ids"][hidden] == data.tokenizer.mask).double().mean()) < 0.9
    bert_model(data, "bert-tiny").save_pretrained(tmp_path / "theirs")
    cost = benchmark.masked_bits_per_byte(tmp_path / "D", tmp_path / "theirs", True)
    # a model that knows nothing pays for each token what guessing costs; these have two to three bytes each
    assert np.log2(300) / 3.5 < cost < np.log2(300) / 1.2
    commands = []
    (tmp_path / "train.log.jsonl").write_text(
        json.dumps({"kind": "train", "step": 1, "target_tokens": 15, "tokens_per_second": 5, "peak_memory": 7}) + "\n"
    )
    monkeypatch.setattr(benchmark.command, "python", lambda *words: commands.append([*map(str, words)]))
    result = benchmark.ours("bert", "bert-tiny", tmp_path / "D", tmp_path, 0.5)
    assert result["tokens_per_second"] == pytest.approx(5 / 0.15, rel=0.02)
    assert main([*commands[0][1:], "--dump-config"]) == 0
