"""TinyBERT's second stage: its losses by the paper's formulas in float64, and the command from a teacher to a score."""

import dataclasses
import math
import random

import pytest
import torch
from test_finetuning import NAMES, PLACES, best_of, evaluated, squad, swag, texts, write
from torch.nn.functional import layer_norm
from training.runs import records

from fasttfm.cli.main import main
from fasttfm.config import RunConfig, sections_of
from fasttfm.config.training import TrainingConfig
from fasttfm.store.checkpoint import read_weights
from fasttfm.store.steps import resolve_checkpoint
from fasttfm.store.weights import model_weights
from fasttfm_pretraining.config.bert import BertClassifierConfig, BertConfig
from fasttfm_pretraining.config.task_student import TaskStudentConfig
from fasttfm_pretraining.data.task_batches import TaskBatch
from fasttfm_pretraining.data.text_tokenizer import train_text_tokenizer
from fasttfm_pretraining.models.bert import BertPretraining
from fasttfm_pretraining.models.heads import Answerer, Classifier
from fasttfm_pretraining.models.saved import write_run
from fasttfm_pretraining.models.task_student import TaskStudent
from fasttfm_pretraining.training.finetuning import task_model
from fasttfm_pretraining.training.task_distillation import TaskDistillation
from fasttfm_pretraining.training.task_prediction import FineTuned

SHAPE = {"vocab_size": 30, "max_length": 16, "dropout": 0.0, "attention_dropout": 0.0, "layer_norm_eps": 1e-6}
TEACHER = {**SHAPE, "d_model": 16, "heads": 2, "d_ff": 24, "layers": 4, "sentence_head": False}
STUDENT = {**SHAPE, "d_model": 8, "heads": 2, "d_ff": 12, "layers": 2}
WEIGHTS = {"embedding_weight": 0.25, "hidden_weight": 0.75, "attention_weight": 1.5, "soft_weight": 3.0}


# ------------------------------------------------------------------------------------------- BERT, written plainly


def plain_bert(weights, config, tokens, segments):
    """Embeddings and every layer's output (L, d), and its attention scores (H, L, L), of one row without padding."""

    def norm(x, name):
        return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], config.layer_norm_eps)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    x = weights["embeddings.word.weight"][tokens] + weights["embeddings.position.weight"][: len(tokens)]
    x = norm(x + weights["embeddings.segment.weight"][segments], "embeddings.norm")
    outputs, scores = [x], []
    for number in range(config.layers):
        at = f"encoder.layers.{number}"
        joint = x @ weights[f"{at}.self_attn.in_proj_weight"].T + weights[f"{at}.self_attn.in_proj_bias"]
        query, key, value = joint.view(len(x), 3, config.heads, -1).permute(1, 2, 0, 3)  # (H, L, D) each
        scores.append(query @ key.transpose(1, 2) / math.sqrt(query.shape[-1]))
        mixed = (scores[-1].softmax(-1) @ value).transpose(0, 1).reshape(len(x), -1)
        x = norm(x + linear(mixed, f"{at}.self_attn.out_proj"), f"{at}.norm1")
        inner = linear(x, f"{at}.linear1")
        inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
        x = norm(x + linear(inner, f"{at}.linear2"), f"{at}.norm2")
        outputs.append(x)
    return outputs, scores


def plain_scores(model, task, rows):
    """The scores of a task from the last hidden states of its rows: a list of vectors, one to be softmaxed each."""
    weights = dict(model.named_parameters())
    if task == "squad":
        both = [row @ weights["span.weight"].T + weights["span.bias"] for row in rows]
        return [each[:, side] for side in (0, 1) for each in both]
    pooled = [
        torch.tanh(row[0] @ weights["body.pooler.weight"].T + weights["body.pooler.bias"])
        @ weights["classifier.weight"].T
        + weights["classifier.bias"]
        for row in rows
    ]
    return pooled if task == "classify" else [torch.cat(pooled[at : at + 2]) for at in range(0, len(pooled), 2)]


def pair(task, **fields):
    torch.manual_seed(3)
    if task == "squad":
        teacher = Answerer(BertConfig(**TEACHER, pooler=False))
    else:
        teacher = Classifier(BertClassifierConfig(**TEACHER, labels=3 if task == "classify" else 1))
    more = {"pooler": task != "squad", "labels": teacher.config.labels if task != "squad" else 2}
    student = TaskStudent(TaskStudentConfig(**STUDENT, **more, **fields), teacher)
    for parameter in [*teacher.parameters(), *student.parameters()]:
        torch.nn.init.normal_(parameter, std=0.4)
    return student.double(), teacher.double()


def batch(task):
    drawn = torch.Generator().manual_seed(5)
    lengths = torch.tensor([7, 5, 6, 4])
    real = torch.arange(7) < lengths[:, None]
    tokens = torch.randint(5, 30, (4, 7), generator=drawn) * real
    segments = (torch.arange(7) > 2).long() * real
    labels = {"squad": torch.tensor([[1, 2], [0, 3], [5, 5], [2, 3]]), "classify": torch.tensor([0, 2, 1, 1])}
    return TaskBatch(
        tokens=tokens, segments=segments, lengths=lengths, labels=labels.get(task, torch.tensor([1, 0])),
        source_tokens=int(lengths.sum()),
    )  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("task", ["classify", "choices", "squad"])
