"""The modules on the Triton kernels, through the interpreter: as on plain PyTorch, forward and backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasttfm.nn
from fasttfm.functional import backend
from fasttfm.nn import DecoderCache, Packing

from .twins import as_floats, causal, hides_some, padding, share

N, H, L, S, E, F = 2, 2, 5, 7, 32, 48


def made(kind: type[nn.Module], *args: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    theirs, ours = kind(*args, **options), kind(*args, **options)
    share(theirs, ours)
    return ours


def both_routes(module: nn.Module, *inputs: Tensor, **options: Any) -> None:
    """Outputs, input gradients and parameter gradients agree between the routes; dropout draws the same masks."""
    results = []
    for route in ("torch", "triton"):
        module.zero_grad()
        leaf_tensors = [x.detach().clone().requires_grad_() for x in inputs]
        torch.manual_seed(3)
        with backend(route):
            output = module(*leaf_tensors, **options)
            output = output[0] if isinstance(output, tuple) else output
            torch.manual_seed(1)
            (output * torch.randn(output.shape)).sum().backward()
        results.append([output, *(x.grad for x in leaf_tensors), *(p.grad for p in module.parameters())])
    for expected, got in zip(*results):
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


MASKS: dict[str, Any] = {
    "none": dict,
    "causal": lambda: {"attn_mask": causal(L, torch.float32), "is_causal": True},
    "bool 2-D": lambda: {"attn_mask": hides_some(L, L)},
    "float 3-D": lambda: {"attn_mask": torch.randn(N * H, L, L)},
    "padding with an empty sequence": lambda: {"key_padding_mask": padding(L, 0)},
    "causal and padding": lambda: {"is_causal": True, "key_padding_mask": padding(L, 2)},
    "float padding": lambda: {"key_padding_mask": as_floats(hides_some(N, L), torch.float32)},
}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_attention(mask: str, need_weights: bool) -> None:
    module = made(fasttfm.nn.MultiheadAttention, E, H, batch_first=True)
    x = torch.randn(N, L, E)

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, x: Tensor, **options: Any) -> Tensor:
            return self.attention(x, x, x, need_weights=need_weights, **options)[0]

    both_routes(SelfAttention(), x, **MASKS[mask]())


@pytest.mark.parametrize("options", [{"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 12, "vdim": 20}])
def test_attention_options(options: dict[str, Any]) -> None:
    module = made(fasttfm.nn.MultiheadAttention, E, H, batch_first=True, **options)
    key = torch.randn(N, S, options.get("kdim", E))
    value = torch.randn(N, S, options.get("vdim", E))
    both_routes(module, torch.randn(N, L, E), key, value, need_weights=False)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer(norm_first: bool, dropout: float) -> None:
    layer = made(fasttfm.nn.TransformerEncoderLayer, E, H, F, dropout, batch_first=True, norm_first=norm_first)
    both_routes(layer, torch.randn(N, L, E), src_key_padding_mask=padding(L, 2))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder_layer(norm_first: bool, dropout: float) -> None:
    layer = made(fasttfm.nn.TransformerDecoderLayer, E, H, F, dropout, batch_first=True, norm_first=norm_first)
    options = {"tgt_is_causal": True, "memory_key_padding_mask": padding(S, 3)}
    both_routes(layer, torch.randn(N, L, E), torch.randn(N, S, E), **options)


@pytest.mark.parametrize("shape", [(3, 32), (2, 5, 32)])
def test_layer_norm_and_feed_forward(shape: tuple[int, ...]) -> None:
    both_routes(made(fasttfm.nn.LayerNorm, 32), torch.randn(shape))
    both_routes(made(fasttfm.nn.FeedForward, 32, 48, 0.2), torch.randn(shape))


def test_packed_encoder() -> None:
    layer = fasttfm.nn.TransformerEncoderLayer(E, H, F, 0.2, batch_first=True)
    stack = fasttfm.nn.TransformerEncoder(layer, 2)
    both_routes(stack, torch.randn(N, L, E), packing=Packing.from_padding_mask(padding(L, 2)))


def test_transformer() -> None:
    model = made(fasttfm.nn.Transformer, E, H, 1, 1, F, 0.1, batch_first=True)
    both_routes(model, torch.randn(N, S, E), torch.randn(N, L, E), tgt_mask=causal(L, torch.float32))


@torch.no_grad()
def test_cache() -> None:
    layer = fasttfm.nn.TransformerDecoderLayer(E, H, F, batch_first=True)
    model = fasttfm.nn.TransformerDecoder(layer, 1).eval()
    tgt, memory, cache = torch.randn(N, 4, E), torch.randn(N, S, E), DecoderCache()
    full = model(tgt, memory, tgt_is_causal=True)
    with backend("triton"):
        pieces = [model(x, memory, cache=cache) for x in tgt.split([1, 2, 1], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=1e-4, atol=1e-4)
