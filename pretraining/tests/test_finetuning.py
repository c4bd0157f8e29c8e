"""Fine-tuning from a model directory to predictions and their score, at tiny size."""

import copy
import json
import random
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from training.runs import assert_same_weights, records

from fasttfm.cli.main import main
from fasttfm.config import RunConfig, sections_of
from fasttfm.config.training import TrainingConfig
from fasttfm.store.checkpoint import read_weights
from fasttfm.store.steps import resolve_checkpoint
from fasttfm.store.weights import model_weights
from fasttfm_pretraining.config.bert import AlbertConfig, BertConfig, ElectraConfig
from fasttfm_pretraining.config.gpt import GPTConfig
from fasttfm_pretraining.data.text_tokenizer import train_text_tokenizer
from fasttfm_pretraining.models.bert import BertPretraining
from fasttfm_pretraining.models.electra import Electra
from fasttfm_pretraining.models.gpt import GPT
from fasttfm_pretraining.models.saved import write_run

NAMES = ["Ada", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal"]
PLACES = ["Rome", "Oslo", "Lima", "Cairo", "Delhi", "Quito"]
SIZE = {"d_model": 32, "heads": 2, "d_ff": 64, "layers": 2, "max_length": 64, "dropout": 0.0, "attention_dropout": 0.0}
FAST = shlex.split(
    "--preset tiny --row-length 48 --max-tokens 512 --log-interval 5 --workers 1 --threads 1 --lr 3e-3 "
    "--precision fp32 --no-tensorboard"
)


def squad(count: int, seed: int, impossible: bool = False) -> dict:
    """Contexts such as "Ada lives in Rome. Bob lives in Oslo." and questions for the place of one of the names."""
    draw = random.Random(seed)
    paragraphs = []
    for number in range(count):
        names, places = draw.sample(NAMES, 2), draw.sample(PLACES, 2)
        context = " ".join(f"{name} lives in {place}." for name, place in zip(names, places))
        asked = draw.randrange(2)
        answers = [{"text": places[asked], "answer_start": context.index(places[asked])}]
        entry = {"id": f"{seed}-{number}", "question": f"Where does {names[asked]} live?", "answers": answers}
        if impossible:
            entry |= {"is_impossible": False}
            if number % 2:
                entry |= {"question": "Who was king?", "is_impossible": True, "answers": []}
        paragraphs.append({"context": context, "qas": [entry]})
    return {"version": "v2.0" if impossible else "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}


def texts() -> list[str]:
    given = [p["context"] + " " + p["qas"][0]["question"] for p in squad(60, 9)["data"][0]["paragraphs"]]
    return [*given, "Who was king?"] * 2


BODIES = {
    "bert": (BertConfig, BertPretraining, {}),
    "albert": (AlbertConfig, BertPretraining, {"embedding_size": 16}),
    "electra": (ElectraConfig, Electra, {"embedding_size": 16}),
    "gpt": (GPTConfig, GPT, {}),
}


@pytest.fixture(scope="module")
def bodies(tmp_path_factory) -> dict[str, Path]:
    """Directories of a model of every kind as pre-training leaves them."""
    folder, tokenizer = tmp_path_factory.mktemp("bodies"), train_text_tokenizer(texts(), 420)
    for kind, (config_class, model_class, more) in BODIES.items():
        torch.manual_seed(4)
        config = config_class(vocab_size=len(tokenizer), **SIZE, **more)
        run = RunConfig(kind=kind, model=config, data=sections_of(kind)["data"](), training=TrainingConfig())
        write_run(folder / kind, run, model_weights(model_class(config)), tokenizer)
    return {kind: folder / kind for kind in BODIES}


def write(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def evaluated(capsys, predictions: str, valid: str, *more: str) -> dict:
    """The scores that `finetune evaluate` prints."""
    capsys.readouterr()
    assert main(["finetune", "evaluate", predictions, valid, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def best_of(out: Path | str, measure: str) -> float:
    return max(record[measure] for record in records(out, "valid"))


def test_an_interrupted_run_ends_in_the_same_bits(tmp_path, bodies):
    train, valid = write(tmp_path / "train.json", squad(40, 1)), write(tmp_path / "valid.json", squad(8, 2))
    command = ["finetune", "squad", "--init-from", str(bodies["bert"]), "--train", train, "--valid", valid, *FAST]
    command += ["--schedule", "constant", "--warmup-updates", "2"]
    for name, updates in (("whole", "8"), ("halves", "3"), ("halves", "8")):
        assert main([*command, "--out", str(tmp_path / name), "--max-update", updates]) == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "halves")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("flag", "kind", "task"),
    [
        ("--like", "bert", "squad"),
        ("--init-from", "bert", "squad"),
        ("--init-from", "albert", "squad"),
        ("--init-from", "electra", "classify"),
        ("--init-from", "albert", "classify"),
        ("--init-from", "electra", "squad"),
    ],
)
def test_it_begins_with_the_body_and_a_fresh_head_or_all_fresh(tmp_path, bodies, flag, kind, task):
    """An ELECTRA's body is its discriminator."""
    train, valid = write(tmp_path / "train.json", squad(20, 1)), write(tmp_path / "valid.json", squad(4, 2))
    if task == "classify":
        train = valid = write(tmp_path / "a.tsv", "sentence\tlabel\n" + "Ada lives in Rome.\t1\nWho was king?\t0\n" * 4)
    command = ["finetune", task, flag, str(bodies[kind]), "--train", train, "--valid", valid, *FAST]
    assert main([*command, "--rates", "body.*=0", "--max-update", "1", "--out", str(tmp_path / "model")]) == 0
    weights = read_weights(resolve_checkpoint(tmp_path / "model", "last"))
    body, prefix = read_weights(resolve_checkpoint(bodies[kind])), "discriminator." if kind == "electra" else "body."
    tables = [name for name in weights if name.startswith("body.") and not name.startswith("body.pooler.")]
    tables = [name for name in tables if weights[name].dim() == 2]
    assert any("embedding_projection" in name for name in tables) is (kind != "bert")
    for name in tables:
        assert torch.equal(weights[name], body[prefix + name.removeprefix("body.")]) is (flag == "--init-from"), name
    assert ("span.weight" in weights) is (task == "squad")
    assert any(name.startswith("body.pooler.") for name in weights) is (task == "classify")


def test_impossible_questions_are_told_by_a_threshold(tmp_path, bodies, capsys):
    train = write(tmp_path / "train.json", squad(200, 1, impossible=True))
    valid = write(tmp_path / "valid.json", squad(40, 2, impossible=True))
    out, predictions, null = str(tmp_path / "model"), str(tmp_path / "p.json"), str(tmp_path / "null.json")
    command = ["finetune", "squad", "--init-from", str(bodies["bert"]), "--train", train, "--valid", valid]
    assert main([*command, "--out", out, *FAST, "--max-epoch", "4"]) == 0
    assert main(["finetune", "predict", out, valid, "--out", predictions, "--null-scores", null]) == 0
    by_training = evaluated(capsys, predictions, valid)
    assert by_training["total"] == 40
    assert by_training["f1"] == pytest.approx(best_of(out, "f1"))
    assert by_training["NoAns_exact"] > 90  # these questions have words that no other has
    for hide in (lambda asked: asked.update(answers=[]), lambda asked: asked.pop("answers")):
        content = json.loads(Path(valid).read_text())
        for asked in (asked for part in content["data"] for each in part["paragraphs"] for asked in each["qas"]):
            hide(asked)
        unseen = write(tmp_path / "unseen.json", {**content, "version": "1.1"})
        assert main(["finetune", "predict", out, unseen, "--out", str(tmp_path / "unseen.out")]) == 0
        assert Path(tmp_path / "unseen.out").read_bytes() == Path(predictions).read_bytes()
    assert main(["finetune", "predict", out, valid, "--out", predictions, "--threshold", "1e8"]) == 0
    searched = evaluated(capsys, predictions, valid, "--null-scores", null, "--threshold", "1e8")
    assert searched["NoAns_exact"] == 0  # with that threshold every question gets an answer
    assert searched["best_f1"] == pytest.approx(by_training["f1"])
    assert main(["finetune", "predict", out, valid, "--out", predictions, "--max-tokens", "0"]) == 2


def swag(count: int, seed: int) -> str:
    """The ending that belongs is the one that says the place again."""
    draw = random.Random(seed)
    lines = ["video-id,sent1,sent2,ending0,ending1,ending2,ending3,label"]
    for number in range(count):
        right, *wrong = draw.sample(PLACES, 4)
        label = draw.randrange(4)
        endings = [*wrong[:label], right, *wrong[label:]]
        lines.append(f"v{number},Ada lives in {right}.,Where? In,{','.join(endings)},{label}")
    return "\n".join(lines) + "\n"


def weather(count: int, seed: int) -> str:
    draw = random.Random(seed)
    rows = [(draw.choice(NAMES), draw.choice(PLACES)) for _ in range(count)]
    lines = [f"{name} lives in {place}.\t{'warm' if place in PLACES[2:5] else 'cold'}\n" for name, place in rows]
    return "sentence\tlabel\n" + "".join(lines)


TASKS = {
    "choices": ("csv", swag, ["--max-epoch", "2"]),
    "classify": ("tsv", weather, ["--max-epoch", "10", "--max-tokens", "128"]),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["bert", "gpt"])
@pytest.mark.parametrize("task", TASKS)
def test_choices_and_classes_are_learnt(tmp_path, bodies, kind, task, capsys):
    ending, make, epochs = TASKS[task]
    train, valid = (write(tmp_path / f"{seed}.{ending}", make(count, seed)) for count, seed in ((120, 1), (32, 2)))
    out, predictions = str(tmp_path / "model"), str(tmp_path / "p.json")
    command = ["finetune", task, "--init-from", str(bodies[kind]), "--train", train, "--valid", valid]
    assert main([*command, "--out", out, *FAST, *epochs]) == 0
    assert main(["finetune", "predict", out, valid, "--out", predictions]) == 0
    accuracy = evaluated(capsys, predictions, valid)["accuracy"]
    assert accuracy == pytest.approx(best_of(out, "accuracy"))
    if task == "classify":
        assert accuracy > 90
        assert set(json.loads(Path(predictions).read_text()).values()) == {"warm", "cold"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "rate"), [("bert", 3e-5), ("electra", 3e-5), ("gpt", 6.25e-5)])
def test_an_imported_body_takes_its_family_s_recipe_and_one_trained_here_another(tmp_path, bodies, kind, rate, capsys):
    body = tmp_path / "body"
    shutil.copytree(bodies[kind], body)
    table = write(tmp_path / "a.tsv", "sentence\tlabel\nAda\t1\nBob\t0\n")
    command = ["finetune", "classify", "--init-from", str(body), "--train", table, "--valid", table, "--out", "M"]
    for expected in (rate, 5e-4):
        assert main([*command, "--dump-config"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["training"]["lr"] == expected
        (body / "train.log.jsonl").write_text("")  # as training leaves one


def test_what_does_not_fit_ends_in_one_line(tmp_path, bodies, refusal_of):
    train, valid = write(tmp_path / "train.json", squad(9, 1)), write(tmp_path / "valid.json", squad(4, 2))
    cut = copy.deepcopy(squad(4, 2))
    cut["data"][0]["paragraphs"][1]["qas"][0]["answers"][0]["answer_start"] += 1
    wrong = write(tmp_path / "wrong.json", cut)
    squad_from, out = ["finetune", "squad", "--train", train, "--init-from"], ["--out", tmp_path / "model"]
    for arguments, message in (
        ([*squad_from, bodies["bert"], "--valid", wrong, *FAST], "article 1, paragraph 2, question 1 (2-1), answer 1"),
        ([*squad_from, bodies["bert"], "--valid", valid, *FAST, "--row-length", 100], "the model has 64 positions"),
        ([*squad_from, bodies["gpt"], "--valid", valid, *FAST], "is a GPT"),
        (["finetune", "predict", bodies["bert"], valid], "has no task"),
        ([*squad_from, bodies["bert"], "--valid", valid, "--max-tokens", 10], "is less than data.row_length"),
    ):
        assert message in refusal_of([*arguments, *out])
