"""End-to-end runs and the speedrun: arguments, records, minutes, and the plain trainer's greedy search."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import end_to_end
from benchmarks.__main__ import main
from benchmarks.cases import synthetic
from benchmarks.measure import records
from benchmarks.peers.torch_nn import TorchTransformer
from benchmarks.peers.torch_nn_trainer import greedy
from fasttfm.cli.main import main as fasttfm_main
from fasttfm.config.presets import preset_section
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search import DecodingConfig, translate_ids

FAST = "multi30k-fast"


@pytest.mark.whole
@pytest.mark.slow
def test_a_run_of_the_plain_trainer_keeps_a_record(tmp_path, capfd):
    folders = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    peer = ["--peer", "torch.nn", "--minutes", "0.1", "--threads", "1"]
    assert main(["end_to_end", "demo", *folders, *peer]) == 0
    (record,) = records.read(tmp_path / "results" / "end-to-end-demo-torch-nn.jsonl")
    assert record["corpus"] == "demo, torch.nn"
    assert record["training_minutes"] >= 0.1
    assert record["updates"] >= 1
    assert record["lines"] > 10
    assert "--minutes 0.1" in record["train_command"]
    log = [json.loads(line) for line in (tmp_path / "work" / "torch.nn" / "log.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in log][-2:] == ["end", "translate"]
    assert "kept in" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("multi30k", "multi30k needs --text and --work: only demo has built-in text"),
        ("wmt", "invalid choice: 'wmt'"),
        ("multi30k --text nowhere --work WORK", "--text nowhere has neither test_2016_flickr.en nor"),
        ("multi30k --text WORK --work WORK --peer torch.nn", "--peer and --minutes go together"),
    ],
)
def test_missing_arguments_are_named_in_one_line(arguments, message, tmp_path, capsys):
    assert main(["end_to_end", *arguments.replace("WORK", str(tmp_path / "work")).split()]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


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


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """fasttfm commands of a run, recorded instead of run."""
    recorded: list[list[str]] = []

    def fasttfm(words, **options):
        recorded.append(words)
        if words[0] == "train":
            out = Path(words[words.index("--out") + 1])
            out.mkdir(parents=True, exist_ok=True)
            counts = {"kind": "train", "target_tokens": 100, "tokens_per_second": 50, "padding": 0.1}
            lines = [{"step": step, "seconds": step / 5, "loss": 9 - step / 100, **counts} for step in (250, 500)]
            (out / "train.log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        bleu = {"lines": 1, "bleu": 39.2, "bleu_signature": "nrefs:1", "chrf": 60.0, "chrf_signature": "nrefs:1"}
        return subprocess.CompletedProcess(words, 0, json.dumps(bleu) if words[0] == "score" else "")

    monkeypatch.setattr(end_to_end, "fasttfm", fasttfm)
    for name in ("train.en", "train.de", "valid.en", "valid.de"):
        (tmp_path / name).write_text("a\n")
    return recorded


def test_the_minutes_cover_all_steps_and_a_resumed_run_has_none_and_claims_no_goal(tmp_path, commands, capsys):
    arguments = ["--text", str(tmp_path), "--results", str(tmp_path), "--note", "a test"]
    assert end_to_end.main([FAST, *arguments, "--", "--seed", "3", "--max-update", "500"]) == 0
    assert [words[0] for words in commands] == ["prepare", "train", "translate", "score"]
    train = commands[1]
    assert train[train.index("--seed") + 1] == "3"
    assert train[train.index("--max-update") + 1] == "500"
    assert commands[2][-2:] == ["--checkpoint", "last"]
    assert "39.0 in 20 minutes is reached" in capsys.readouterr().out
    for words in (commands[0], train):
        with pytest.raises(SystemExit) as stop:
            raise SystemExit(fasttfm_main([*words, "--help"]))
        assert stop.value.code == 0
    (tmp_path / "work" / "model").mkdir(parents=True)
    assert end_to_end.main([FAST, *arguments, "--work", str(tmp_path / "work")]) == 0
    assert "reached" not in capsys.readouterr().out.splitlines()[-1]
    record, resumed = records.read(tmp_path / "end-to-end-multi30k-fast.jsonl")
    assert (record["updates"], record["target_tokens"], record["note"]) == (500, 200, "a test")
    assert [*record["minutes_of"]] == ["prepare", "train", "translate", "score"]
    assert record["training_curve"] == [[250, 6.5], [500, 4.0]]
    assert "minutes_of" not in resumed


def test_the_preset_of_the_speedrun_leaves_time_for_the_other_steps():
    """The longest time of any record, and ten seconds to save and end after the last update."""
    training = preset_section(FAST, "training")
    kept = records.read(records.RESULTS / f"end-to-end-{FAST}.jsonl")
    runs = [run["minutes_of"] for run in kept if "minutes_of" in run]  # not of a resumed run
    others = max(run["prepare"] + run["translate"] + run["score"] for run in runs)
    assert 0 < training["max_minutes"] <= end_to_end.CORPORA[FAST].goal[1] - others - 10 / 60
    assert training["schedule"] == "cosine-minutes"  # the rate is 0 at the end, on any machine
    assert training["valid_interval_updates"] == 0
