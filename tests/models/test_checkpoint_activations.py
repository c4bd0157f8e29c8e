"""Activation checkpointing: the same bits with less memory."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fasttfm.models import Transformer, TransformerConfig, stack

LAYERS = 4


def model_of(**changes):
    torch.manual_seed(0)
    fields = {"vocab_size": 31, "d_model": 32, "heads": 2, "d_ff": 64, "dropout": 0.2, "max_length": 16}
    fields |= {"attention_dropout": 0.1, "relu_dropout": 0.1, "encoder_layers": LAYERS, "decoder_layers": LAYERS}
    return Transformer(TransformerConfig(**{**fields, **changes}))


def step(model, enabled, autocast=False, packed=False):
    """Loss and gradients of one batch, and the bytes saved by the forward pass besides weights."""
    torch.manual_seed(7)
    source, target = torch.randint(4, 31, (4, 8)), torch.randint(4, 31, (4, 7))
    lengths = torch.tensor([8, 5, 2, 6]), torch.tensor([6, 3, 4, 5])
    saved: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def in_dtype(self, *args, **options):
        weights, memory_weights = cast(self, *args, **options)
        addresses.update(x.untyped_storage().data_ptr() for x in tree_leaves(weights))
        return weights, memory_weights

    cast = stack.StackWeights.in_dtype
    addresses = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    model.checkpoint_activations(enabled)
    model.zero_grad()
    tokens = (int(lengths[0].sum()), int(lengths[1].sum())) if packed else None
    with (
        mock.patch.object(stack.StackWeights, "in_dtype", in_dtype),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model.loss(source, target[:, :-1], target[:, 1:], *lengths, packed_tokens=tokens)[0]
        size = sum(nbytes for address, nbytes in saved.items() if address not in addresses)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}, size


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"norm_first": True, "final_norm": True}, {"autocast": True}),
        ({"norm_first": True}, {"packed": True}),
    ],
    ids=["post-norm", "pre-norm, bf16", "packed, no final norm"],
)
def test_the_gradients_are_the_same_bits_with_less_memory(changes, options):
    model = model_of(**changes)
    *plain, size = step(model, False, **options)
    *recomputed, smaller = step(model, True, **options)
    gradients = plain[1]
    torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)
    assert any(gradient.any() for gradient in gradients.values())
    assert smaller < 0.4 * size


@pytest.mark.parametrize("name", ["linear1", "linear2"])
def test_an_adapted_layer_drops_the_same_again(name):
    """Its dropout is torch's; behind an adapted linear2 our own dropout of hidden units is too."""
    model = model_of()
    layer = model.decoder.layers[1]
    setattr(layer, name, nn.Sequential(getattr(layer, name), nn.Dropout(0.5)))
    plain, recomputed = step(model, False), step(model, True)
    torch.testing.assert_close(recomputed[:2], plain[:2], rtol=0, atol=0)
