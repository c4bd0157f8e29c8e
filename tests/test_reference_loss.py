"""The reference's loss and embedding against torch.nn.functional in float64, with gradcheck."""

import math

import pytest
import torch

from fasttfm import reference

torch_loss = torch.nn.functional.cross_entropy


def draw(rows=7, classes=11, width=5):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, classes, generator=generator, dtype=torch.float64) * 3
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[2] = target[5] = 0
    return logits, hidden, weight, target


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_cross_entropy_equals_torchs(label_smoothing, ignore_index):
    logits, hidden, weight, target = draw()
    options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    loss, nll = reference.cross_entropy(logits, target, **options)
    torch.testing.assert_close(loss, torch_loss(logits, target, reduction="sum", **options))
    torch.testing.assert_close(nll, torch_loss(logits, target, reduction="sum", ignore_index=ignore_index))
    loss, nll = reference.linear_cross_entropy(hidden, weight, target, **options)
    torch.testing.assert_close(loss, torch_loss(hidden @ weight.T, target, reduction="sum", **options))
    torch.testing.assert_close(nll, torch_loss(hidden @ weight.T, target, reduction="sum", ignore_index=ignore_index))


def test_all_targets_ignored():
    logits, _, _, _ = draw()
    logits.requires_grad_()
    loss, nll = reference.cross_entropy(logits, torch.zeros(7, dtype=torch.int64), ignore_index=0, label_smoothing=0.1)
    loss.backward()
    assert loss == nll == 0
    assert (logits.grad == 0).all()


def test_half_precision_logits_have_a_float32_loss():
    logits, _, _, target = draw()
    loss, nll = reference.cross_entropy(logits.bfloat16(), target)
    assert loss.dtype == nll.dtype == torch.float32
    assert loss.item() == pytest.approx(
        torch_loss(logits.bfloat16().double(), target, reduction="sum").item(), rel=1e-6
    )


def test_gradients_of_the_losses():
    logits, hidden, weight, target = draw()
    options = {"label_smoothing": 0.1, "ignore_index": 0}
    assert torch.autograd.gradcheck(
        lambda x: reference.cross_entropy(x, target, **options), logits.requires_grad_(), fast_mode=True
    )
    assert torch.autograd.gradcheck(
        lambda h, w: reference.linear_cross_entropy(h, w, target, **options),
        (hidden.requires_grad_(), weight.requires_grad_()),
        fast_mode=True,
    )


def test_embed_equals_torchs_embedding_scaled_plus_positions():
    weight = torch.randn(9, 6, dtype=torch.float64)
    positions = torch.randn(10, 6, dtype=torch.float64)
    tokens = torch.tensor([[1, 2, 0], [8, 0, 0]])
    actual = reference.embed(tokens, weight, positions, scale=math.sqrt(6), first_position=4)
    expected = torch.nn.functional.embedding(tokens, weight) * math.sqrt(6) + positions[4:7]
    torch.testing.assert_close(actual, expected)
    padded = reference.embed(tokens, weight, positions, scale=math.sqrt(6), first_position=4, pad_id=0)
    torch.testing.assert_close(padded, expected * (tokens != 0)[..., None])


def test_padding_takes_no_gradient_as_in_torch():
    weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[1, 2, 0, 2], [8, 0, 0, 1]])
    dy = torch.randn(2, 4, 6, dtype=torch.float64)
    (actual,) = torch.autograd.grad(reference.embed(tokens, weight, None, scale=3.0, pad_id=0), weight, dy)
    (expected,) = torch.autograd.grad(torch.nn.functional.embedding(tokens, weight, padding_idx=0) * 3.0, weight, dy)
    torch.testing.assert_close(actual, expected)


def test_gradients_of_embed_with_dropout():
    weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    positions = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[1, 2, 0], [8, 0, 0]])
    assert torch.autograd.gradcheck(
        lambda w, p: reference.embed(
            tokens, w, p, scale=2.0, pad_id=0, first_position=1, dropout_p=0.3, seed=torch.tensor([7]), site=2
        ),
        (weight, positions),
        fast_mode=True,
    )
