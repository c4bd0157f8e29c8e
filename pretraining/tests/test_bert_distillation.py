"""A BERT that learns from another one: what its loss is made of, what it begins with, and the command."""

import json
import shutil

import numpy as np
import pytest
import torch
from training.runs import assert_same_weights

from fasttfm.cli.main import main
from fasttfm_pretraining.config.bert import BertConfig, StudentConfig
from fasttfm_pretraining.data.masked_rows import MaskedBatch
from fasttfm_pretraining.models.bert import BertPretraining
from fasttfm_pretraining.models.distillation import attention_scores
from fasttfm_pretraining.models.kinds import read_model
from fasttfm_pretraining.models.student import Student
from fasttfm_pretraining.training import distillation

TEACHER = {"d_model": 16, "heads": 2, "d_ff": 24, "layers": 4, "max_length": 20}
TEACHER |= {"dropout": 0.0, "attention_dropout": 0.0}
NOTHING = dict.fromkeys(("soft_weight", "mlm_weight", "cosine_weight"), 0.0)


def pair(**fields):
    torch.manual_seed(2)
    teacher = BertPretraining(BertConfig(vocab_size=40, **TEACHER))
    student = Student(StudentConfig(vocab_size=40, **{**TEACHER, "layers": 2, **fields}), teacher)
    for parameter in [*teacher.parameters(), *student.parameters()]:
        torch.nn.init.normal_(parameter, std=0.3)
    return student, teacher


def batch() -> MaskedBatch:
    random = np.random.default_rng(5)
    tokens = torch.from_numpy(random.integers(5, 40, (3, 8)))
    lengths = torch.tensor([8, 5, 6])
    tokens[torch.arange(8) >= lengths[:, None]] = 0
    positions, labels = torch.tensor([1, 6, 10, 18]), torch.tensor([7, 9, 11, 30])
    return MaskedBatch(
        tokens=tokens, segments=None, lengths=lengths, positions=positions, labels=labels, sentence_labels=None,
        source_tokens=15,
    )  # fmt: skip


def states(model, given):
    """Embeddings, every layer's output and attention scores, logits at the hidden tokens: one layer after the other."""
    body = model.body
    x = body.embeddings(given.tokens, None, None)
    outputs, scores = [x], []
    for layer in body.encoder.layers:
        scores.append(attention_scores(layer.self_attn, outputs[-1]))
        outputs.append(layer(outputs[-1], given.lengths))
    masked = model.masked(outputs[-1].flatten(0, 1)[given.positions], body.embeddings.word.weight)
    return outputs, scores, masked


def test_the_loss_is_the_weighted_sum_by_hand():
    weights = {"soft_weight": 3.0, "mlm_weight": 2.0, "cosine_weight": 0.5, "embedding_weight": 0.25}
    weights |= {"hidden_weight": 0.75, "attention_weight": 1.5}
    student, teacher = pair(temperature=2.5, **weights)
    given = batch()
    loss, nll = student.batch_loss(given)
    mine, my_scores, my_logits = states(student, given)
    theirs, their_scores, their_logits = states(teacher, given)
    real = torch.arange(8) < given.lengths[:, None]
    cross_entropy = torch.nn.functional.cross_entropy(my_logits, given.labels, reduction="sum")
    p, q = (torch.softmax(logits / 2.5, -1) for logits in (their_logits, my_logits))
    soft = 2.5**2 * (p * (p / q).log()).sum()
    angles = torch.cosine_similarity(mine[-1][real], theirs[-1][real], dim=-1)
    embedding = (student.embedding_map(mine[0][real]) - theirs[0][real]).square().mean()
    hidden = sum((student.hidden_map(mine[i][real]) - theirs[2 * i][real]).square().mean() for i in (1, 2))
    attention = torch.zeros(())
    for number in (0, 1):
        parts = [
            (my_scores[number] - their_scores[2 * number + 1])[row, :, :length, :length].flatten()
            for row, length in enumerate(given.lengths)
        ]
        attention = attention + torch.cat(parts).square().mean()
    expected = 2.0 * cross_entropy + 3.0 * soft
    expected = expected + 4 * (0.5 * (1 - angles).mean() + 0.25 * embedding + 0.75 * hidden + 1.5 * attention)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(nll, cross_entropy.detach(), rtol=1e-5, atol=1e-5)
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert student.hidden_map.weight.grad.abs().sum() > 0
    assert student.body.encoder.layers[0].linear1.weight.grad.abs().sum() > 0


def test_validation_minimizes_what_training_does():
    student, _ = pair(**{**NOTHING, "hidden_weight": 1.0})  # the head is untrained
    loss, nll = student.batch_loss(batch())
    scores = student.batch_scores(batch())
    assert scores["loss"] == loss != nll == scores["nll"]
    assert "sentences" not in scores


def test_the_teacher_is_neither_saved_nor_trained():
    student, teacher = pair()
    assert sum(p.numel() for p in student.parameters()) < sum(p.numel() for p in teacher.parameters())
    assert not any("teacher" in name for name in student.state_dict())
    student.train()
    assert not teacher.training


