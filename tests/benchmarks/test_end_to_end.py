"""End-to-end runs: arguments, records, and the plain torch.nn trainer with its greedy search."""

import json
import random

import pytest
import torch

from benchmarks import end_to_end
from benchmarks.__main__ import main
from benchmarks.cases import synthetic
from benchmarks.measure import records
from benchmarks.peers.torch_nn import TorchTransformer
from benchmarks.peers.torch_nn_trainer import greedy
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search import DecodingConfig, translate_ids

WORDS = [*"abcdefghijklmnopqrst"]


@pytest.fixture
def text(tmp_path):
    """A folder of train, valid and test files; targets are reversed sources."""
    draw = random.Random(1)
    folder = tmp_path / "text"
    folder.mkdir()
    for name, pairs in (("train", 300), ("valid", 12), ("test_2016_flickr", 12)):
        sources = [draw.choices(WORDS, k=draw.randint(2, 9)) for _ in range(pairs)]
        for side, lines in (("en", sources), ("de", [words[::-1] for words in sources])):
            (folder / f"{name}.{side}").write_text("".join(" ".join(words) + "\n" for words in lines))
    return folder


@pytest.mark.whole
@pytest.mark.slow
def test_a_run_of_the_plain_trainer_keeps_a_record(text, tmp_path, monkeypatch, capfd):
    small = {"test": "test_2016_flickr", "prepare": ("--vocab-size", "300"), "train": ("--preset", "multi30k")}
    monkeypatch.setitem(end_to_end.CORPORA, "multi30k", end_to_end.Corpus(**small))
    folders = ["--text", str(text), "--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    peer = ["--peer", "torch.nn", "--minutes", "0.1", "--threads", "1"]
    assert main(["end_to_end", "multi30k", *folders, *peer]) == 0
    (record,) = records.read(tmp_path / "results" / "end-to-end-multi30k-torch-nn.jsonl")
    assert record["corpus"] == "multi30k, torch.nn"
    assert record["training_minutes"] >= 0.1
    assert record["updates"] >= 1
    assert record["lines"] == 12
    assert "--minutes 0.1" in record["train_command"]
    log = [json.loads(line) for line in (tmp_path / "work" / "torch.nn" / "log.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in log][-2:] == ["end", "translate"]
    assert "kept in" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("multi30k", "multi30k needs --text and --work: only demo has built-in text"),
        ("wmt", "invalid choice: 'wmt'"),
        ("multi30k --text nowhere --work WORK", "--text nowhere has neither train.en nor train.en.gz"),
        ("multi30k --text WORK --work WORK --peer torch.nn", "--peer and --minutes go together"),
        ("multi30k --text WORK --work WORK --minutes 3", "--peer and --minutes go together"),
    ],
)
def test_missing_arguments_are_named_in_one_line(arguments, message, tmp_path, capsys):
    assert main(["end_to_end", *arguments.replace("WORK", str(tmp_path / "work")).split()]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_the_built_in_corpus_runs_ours_and_the_plain_trainer(tmp_path, monkeypatch, capsys, request):
    """With stubs for the two runs, which take minutes and have tests of their own."""
    record = request.getfixturevalue("end_to_end")()
    fields = {name: value for name, value in record.items() if name not in ("benchmark", "machine")}
    ran = []

    def run(name, text, work, *more):
        assert (text / "train.en").exists()
        ran.append((name, *more))
        return fields | {"corpus": name, "bleu": 12.345, "training_minutes": 1.5}

    monkeypatch.setattr(end_to_end, "run", run)
    monkeypatch.setattr(end_to_end, "run_peer", lambda *a: run(*a) | {"corpus": "demo, torch.nn"})
    end_to_end.run_built_in(tmp_path, "cpu", 3)
    options = ["--device", "cpu", "--threads", "3"]
    assert ran == [("demo", options), ("demo", 1.5, options)]
    assert {path.name for path in tmp_path.iterdir()} == {"end-to-end-demo.jsonl", "end-to-end-demo-torch-nn.jsonl"}
    assert main(["end_to_end", "demo", "--results", str(tmp_path)]) == 0
    assert ran[2:] == [("demo", [], None)]
    assert len((tmp_path / "end-to-end-demo.jsonl").read_text().splitlines()) == 2
    assert "BLEU 12.35 after 1.5 minutes" in capsys.readouterr().out


def test_the_plain_greedy_search_equals_ours():
    sizes = {"vocab_size": 60, "d_model": 32, "heads": 4, "d_ff": 64, "encoder_layers": 1, "decoder_layers": 2}
    config = TransformerConfig(**sizes, norm_first=True, final_norm=True)
    torch.manual_seed(0)
    plain = TorchTransformer(config).eval()
    with torch.no_grad():
        plain.decoder.norm.weight.normal_(std=6.0)
        plain.target_embedding.weight[:3] = 0.0  # tokens that our search never writes
        plain.target_embedding.weight[3] *= 0.5
    model = Transformer(config)
    model.load_state_dict(plain.state_dict())
    sources = [*synthetic.sources(4, 7, 60, seed=1), *synthetic.sources(3, 3, 60, seed=2)]
    results = greedy(plain, sources, longer=10)
    # the plain search's limit is that of the longest source of a batch
    expected = translate_ids(model, sources, DecodingConfig(beam=1, max_len_a=0.0, max_len_b=17, allow_unk=True))
    assert results == [ids[:17] for ids in expected]
    assert len({tuple(ids) for ids in results}) > 3
