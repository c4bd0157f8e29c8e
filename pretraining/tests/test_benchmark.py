"""The benchmark of pre-training: its commands, and that both sides read the same tokens."""

import json

import numpy as np
import pytest

from fasttfm.cli.main import main
from fasttfm_pretraining.data.documents import PreparedDocuments
from pretraining import benchmark


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(300)))
    prepare = ["lm", "prepare", "--text", str(folder / "text.txt"), "--out", str(folder / "D"), "--vocab-size", "300"]
    assert main(prepare) == 0
    return PreparedDocuments.open(folder / "D")


@pytest.mark.parametrize(("kind", "seen"), [("gpt", 1), ("bert", 1 / 0.15)])
def test_our_command_is_one_that_training_takes_and_all_tokens_that_it_reads_count(
    data, tmp_path, monkeypatch, kind, seen
):
    commands = []

    def run(*words):
        commands.append([*map(str, words)])
        lines = [
            {"kind": "train", "step": step, "target_tokens": 10, "tokens_per_second": rate, "peak_memory": 7}
            for step, rate in enumerate((1, 1, 10, 5), 1)
        ]
        (tmp_path / "train.log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(benchmark.command, "python", run)
    result = benchmark.ours(kind, f"{kind}-tiny", data.path, tmp_path, 0.5)
    assert result == {"tokens_per_second": pytest.approx(seen * 20 / 3, rel=0.02), "updates": 4, "peak_memory": 7}
    (words,) = commands
    assert main([*words[1:], "--dump-config"]) == 0


@pytest.mark.whole
def test_their_models_are_ours_read_the_same_tokens_and_pay_for_guesses_what_guesses_cost(data, tmp_path):
    pytest.importorskip("transformers")
    from fasttfm_pretraining.interop.gpt import read
    from fasttfm_pretraining.models.gpt import GPT
    from pretraining.huggingface_trainer import Blocks, bert_model, gpt_model, masked_collator

    blocks = Blocks(data, 64)
    ids = np.concatenate([blocks[number]["input_ids"].numpy() for number in range(len(blocks))])
    assert (ids == data.train.read(0, len(ids))).all()
    assert data.train.tokens - len(ids) < 64
    gpt_model(data, "gpt-tiny").save_pretrained(tmp_path / "gpt")
    assert read(tmp_path / "gpt").config == GPT.from_preset("gpt-tiny", vocab_size=len(data.tokenizer)).config
    guessing = np.log2(len(data.tokenizer)) * data.valid.tokens / data.valid.bytes
    assert benchmark.bits_per_byte(data.path, tmp_path / "gpt", True) == pytest.approx(guessing, rel=0.05)

    batch = masked_collator(data)([Blocks(data, 128)[number] for number in range(8)])
    hidden = batch["labels"] != -100
    assert 0.1 < float(hidden.double().mean()) < 0.2
    assert 0.7 < float((batch["input_ids"][hidden] == data.tokenizer.mask).double().mean()) < 0.9
    bert_model(data, "bert-tiny").save_pretrained(tmp_path / "bert")
    cost = benchmark.masked_bits_per_byte(data.path, tmp_path / "bert", True)
    assert np.log2(300) / 3.5 < cost < np.log2(300) / 1.2  # hidden tokens have two to three bytes each