def test_a_student_that_is_its_teacher_loses_nothing():
    student, teacher = pair(layers=4, **{**NOTHING, "soft_weight": 1.0, "cosine_weight": 1.0, "attention_weight": 1.0})
    assert student.copy_layers()
    loss, _ = student.batch_loss(batch())
    assert loss.item() == pytest.approx(0, abs=1e-4)
    assert teacher.masked.bias.equal(student.masked.bias)


def test_it_begins_with_every_second_layer_of_its_teacher():
    student, teacher = pair()
    assert student.copy_layers()
    for number, source in enumerate((0, 2)):
        one, other = student.body.encoder.layers[number], teacher.body.encoder.layers[source]
        assert all(a.equal(b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert student.body.embeddings.word.weight.equal(teacher.body.embeddings.word.weight)
    narrow, _ = pair(d_model=8, hidden_weight=1.0, **NOTHING)
    before = narrow.body.embeddings.word.weight.clone()
    assert not narrow.copy_layers()
    assert narrow.body.embeddings.word.weight.equal(before)


@pytest.mark.parametrize("fields", [NOTHING, {"temperature": 0.0}, {"soft_weight": -1.0}, {"pooler": True}])
def test_wrong_settings_are_refused(fields):
    with pytest.raises(ValueError, match=r"weight|temperature|pooler"):
        StudentConfig(vocab_size=40, **TEACHER, **fields)


SIZE = ["--d-model", "32", "--heads", "2", "--d-ff", "48", "--layers", "2", "--max-length", "64", "--row-length", "32"]
QUICK = ["--max-tokens", "512", "--precision", "fp32", "--workers", "1", "--threads", "1", "--no-tensorboard"]
QUICK += ["--schedule", "constant", "--warmup-updates", "1", "--valid-interval-updates", "4", "--log-interval", "2"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distillation")
    lines = [f"{name} lives in {place}." for name in ("Ada", "Bob", "Cleo") for place in ("Rome", "Oslo", "Lima")] * 12
    (folder / "text.txt").write_text("\n".join(lines))
    prepare = ["mlm", "prepare", "--text", str(folder / "text.txt"), "--out", str(folder / "data")]
    assert main([*prepare, "--vocab-size", "310", "--valid-share", "0.2"]) == 0
    train = ["mlm", "train", "--preset", "bert-tiny", "--data", str(folder / "data"), "--out", str(folder / "teacher")]
    assert main([*train, "--objective", "mlm", *SIZE, *QUICK, "--max-update", "2"]) == 0
    return folder


@pytest.mark.whole
@pytest.mark.parametrize(("preset", "shape"), [("distilbert", []), ("tinybert", ["--d-model", "16", "--d-ff", "24"])])
def test_a_student_comes_out_of_one_command(teacher, tmp_path, preset, shape, capsys):
    command = ["mlm", "distill", str(teacher / "teacher"), "--data", str(teacher / "data"), "--preset", preset]
    command += [*shape, "--layers", "1", "--row-length", "32", *QUICK]
    assert main([*command, "--out", str(tmp_path / "whole"), "--max-update", "4"]) == 0
    assert main([*command, "--out", str(tmp_path / "halves"), "--max-update", "2"]) == 0
    assert main([*command, "--out", str(tmp_path / "halves"), "--max-update", "4"]) == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "halves")
    student = read_model("mlm", tmp_path / "whole" / "student")
    assert student.config.layers == 1
    assert student.config.d_model == (16 if shape else 32)
    capsys.readouterr()
    assert main(["mlm", "evaluate", str(tmp_path / "whole" / "student"), "--data", str(teacher / "data")]) == 0
    assert "masked tokens" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "whole" / "train.log.jsonl").read_text().splitlines()]
    assert records[-1]["kind"] == "valid"
    shutil.rmtree(tmp_path / "whole" / "student")
    assert main([*command, "--heads", "2", "--out", str(tmp_path / "whole"), "--dump-config"]) == 0
    assert not (tmp_path / "whole" / "student").exists()  # it prints alone


def test_dump_config_completes_a_student_from_its_teacher_as_training_does(tmp_path, monkeypatch, capsys):
    config = BertConfig(vocab_size=40, d_model=32, heads=2, d_ff=48, layers=2, max_length=32)
    monkeypatch.setattr(distillation, "read_kind", lambda path: "bert")
    monkeypatch.setattr(distillation, "read_model", lambda command, path: BertPretraining(config))
    command = ["mlm", "distill", str(tmp_path), "--preset", "tinybert", "--d-model", "16", "--dump-config"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert all(f"  {line}\n" in shown for line in ("d_model: 16", "heads: 2", "d_ff: 48", "layers: 1"))


def test_what_does_not_fit_ends_in_one_line(teacher, tmp_path, refusal_of):
    command = ["mlm", "distill", str(teacher / "teacher"), "--data", str(teacher / "data"), *QUICK, "--max-update", "2"]
    command += ["--out", str(tmp_path / "out"), "--row-length", "32"]
    for more, message in (
        (["--d-model", "16"], "directions are compared at the teacher's width 32"),
        (["--layers", "3"], "the teacher's 2 layers are not a multiple of the student's 3"),
        (["--preset", "tinybert", "--heads", "4"], "the teacher has 2"),
        (["--objective", "mlm+nsp"], "a student learns from hidden tokens alone"),
    ):
        assert message in refusal_of([*command, *more])
