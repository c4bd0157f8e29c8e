"""Distillation's losses: their values by hand, their gradients by differences, and the factor of the temperature."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from fasttfm.models import TransformerConfig
from fasttfm.models.layers import EncoderLayer
from fasttfm.models.stack import Stack
from fasttfm.store.weights import layer_map
from fasttfm_pretraining.models.distillation import (
    attention_loss,
    attention_scores,
    cosine_loss,
    hidden_loss,
    soft_target_loss,
    watch,
)


def draw(*shape: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_(grad)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 7.5])
def test_soft_targets_are_the_divergence_of_softened_probabilities(temperature):
    student, teacher = draw(5, 9), draw(5, 9, seed=1)
    p, q = (torch.softmax(logits / temperature, -1) for logits in (teacher, student))
    expected = temperature**2 * (p * (p / q).log()).sum()
    torch.testing.assert_close(soft_target_loss(student, teacher, temperature), expected)
    assert soft_target_loss(teacher, teacher, temperature).item() == pytest.approx(0, abs=1e-12)


def test_the_gradient_keeps_its_size_at_every_temperature():
    # d/dz_s of T^2 KL is T (q - p): for large T the difference of the centred logits over V (Hinton et al. 2015)
    student, teacher = draw(4, 6), draw(4, 6, seed=1)
    (at_2,) = torch.autograd.grad(soft_target_loss(student, teacher, 2.0), student)
    p, q = (torch.softmax(logits / 2.0, -1) for logits in (teacher, student))
    torch.testing.assert_close(at_2, 2.0 * (q - p))
    (hot,) = torch.autograd.grad(soft_target_loss(student, teacher, 1e5), student)
    centred = [logits.detach() - logits.detach().mean(-1, keepdim=True) for logits in (student, teacher)]
    torch.testing.assert_close(hot, (centred[0] - centred[1]) / 6, rtol=1e-3, atol=1e-4)


def test_gradients_are_those_of_differences():
    teacher, scores = draw(3, 4, seed=1), draw(2, 2, 3, 3, seed=2)
    projection = nn.Linear(5, 4).double()
    lengths = torch.tensor([3, 2])
    assert gradcheck(lambda z: soft_target_loss(z, teacher, 3.0), (draw(3, 4),))
    assert gradcheck(lambda h: cosine_loss(h, teacher), (draw(3, 4),))
    assert gradcheck(lambda h, w: hidden_loss(h, teacher, lambda x: x @ w), (draw(3, 5), draw(5, 4, seed=3)))
    assert gradcheck(lambda a: attention_loss(a, scores, lengths), (draw(2, 2, 3, 3),))
    loss = hidden_loss(draw(3, 5), teacher, projection)
    loss.backward()
    assert projection.weight.grad.abs().sum() > 0  # the map is learned
    assert teacher.grad is None  # the teacher is not


def test_padding_has_no_part_in_attention():
    student, teacher = draw(2, 2, 4, 4), draw(2, 2, 4, 4, seed=1)
    lengths = torch.tensor([4, 2])
    expected = torch.cat(
        [(student - teacher)[0].flatten(), (student - teacher)[1, :, :2, :2].flatten()]
    ).square().mean()  # fmt: skip
    torch.testing.assert_close(attention_loss(student, teacher, lengths), expected)


def test_cosine_and_hidden_losses_by_hand():
    one, other = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 2.0], [3.0, 3.0]])
    assert cosine_loss(one, other).item() == pytest.approx(1.0)  # a right angle and none
    assert hidden_loss(one, other).item() == pytest.approx((1 + 4) / 2 + (4 + 4) / 2)


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


def test_layers_are_mapped_evenly_and_the_last_to_the_last():
    assert layer_map(12, 4) == [2, 5, 8, 11]
    assert layer_map(6, 3) == [1, 3, 5]
    assert layer_map(4, 4) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="the teacher's 12 layers are not a multiple of the student's 5"):
        layer_map(12, 5)


@pytest.mark.parametrize("shared", [False, True])
def test_a_trace_holds_what_passes_through_the_layers(shared):
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=5, d_model=8, heads=2, d_ff=12, dropout=0.0)
    one = EncoderLayer(config)
    stack = Stack([one] * 3 if shared else [one, EncoderLayer(config), EncoderLayer(config)]).double()
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.4)
    x, lengths = draw(2, 4, 8, grad=False), torch.tensor([4, 3])
    plain = stack(x, lengths)
    with watch(stack.layers, scores=True) as trace:
        traced = stack(x, lengths)
    torch.testing.assert_close(traced, plain)
    assert len(trace.inputs) == len(trace.outputs) == len(trace.scores) == 3
    torch.testing.assert_close(trace.inputs[0], x)
    torch.testing.assert_close(trace.outputs[-1], plain)
    torch.testing.assert_close(trace.inputs[1:], trace.outputs[:-1])
    for number, layer in enumerate(stack.layers):
        keys = torch.arange(4) < lengths[:, None]
        weights = trace.scores[number].masked_fill(~keys[:, None, None, :], -torch.inf).softmax(-1)
        expected = layer.self_attn.weights(trace.inputs[number], lengths=lengths)
        torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(attention_scores(one.self_attn, x), trace.scores[0])
    assert stack(x, lengths).equal(plain)  # and nothing watches any more