def test_the_loss_is_that_of_the_papers_formulas(task):
    student, teacher = pair(task, temperature=2.0, **WEIGHTS)
    given = batch(task)
    rows = [(given.tokens[row, :n], given.segments[row, :n]) for row, n in enumerate(given.lengths)]
    mine, theirs = (
        [plain_bert(dict(model.body.named_parameters()), model.body.config, *row) for row in rows]
        for model in (student.student, teacher)
    )

    def mean_square(differences):
        return torch.cat([each.flatten() for each in differences]).square().mean()

    def outputs(number, through):
        return mean_square([through(m[0][number]) - t[0][2 * number] for m, t in zip(mine, theirs, strict=True)])

    embedding = outputs(0, student.embedding_map)  # equation 9
    hidden = outputs(1, student.hidden_map) + outputs(2, student.hidden_map)  # equation 8
    attention = sum(  # equation 7
        mean_square([m[1][number] - t[1][2 * number + 1] for m, t in zip(mine, theirs)]) for number in (0, 1)
    )
    soft = torch.zeros((), dtype=torch.float64)  # equation 10
    scores = [
        plain_scores(model, task, [row[0][-1] for row in each])
        for model, each in ((student.student, mine), (teacher, theirs))
    ]
    for z_student, z_teacher in zip(*scores, strict=True):
        p, q = torch.softmax(z_teacher / 2, -1), torch.softmax(z_student / 2, -1)
        soft = soft + 4 * (p * (p / q).log()).sum() / (2 if task == "squad" else 1)
    layers = len(given) * (0.25 * embedding + 0.75 * hidden + 1.5 * attention)
    loss, nll = student.batch_loss(given)
    torch.testing.assert_close(loss.float(), (layers + 3 * soft).float(), rtol=1e-6, atol=0)  # scores are float32
    torch.testing.assert_close(nll, student.loss_of(student(given), given.labels)[1])
    loss.backward()
    student.config = dataclasses.replace(student.config, soft_weight=0.0)
    loss, told = student.batch_loss(given)
    torch.testing.assert_close(loss, layers, rtol=1e-10, atol=0)
    assert told.equal(loss.detach())  # without predictions there is no other loss to tell
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in student.parameters())
    assert not any("teacher" in name for name in student.state_dict())


# ------------------------------------------------------------------------------------------------------ the command

QUICK = [
    "--row-length", "48", "--max-tokens", "512", "--workers", "1", "--threads", "1", "--precision", "fp32",
    "--no-tensorboard", "--log-interval", "2", "--valid-interval-updates", "4",
]  # fmt: skip
BODY = {"d_model": 32, "heads": 2, "d_ff": 48, "layers": 2, "max_length": 64}


def pairs_table(count, seed):
    draw = random.Random(seed)
    rows = [(draw.choice(NAMES), draw.choice(PLACES)) for _ in range(count)]
    return "text\tlabel\n" + "".join(f"{name} lives in {place}.\t{place in PLACES[:3]}\n" for name, place in rows)


DATA = {"classify": pairs_table, "choices": swag, "squad": squad}
ENDING = {"classify": "tsv", "choices": "csv", "squad": "json"}


LABELS = {"classify": ["False", "True"], "choices": ["0", "1", "2", "3"], "squad": []}


def save(folder, kind, tokenizer, **fields):
    """A body (kind bert), or an untrained teacher of a task."""
    torch.manual_seed(4)
    if kind != "bert":
        fields |= {"pooler": kind != "squad", "sentence_head": False}
        fields |= {"classify": {"labels": 2}, "choices": {"labels": 1}, "squad": {}}[kind]
    config = sections_of(kind)["model"](vocab_size=len(tokenizer), **{**BODY, **fields})
    model = BertPretraining(config) if kind == "bert" else task_model(kind, config)
    run = RunConfig(kind=kind, model=config, data=sections_of(kind)["data"](), training=TrainingConfig())
    description = None if kind == "bert" else {"labels": LABELS[kind], "columns": [], "abstains": False}
    write_run(folder, run, model_weights(model), tokenizer, description)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A body for a student, teachers of three tasks, and the tasks' files."""
    folder, tokenizer = tmp_path_factory.mktemp("task-distillation"), train_text_tokenizer(texts(), 420)
    save(folder / "body", "bert", tokenizer)
    save(folder / "small", "bert", tokenizer, d_model=16, d_ff=24, layers=1)
    for task, make in DATA.items():
        for name, count, seed in (("train", 32, 1), ("valid", 12, 2)):
            write(folder / f"{task}.{name}.{ENDING[task]}", make(count, seed))
        save(folder / task, task, tokenizer)
    return folder


