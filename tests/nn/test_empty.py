"""Empty batches, sequences and memories give empty outputs, where torch.nn partly raises."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fasttfm.nn
from fasttfm.functional import backend

from .twins import E, F, H


def made(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    kind, options = getattr(fasttfm.nn, name), {"batch_first": True} | options
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1} if name == "Transformer" else {}
    return kind(E, H, dim_feedforward=F, dropout=0.0, **layers, **options)


def finite_with_gradients(module: torch.nn.Module, output: Tensor, shape: tuple[int, ...]) -> None:
    assert output.shape == shape
    output.sum().backward()
    assert torch.isfinite(output).all()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in module.parameters())


@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("batch", "length", "memory"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_layers(batch: int, length: int, memory: int, norm_first: bool, route: str) -> None:
    """Layers and their stacks, padding masks included, in training and at inference."""
    x, y = torch.randn(batch, length, E), torch.randn(batch, memory, E)
    padding = torch.zeros(batch, memory, dtype=torch.bool)
    encoder, decoder = (made(f"Transformer{kind}Layer", norm_first=norm_first) for kind in ("Encoder", "Decoder"))
    stacks = fasttfm.nn.TransformerEncoder(encoder, 2), fasttfm.nn.TransformerDecoder(decoder, 2)
    both = made("Transformer", norm_first=norm_first)
    with backend(route):
        for encode, decode in ((encoder, decoder), stacks):
            finite_with_gradients(encode, encode(x), x.shape)
            finite_with_gradients(decode, decode(x, y, memory_key_padding_mask=padding), x.shape)
            with torch.no_grad():
                assert encode.eval()(x, src_key_padding_mask=torch.zeros(x.shape[:2]).bool()).shape == x.shape
                assert decode.eval()(x, y, memory_key_padding_mask=padding).shape == x.shape
        finite_with_gradients(both, both(y, x), x.shape)
