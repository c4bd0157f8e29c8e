"""Training with dropout gives the same losses with the kernels, with PyTorch and with the specification."""

from types import SimpleNamespace

import pytest
import torch

from fasttfm import functional, reference
from fasttfm.models import Transformer, TransformerConfig, attention, embedding, layers, model, residual, stack


def packed_qkv_attention(packed_qkv, query, **options):
    q, k, v = (part.transpose(1, 2) for part in (*([] if query is None else [query]), *packed_qkv.unbind(2)))
    return reference.attention(q, k, v, **options)[0].transpose(1, 2).flatten(2)


SPECIFICATION = SimpleNamespace(
    packed_qkv_attention=packed_qkv_attention,
    feed_forward=reference.feed_forward,
    residual_layer_norm=reference.residual_layer_norm,
    layer_norm=reference.layer_norm,
    residual_add=reference.residual_add,
    embed=reference.embed,
    linear_cross_entropy=reference.linear_cross_entropy,
)


def losses(norm_first: bool, steps: int) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(7)
    config = TransformerConfig(
        vocab_size=23, d_model=16, heads=2, d_ff=32, encoder_layers=1, decoder_layers=1, norm_first=norm_first,
        final_norm=norm_first, dropout=0.1, attention_dropout=0.2, relu_dropout=0.3, max_length=16,
    )  # fmt: skip
    model = Transformer(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-9)
    source = torch.randint(4, 23, (3, 7))
    target = torch.randint(4, 23, (3, 6))
    source_lengths, target_lengths = torch.tensor([7, 5, 2]), torch.tensor([5, 3, 4])
    for row in range(3):
        source[row, source_lengths[row] :] = 0
        target[row, target_lengths[row] + 1 :] = 0
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss, _, tokens = model.loss(source, target[:, :-1], target[:, 1:], source_lengths, target_lengths)
        loss = loss / tokens
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.sample(1)
@pytest.mark.parametrize("norm_first", [False, True])
def test_losses_of_four_steps_are_equal(norm_first, monkeypatch):
    steps = 4
    with functional.backend("torch"):
        plain = losses(norm_first, steps)
    with functional.backend("triton"):
        kernels = losses(norm_first, steps)
    for block in (attention, embedding, layers, model, residual):
        monkeypatch.setattr(block, "F", SPECIFICATION)
    monkeypatch.setattr(stack, "may_run", lambda: False)  # operator by operator
    expected = losses(norm_first, steps)
    assert expected[-1] < expected[0]
    for actual in (plain, kernels):
        # Another dropout mask would change the first loss by about 0.1. Weights are not compared: Adam turns the
        # rounding noise of zero gradients (of the key bias) into steps of the learning rate.
        torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=2e-5, atol=2e-5)