def files(folder, task):
    return [f"--{name}={folder / f'{task}.{name}.{ENDING[task]}'}" for name in ("train", "valid")]


def distill(folder, task, student, out, stage, *more):
    command = ["finetune", "distill", str(folder / task), "--init-from", str(student), *files(folder, task), *QUICK]
    return main([*command, "--preset", f"tinybert-{stage}", "--out", str(out), *more])


@pytest.mark.sample(1)
@pytest.mark.parametrize("task", ["classify", "choices", "squad"])
def test_two_commands_make_a_student_of_a_task(world, tmp_path, task, capsys):
    layers, whole = tmp_path / "layers", tmp_path / "whole"
    assert distill(world, task, world / "small", layers, "layers", "--max-update", "8", "--lr", "1e-3") == 0
    assert f"next: --preset tinybert-task --init-from {layers}" in capsys.readouterr().err
    assert not (layers / "student").exists()
    losses = [record["loss"] for record in records(layers, "valid")]
    assert losses[-1] < losses[0]
    assert distill(world, task, layers, whole, "task", "--max-update", "4") == 0
    begun, learned = (read_weights(resolve_checkpoint(folder)) for folder in (layers, whole))
    assert not any("_map" in name for name in learned)
    name = "student.body.encoder.layers.0.linear1.weight"
    assert (begun[name] - learned[name]).abs().max() < 0.01, "the task begins with what the layers have learned"
    assert "student" in capsys.readouterr().err
    valid, predictions = str(world / f"{task}.valid.{ENDING[task]}"), str(tmp_path / "p.json")
    assert main(["finetune", "predict", str(whole / "student"), valid, "--out", predictions]) == 0
    measure = "f1" if task == "squad" else "accuracy"
    assert evaluated(capsys, predictions, valid)[measure] == pytest.approx(best_of(whole, measure))


def test_the_maps_of_a_student_are_gone_on_with(world, tmp_path):
    out = tmp_path / "layers"
    assert distill(world, "classify", world / "small", out, "layers", "--max-update", "2") == 0
    teacher = FineTuned.load(world / "classify")
    paths = [world / f"classify.{name}.tsv" for name in ("train", "valid")]
    task, given = TaskDistillation(teacher, out, *paths), read_weights(resolve_checkpoint(out))
    fields = {**BODY, "vocab_size": teacher.config.model.vocab_size, "d_model": 16, "d_ff": 24, "layers": 1}
    model = task.model(TaskStudentConfig(**fields, **{**WEIGHTS, "soft_weight": 0.0}))
    task.initialise(model, out, out)
    assert model.hidden_map.weight.equal(given["hidden_map.weight"])
    assert model.embedding_map.weight.equal(given["embedding_map.weight"])


def test_what_does_not_fit_ends_in_one_line(world, tmp_path, refusal_of):
    save(tmp_path / "other", "bert", train_text_tokenizer([*texts(), "other words entirely"], 430))
    for name, shape in (("three", {"layers": 3}), ("heads", {"heads": 4})):
        save(tmp_path / name, "bert", FineTuned.load(world / "classify").tokenizer, **shape)
    labels = write(tmp_path / "labels.tsv", "text\tlabel\nAda\tgood\nBob\tbad\n")
    columns = write(tmp_path / "columns.tsv", "a\tb\tc\tlabel\nAda\tx\ty\tTrue\n")
    impossible = write(tmp_path / "impossible.json", squad(20, 3, impossible=True))
    small, out = world / "small", tmp_path / "out"
    for teacher, student, stage, more, message in (
        ("body", small, "layers", files(world, "classify"), "is a model of kind bert, which has no task"),
        ("classify", tmp_path / "other", "layers", (), "is of another vocabulary than"),
        ("classify", small, "task", [f"--train={labels}"], "row 1 has the label 'good', the model knows False, True"),
        ("classify", small, "task", [f"--train={columns}"], "has the columns a, b, c"),
        ("squad", small, "task", files(world, "classify"), "classify.train.tsv"),
        ("squad", small, "task", [f"--train={impossible}"], "is of SQuAD 2.0, where a question may have none"),
        ("classify", tmp_path / "three", "layers", (), "the teacher's 2 layers are not a multiple of the student's 3"),
        ("classify", tmp_path / "heads", "layers", (), "has 4 attention heads"),
        ("classify", small, "layers", ["--row-length", "80"], "--row-length 80"),
        ("classify", small, "layers", ["--checkpoint-activations"], "a student needs what its layers say"),
        ("classify", small, "task", ["--soft-weight", "0"], "a student must learn something"),
    ):
        task = teacher if teacher in DATA else "classify"
        given = {word.partition("=")[0] for word in more}
        others = [word for word in files(world, task) if word.partition("=")[0] not in given]
        command = ["finetune", "distill", world / teacher, "--init-from", student, *others, *QUICK]
        assert message in refusal_of([*command, "--preset", f"tinybert-{stage}", "--out", out, *more])
        assert not out.exists() or not any(path.name != ".lock" for path in out.iterdir())
