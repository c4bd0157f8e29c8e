"""`fasttfm lm`: from a text file to a model that generates, answers and goes to Hugging Face."""

import json
import shlex

import pytest

from fasttfm.cli.main import main
from fasttfm.errors import UserError
from fasttfm_pretraining.config.sampling import Sampling

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


def test_training_leaves_a_curve_and_says_how_good_the_model_is(made):
    assert (made / "M" / "curve.png").stat().st_size > 1000
    assert (made / "M" / "config.yaml").read_text().startswith("kind: gpt\n")


def test_evaluate_prints_loss_perplexity_and_bits_per_byte(made, capsys):
    for source in (["--data", str(made / "D")], ["--text", str(made / "text.txt")]):
        assert main(["lm", "evaluate", str(made / "M"), *source]) == 0
        told = capsys.readouterr().out
        assert all(word in told for word in ("loss", "perplexity", "bits per byte"))
    assert main(["lm", "evaluate", str(made / "M"), "--data", str(made / "D"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["command"] == "lm evaluate"
    assert set(told) == {"command", "loss", "nll", "perplexity", "bits_per_byte"}
    assert main(["lm", "evaluate", str(made / "M")]) == 2
    assert "--data DATA or --text FILE" in capsys.readouterr().err


def test_generate_prints_texts_that_begin_with_the_prompt(made, capsys):
    words = ["lm", "generate", str(made / "M"), "--prompt", "Line", "--tokens", "8", "--samples", "2", "--seed", "3"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert first.startswith("Line")
    assert "\n---\nLine" in first
    assert main(words) == 0
    assert capsys.readouterr().out == first
    assert main([*words, "--json"]) == 0
    assert "\n---\n".join(json.loads(capsys.readouterr().out)["texts"]) == first.rstrip("\n")
    assert main([*words, "--tokens", "200"]) == 0
    assert "outgrow the model's 32 positions" in capsys.readouterr().err


def test_prompt_prints_each_answer_and_how_many_are_right(made, capsys):
    examples = [{"text": f"Line {number} of a", "answer": " text"} for number in range(5)]
    (made / "e.json").write_text(json.dumps(examples))
    options = ["--examples", str(made / "e.json"), "--template", "{text}{answer}", "--options", " text", "Wxyz"]
    assert main(["lm", "prompt", str(made / "M"), *options]) == 0
    *lines, told = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    right = sum(line.startswith("right\t") for line in lines)
    assert told == f"{right} of 5 right ({right / 5:.1%}), 0 shots"


def test_few_shot_tells_by_model_and_number_of_solved_examples_how_many_are_right(made, capsys):
    examples = [{"text": f"Line {number} of a", "answer": " text"} for number in range(6)]
    (made / "f.json").write_text(json.dumps(examples))
    options = ["--examples", str(made / "f.json"), "--template", "{text}{answer}", "--options", " text", "Wxyz"]
    models = [str(made / "M")] * 2
    assert main(["lm", "few-shot", *models, "--shots", "0", "2", "--json", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["shots"], told["examples"]) == ([0, 2], 6)
    for row in told["models"]:
        for shots, right in zip(told["shots"], row["right"], strict=True):
            assert main(["lm", "prompt", str(made / "M"), "--shots", str(shots), "--json", *options]) == 0
            assert json.loads(capsys.readouterr().out)["right"] == right
    assert main(["lm", "few-shot", *models, "--shots", "0", "2", *options]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "model\tparameters\t0 shots\t2 shots"
    assert lines[0].split("\t")[2:] == [f"{right / 6:.1%}" for right in told["models"][0]["right"]]
    assert main(["lm", "few-shot", *models, "--shots", "9", *options]) == 2
    assert capsys.readouterr().err.startswith("fasttfm lm few-shot: --shots 9: there are 5 other examples")


def test_export_and_import_end_where_they_began(made, capsys):
    pytest.importorskip("transformers")
    assert main(["lm", "export", str(made / "M"), "--out", str(made / "HF")]) == 0
    assert (made / "HF" / "config.json").is_file()
    assert (made / "HF" / "tokenizer.json").is_file()
    assert main(["lm", "import", str(made / "HF"), "--out", str(made / "N")]) == 0
    capsys.readouterr()
    texts = []
    for name in ("M", "N"):
        assert (
            main(["lm", "generate", str(made / name), "--prompt", "Line 3", "--temperature", "0", "--tokens", "9"]) == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_the_resolved_configuration_can_be_printed_and_given_back(made, capsys):
    assert main(["lm", "train", "--preset", "gpt-tiny", "--dump-config"]) == 0
    (made / "c.yaml").write_text(capsys.readouterr().out)
    assert main(["lm", "train", "--config", str(made / "c.yaml"), "--dump-config"]) == 0
    assert capsys.readouterr().out == (made / "c.yaml").read_text()
    assert main(["train", "--config", str(made / "c.yaml"), "--dump-config"]) == 2
    assert "kind gpt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lm"], "verb"),
        (["lm", "train", "--preset", "gpt-tiny", "--out", "M"], "--data is missing"),
        (["lm", "train", "--preset", "demo"], "preset 'demo' is unknown"),
        (["lm", "prepare", "--text", "none.txt", "--out", "D"], "no such file"),
        (["lm", "prepare", "--text", "none.txt", "--out", "D", "--bytes", "--spm", "x"], "--bytes and --spm do not go"),
        (["lm", "prepare", "--text", "none.txt", "--out", "D", "--threads", "-5"], "it must be from 1 to 1,024"),
        (["lm", "generate", "none"], "is not a model directory"),
        (["lm", "import", "none", "--out", "M"], "config.json"),
    ],
)
def test_wrong_commands_end_in_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(words)
    except SystemExit as left:
        status = left.code
    assert status == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_the_likeliest_tokens_are_not_drawn():
    for changes in ({"top_k": 3}, {"top_p": 0.5}, {"seed": 2}):
        with pytest.raises(UserError, match=r"does nothing while --temperature is 0"):
            Sampling(temperature=0, **changes)


def test_a_llama_goes_the_same_way(made, capsys):
    pytest.importorskip("transformers")
    sizes = shlex.split("--d-model 16 --heads 4 --kv-heads 2 --d-ff 24 --layers 2 --max-length 32")
    steps = ["--row-length", "32", "--max-update", "10", "--valid-interval-updates", "5", "--device", "cpu"]
    model, data = str(made / "L"), str(made / "D")
    assert main(["lm", "train", "--preset", "llama-tiny", "--data", data, "--out", model, *sizes, *QUICK, *steps]) == 0
    records = [json.loads(line) for line in (made / "L" / "train.log.jsonl").read_text().splitlines()]
    losses = [record["nll"] for record in records if record["kind"] == "valid"]
    assert losses[-1] < losses[0]
    assert main(["lm", "evaluate", model, "--data", data]) == 0
    assert "bits per byte" in capsys.readouterr().out
    assert main(["lm", "generate", model, "--prompt", "Line", "--tokens", "60", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("Line")
    (made / "e.json").write_text(json.dumps([{"text": "Line 3 of a", "answer": " text"}]))
    options = ["--examples", str(made / "e.json"), "--template", "{text}{answer}", "--options", " text", "Wxyz"]
    assert main(["lm", "prompt", model, *options]) == 0
    assert main(["lm", "export", model, "--out", str(made / "LH")]) == 0
    assert json.loads((made / "LH" / "config.json").read_text())["model_type"] == "llama"
    wrong = ["lm", "train", "--preset", "gpt-tiny", "--data", data, "--out", str(made / "W"), "--kv-heads", "2"]
    capsys.readouterr()
    assert main(wrong) == 2
    assert "--kv-heads belongs to a model of kind llama, and this one is of kind gpt" in capsys.readouterr().err
    assert main(["finetune", "classify", "--init-from", model, "--train", data, "--valid", data, "--out", "C"]) == 2
