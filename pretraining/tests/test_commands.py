"""`fasttfm lm` and `fasttfm mlm`: from a text file to a model that is scored, generates, and goes to Hugging Face."""

import json
import shlex

import pytest
from their_models import saved
from training.runs import records

from fasttfm.cli.main import main
from fasttfm_pretraining.data.masking_vocabulary import masking_vocabulary
from fasttfm_pretraining.data.text_tokenizer import load_text_tokenizer

SMALL = ["--d-model", "16", "--heads", "2", "--d-ff", "32", "--layers", "1", "--max-length", "32", "--row-length", "32"]
QUICK = ["--max-tokens", "128", "--warmup-updates", "2", "--log-interval", "5", "--threads", "1", "--no-tensorboard"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    (folder / "text.txt").write_text(
        "".join(f"Line {number} of a text, and {number} again.\n" for number in range(200))
    )
    text, data, model = (str(folder / name) for name in ("text.txt", "D", "M"))
    assert main(["lm", "prepare", "--text", text, "--out", data, "--vocab-size", "320"]) == 0
    steps = ["--max-update", "10", "--valid-interval-updates", "5", "--device", "cpu"]
    assert main(["lm", "train", "--preset", "gpt-tiny", "--data", data, "--out", model, *SMALL, *QUICK, *steps]) == 0
    return folder


def test_a_configuration_is_given_back_with_its_kind(tmp_path, capsys):
    config = tmp_path / "c.yaml"
    assert main(["lm", "train", "--preset", "gpt-tiny", "--dump-config"]) == 0
    config.write_text(capsys.readouterr().out)
    assert main(["lm", "train", "--config", str(config), "--dump-config"]) == 0
    assert capsys.readouterr().out == config.read_text()
    assert main(["train", "--config", str(config), "--dump-config"]) == 2
    assert "kind gpt" in capsys.readouterr().err


def test_evaluate_and_generate_answer_in_text_and_json(made, capsys):
    """docs/gpt.md's commands run in tests/docs/test_pages.py; here is what JSON holds."""
    for source in ("--data", str(made / "D")), ("--text", str(made / "text.txt")):
        assert main(["lm", "evaluate", str(made / "M"), *source, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["command"] == "lm evaluate"
        assert set(told) == {"command", "loss", "nll", "perplexity", "bits_per_byte"}
    words = ["lm", "generate", str(made / "M"), "--prompt", "Line", "--tokens", "8", "--samples", "2", "--seed", "3"]
    said = []
    for more in ([], ["--json"]):
        assert main([*words, *more]) == 0
        said.append(capsys.readouterr().out)
    assert said[0].startswith("Line")
    assert said[0] == "\n---\n".join(json.loads(said[1])["texts"]) + "\n"


def test_few_shot_counts_what_prompt_has_right_by_model_and_number_of_solved_examples(made, capsys):
    examples = [{"text": f"Line {number} of a", "answer": " text"} for number in range(6)]
    (made / "f.json").write_text(json.dumps(examples))
    options = ["--examples", str(made / "f.json"), "--template", "{text}{answer}", "--options", " text", "Wxyz"]
    few_shot = ["lm", "few-shot", str(made / "M"), str(made / "M"), *options, "--shots"]
    assert main([*few_shot, "0", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["shots"], told["examples"]) == ([0, 2], 6)
    for row in told["models"]:
        for shots, right in zip(told["shots"], row["right"], strict=True):
            assert main(["lm", "prompt", str(made / "M"), "--shots", str(shots), *options]) == 0
            *lines, summary = capsys.readouterr().out.splitlines()
            assert sum(line.startswith("right\t") for line in lines) == right
            assert summary == f"{right} of 6 right ({right / 6:.1%}), {shots} shots"
    assert main([*few_shot, "9"]) == 2


def test_a_llama_goes_the_same_way(made, capsys):
    sizes = shlex.split("--d-model 16 --heads 4 --kv-heads 2 --d-ff 24 --layers 2 --max-length 32")
    steps = ["--row-length", "32", "--max-update", "10", "--valid-interval-updates", "5", "--device", "cpu"]
    model, data = str(made / "L"), str(made / "D")
    assert main(["lm", "train", "--preset", "llama-tiny", "--data", data, "--out", model, *sizes, *QUICK, *steps]) == 0
    losses = [record["nll"] for record in records(model, "valid")]
    assert losses[-1] < losses[0]
    assert main(["lm", "evaluate", model, "--data", data]) == 0
    assert main(["lm", "generate", model, "--prompt", "Line", "--tokens", "60", "--temperature", "0"]) == 0
    assert "\nLine" in capsys.readouterr().out
    wrong = ["lm", "train", "--preset", "gpt-tiny", "--data", data, "--out", str(made / "W"), "--kv-heads", "2"]
    assert main(wrong) == 2
    assert "--kv-heads belongs to a model of kind llama, and this one is of kind gpt" in capsys.readouterr().err
    assert main(["finetune", "classify", "--init-from", model, "--train", data, "--valid", data, "--out", "C"]) == 2


# fasttfm mlm


def test_a_wordpiece_vocabulary_comes_along(tmp_path, capsys):
    for package in ("transformers", "tokenizers"):
        pytest.importorskip(package)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "the", "do", "##g", "##s"]
    folder = tmp_path / "H"
    saved("BertForPreTraining", folder, vocab_size=len(pieces), max_position_embeddings=512)
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    assert main(["mlm", "import", str(folder), "--out", str(tmp_path / "M")]) == 0
    (tmp_path / "text.txt").write_text("The dogs\n" * 200)
    files = ["--text", str(tmp_path / "text.txt"), "--spm", str(tmp_path / "M" / "tokenizer.json")]
    assert main(["mlm", "prepare", *files, "--out", str(tmp_path / "D")]) == 0
    assert main(["mlm", "evaluate", str(tmp_path / "M"), "--data", str(tmp_path / "D"), "--device", "cpu"]) == 0
    assert "pairs" in capsys.readouterr().out
    assert main(["mlm", "attention", str(tmp_path / "M"), "x " * 81, "--out", "picture.png"]) == 2
    assert "has 81 tokens, at most 80 can be shown" in capsys.readouterr().err

    vocabulary = masking_vocabulary(load_text_tokenizer(tmp_path / "M"))
    assert (vocabulary.begin, vocabulary.end, vocabulary.mask) == (2, 3, 4)
    assert vocabulary.begins_word.tolist() == [True] * (len(pieces) - 2) + [False] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("lm", "verb"),
        ("lm train --preset gpt-tiny --out M", "--data is missing"),
        ("lm prepare --text none.txt --out D", "no such file"),
        ("lm prepare --text none.txt --out D --bytes --spm x", "--bytes and --spm do not go"),
        ("lm generate none", "is not a model directory"),
        ("lm import none --out M", "config.json"),
        ("mlm train", "--preset is missing: there are albert-base"),
        ("mlm train --preset bert-tiny --generator-size 0.5", "--generator-size belongs to a model of kind"),
        ("mlm train --preset bert-tiny --objective mmm", "--objective: 'mmm' must be one of mlm,"),
        ("mlm train --preset bert-tiny --out M", "--data is missing: fasttfm mlm train"),
        ("mlm import H --out M", "H/config.json: is missing"),
        ("mlm import . --generator G --out M", "--generator belongs to an ELECTRA"),
    ],
)
def test_wrong_commands_end_in_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    try:
        status = main(words.split())
    except SystemExit as left:
        status = left.code
    assert status == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
