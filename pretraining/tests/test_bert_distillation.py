"""A BERT that learns from another one: its losses and their gradients, what it begins with, and the command."""

import shutil

import numpy as np
import pytest
import torch
from training.runs import assert_same_weights, records

from fasttfm.cli.main import main
from fasttfm.models import TransformerConfig
from fasttfm.models.layers import EncoderLayer
from fasttfm.models.stack import Stack
from fasttfm_pretraining.config.bert import BertConfig, StudentConfig
from fasttfm_pretraining.data.masked_rows import MaskedBatch
from fasttfm_pretraining.models.bert import BertPretraining
from fasttfm_pretraining.models.distillation import (
    attention_loss,
    cosine_loss,
    hidden_loss,
    watch,
)
from fasttfm_pretraining.models.kinds import read_model
from fasttfm_pretraining.models.student import Student

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


def draw(*shape: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_(grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_of_halves_are_sums_in_float32(dtype):
    """Over more tokens and pairs than float16 has numbers, as in the batches of the presets."""
    student, teacher = (draw(20_000, 4, seed=seed, grad=False).to(dtype) for seed in (0, 1))
    scores = [draw(4, 1, 160, 160, seed=seed, grad=False).to(dtype) for seed in (2, 3)]
    lengths = torch.full((4,), 160)
    for loss, given in (
        (hidden_loss, (student, teacher)),
        (cosine_loss, (student, teacher)),
        (lambda a, b: attention_loss(a, b, lengths), scores),
    ):
        torch.testing.assert_close(loss(*given).double(), loss(*(x.double() for x in given)), rtol=1e-5, atol=0.0)


def test_a_layer_that_occurs_three_times_leaves_three_values_each():
    """What the values are, the losses tell, which are compared with TinyBERT's formulas."""
    torch.manual_seed(0)
    stack = Stack([EncoderLayer(TransformerConfig(vocab_size=5, d_model=8, heads=2, d_ff=12, dropout=0.0))] * 3)
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x = torch.randn(2, 4, 8)
    with watch(stack.layers, scores=True) as trace:
        last = stack(x)
    assert len(trace.inputs) == len(trace.outputs) == len(trace.scores) == 3
    torch.testing.assert_close([*trace.inputs, last], [x, *trace.outputs])
    stack(x)
    assert len(trace.outputs) == 3  # nothing watches any more


def test_the_loss_is_the_weighted_sum_by_hand():
    """Layer losses are compared with TinyBERT's formulas in test_task_distillation.py: here, what they weigh."""
    weights = {"soft_weight": 3.0, "mlm_weight": 2.0, "cosine_weight": 0.5, "hidden_weight": 0.75}
    student, teacher = pair(temperature=2.5, **weights)
    given = batch()
    loss, nll = student.batch_loss(given)
    real = torch.arange(8) < given.lengths[:, None]
    layers, logits = [], []
    for model in (student, teacher):
        with watch(model.body.encoder.layers) as trace:
            hidden = model.body(given.tokens, None, given.lengths)
        layers.append([output[real] for output in trace.outputs])
        picked = hidden.flatten(0, 1)[given.positions]
        logits.append(model.masked(picked, model.body.embeddings.word.weight))
    (mine, theirs), (my_logits, their_logits) = layers, logits
    cross_entropy = torch.nn.functional.cross_entropy(my_logits, given.labels, reduction="sum")
    p, q = (torch.softmax(each / 2.5, -1) for each in (their_logits, my_logits))
    soft = 2.5**2 * (p * (p / q).log()).sum()
    angles = torch.cosine_similarity(mine[-1], theirs[-1], dim=-1)
    hidden = sum((student.hidden_map(mine[i]) - theirs[2 * i + 1]).square().mean() for i in (0, 1))
    expected = 2.0 * cross_entropy + 3.0 * soft + 4 * (0.5 * (1 - angles).mean() + 0.75 * hidden)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(nll, cross_entropy.detach(), rtol=1e-5, atol=1e-5)
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert student.hidden_map.weight.grad.abs().sum() > 0
    assert student.body.encoder.layers[0].linear1.weight.grad.abs().sum() > 0


def test_validation_minimizes_what_training_does_and_the_teacher_is_neither_saved_nor_trained():
    student, teacher = pair(**{**NOTHING, "hidden_weight": 1.0})  # the head is untrained
    loss, nll = student.batch_loss(batch())
    scores = student.batch_scores(batch())
    assert scores["loss"] == loss != nll == scores["nll"]
    assert "sentences" not in scores
    assert not any("teacher" in name for name in student.state_dict())
    student.train()
    assert not teacher.training


def test_a_student_begins_with_every_second_layer_and_one_that_is_its_teacher_loses_nothing():
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
    same, teacher = pair(layers=4, **{**NOTHING, "soft_weight": 1.0, "cosine_weight": 1.0, "attention_weight": 1.0})
    assert same.copy_layers()
    assert same.batch_loss(batch())[0].item() == pytest.approx(0, abs=1e-4)
    assert teacher.masked.bias.equal(same.masked.bias)


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
    assert records(tmp_path / "whole", "valid")
    shutil.rmtree(tmp_path / "whole" / "student")
    assert main([*command, "--heads", "2", "--out", str(tmp_path / "whole"), "--dump-config"]) == 0
    assert not (tmp_path / "whole" / "student").exists()  # it prints alone


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
