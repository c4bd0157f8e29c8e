"""Activation checkpointing: the same bits with less memory."""

import pytest
import torch
from torch import nn

from fasttfm.models import Transformer, TransformerConfig
from tests.functional.agreement import saved_bytes

LAYERS = 4


def model_of(**changes):
    torch.manual_seed(0)
    fields = {"vocab_size": 31, "d_model": 32, "heads": 2, "d_ff": 64, "dropout": 0.2, "max_length": 16}
    fields |= {"attention_dropout": 0.1, "relu_dropout": 0.1, "encoder_layers": LAYERS, "decoder_layers": LAYERS}
    return Transformer(TransformerConfig(**{**fields, **changes}))


def step(model, enabled, autocast=False, packed=False):
    """Loss and gradients of one batch."""
    torch.manual_seed(7)
    source, target = torch.randint(4, 31, (4, 8)), torch.randint(4, 31, (4, 7))
    lengths = torch.tensor([8, 5, 2, 6]), torch.tensor([6, 3, 4, 5])
    model.checkpoint_activations(enabled)
    model.zero_grad()
    tokens = (int(lengths[0].sum()), int(lengths[1].sum())) if packed else None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model.loss(source, target[:, :-1], target[:, 1:], *lengths, packed_tokens=tokens)[0]
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"norm_first": True, "final_norm": True}, {"autocast": True}),
        ({"norm_first": True}, {"packed": True}),
    ],
    ids=["post-norm", "pre-norm, bf16", "packed, no final norm"],
)
def test_the_gradients_are_the_same_bits(changes, options):
    model = model_of(**changes)
    plain, recomputed = step(model, False, **options), step(model, True, **options)
    torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)
    assert any(gradient.any() for gradient in plain[1].values())


def test_less_memory_is_kept_for_the_backward_pass():
    model, tokens, sizes = model_of(), torch.randint(4, 31, (64, 16)), []
    for enabled in (False, True):
        model.checkpoint_activations(enabled)
        sizes.append(saved_bytes(lambda: model.loss(tokens, tokens, tokens)[0]))
    assert sizes[1] < 0.4 * sizes[0]


@pytest.mark.parametrize("name", ["linear1", "linear2"])
def test_an_adapted_layer_drops_the_same_again(name):
    """Its dropout is torch's; behind an adapted linear2 our own dropout of hidden units is too."""
    model = model_of()
    layer = model.decoder.layers[1]
    setattr(layer, name, nn.Sequential(getattr(layer, name), nn.Dropout(0.5)))
    plain, recomputed = step(model, False), step(model, True)
    torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)
