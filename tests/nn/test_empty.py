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
    if name == "MultiheadAttention":
        return kind(E, H, **options)
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


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(("batch", "length", "keys"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_attention_with_masks(batch: int, length: int, keys: int, need_weights: bool) -> None:
    module = made("MultiheadAttention")
    x, y = torch.randn(batch, length, E), torch.randn(batch, keys, E)
    for mask in (None, torch.zeros(length, keys, dtype=torch.bool), torch.zeros(batch * H, length, keys)):
        output, weights = module(x, y, y, attn_mask=mask, need_weights=need_weights)
        finite_with_gradients(module, output, x.shape)
        assert (None if weights is None else weights.shape) == ((batch, length, keys) if need_weights else None)
        if not keys:
            torch.testing.assert_close(output, module.out_proj.bias.expand(x.shape))


def test_a_stack_whose_sequences_are_all_padding() -> None:
    stack = fasttfm.nn.TransformerEncoder(made("TransformerEncoderLayer"), 2).eval()
    with torch.no_grad():
        assert not stack(torch.randn(2, 3, E), src_key_padding_mask=torch.ones(2, 3, dtype=torch.bool)).any()
