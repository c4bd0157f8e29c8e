"""The reference's loss and embedding against torch.nn.functional in float64."""

import pytest
import torch

from fasttfm import reference

torch_loss = torch.nn.functional.cross_entropy


def double(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_cross_entropy_equals_torchs(label_smoothing, ignore_index):
    logits, hidden, weight, target = double(7, 11), double(7, 5), double(11, 5), torch.tensor([1, 10, 0, 3, 3, 0, 7])
    options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    for leaves, function, x in (
        ([logits], reference.cross_entropy, logits),
        ([hidden, weight], reference.linear_cross_entropy, hidden @ weight.T),
    ):
        loss, nll = function(*leaves, target, **options)
        expected = torch_loss(x, target, reduction="sum", **options)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(nll, torch_loss(x, target, reduction="sum", ignore_index=ignore_index))
        torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))


def test_all_targets_ignored():
    logits = double(7, 11)
    loss, nll = reference.cross_entropy(logits, torch.zeros(7, dtype=torch.int64), ignore_index=0, label_smoothing=0.1)
    loss.backward()
    assert loss == nll == 0
    assert (logits.grad == 0).all()


def test_half_precision_logits_have_a_float32_loss():
    logits, target = double(7, 11).bfloat16(), torch.arange(7)
    loss, nll = reference.cross_entropy(logits, target)
    assert loss.dtype == nll.dtype == torch.float32
    assert loss.item() == pytest.approx(torch_loss(logits.double(), target, reduction="sum").item(), rel=1e-6)


@pytest.mark.parametrize("pad_id", [None, 0])
def test_embed_equals_torchs_embedding_scaled_plus_positions(pad_id):
    weight, positions = double(9, 6), double(10, 6)
    tokens = torch.tensor([[1, 2, 0], [8, 0, 0]])
    actual = reference.embed(tokens, weight, positions, scale=6**0.5, first_position=4, pad_id=pad_id)
    expected = torch.nn.functional.embedding(tokens, weight, padding_idx=pad_id) * 6**0.5 + positions[4:7]
    expected = expected if pad_id is None else expected * (tokens != pad_id)[..., None]
    torch.testing.assert_close(actual, expected)
    dy = torch.randn_like(expected)
    gradients = (torch.autograd.grad(y, (weight, positions), dy) for y in (actual, expected))
    torch.testing.assert_close(*gradients)
