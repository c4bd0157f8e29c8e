"""Packed input: tokens as in the padded batch, zeros at padding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasttfm.nn
from fasttfm.nn import Packing

from .twins import hides_some, padding, rand

N, H, S, L, E = 4, 2, 6, 5, 8


def encoder(**options: Any) -> fasttfm.nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = fasttfm.nn.TransformerEncoderLayer(E, H, 12, 0.0, **options)
    return fasttfm.nn.TransformerEncoder(layer, 2, fasttfm.nn.LayerNorm(E)).double()


def gradients(model: nn.Module, output: Tensor, *inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    wanted = [*inputs, *model.parameters()]
    return torch.autograd.grad((output * torch.randn(output.shape, dtype=output.dtype)).sum(), wanted)


def agree(model: nn.Module, packed: Tensor, padded: Tensor, keep: Tensor, *inputs: Tensor) -> None:
    """Assert that packed equals padded in values and gradients where keep is True, and is zero elsewhere."""
    torch.testing.assert_close(packed[keep], padded[keep])
    assert not packed[~keep].any()
    torch.testing.assert_close(gradients(model, packed[keep], *inputs), gradients(model, padded[keep], *inputs))


PLACES: dict[str, Callable[[], Tensor]] = {
    "at the end": lambda: padding(S, 2, 1, 4),
    "anywhere": lambda: hides_some(N, S),
    "nowhere": lambda: torch.zeros(N, S, dtype=torch.bool),
    "a whole sequence": lambda: padding(S, 0, 3, 1),
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_encoder_in_training(batch_first: bool, norm_first: bool, causal: bool, where: str) -> None:
    model, mask = encoder(batch_first=batch_first, norm_first=norm_first), PLACES[where]()
    x = (rand(N, S, E) if batch_first else rand(S, N, E)).requires_grad_()
    packed = model(x, is_causal=causal, packing=Packing.from_padding_mask(mask))
    padded = model(x, is_causal=causal, src_key_padding_mask=mask)
    agree(model, packed, padded, ~mask if batch_first else ~mask.t(), x)


@pytest.mark.parametrize("causal", [False, True])
def test_decoder_in_training(causal: bool) -> None:
    layer = fasttfm.nn.TransformerDecoderLayer(E, H, 12, 0.0, batch_first=True)
    model = fasttfm.nn.TransformerDecoder(layer, 2).double()
    mask, memory_mask = padding(L, 1, 3, 2), padding(2, S, 4, 1)
    tgt, memory = rand(N, L, E).requires_grad_(), rand(N, S, E).requires_grad_()
    packing, memory_packing = map(Packing.from_padding_mask, (mask, memory_mask))
    packed = model(tgt, memory, tgt_is_causal=causal, packing=packing, memory_packing=memory_packing)
    padded = model(tgt, memory, tgt_is_causal=causal, tgt_key_padding_mask=mask, memory_key_padding_mask=memory_mask)
    agree(model, packed, padded, ~mask, tgt, memory)


def test_a_sequence_shorter_than_the_batch_may_be_packed_already() -> None:
    model = encoder(batch_first=True)
    mask, x = padding(S, 2, 1, 4), rand(N, S, E)
    packing = Packing.from_padding_mask(mask)
    packed = model(packing.pack(x), packing=packing)
    assert packed.shape == (13, E)
    torch.testing.assert_close(packing.unpack(packed), model(x, packing=packing))


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Changed(fasttfm.nn.TransformerEncoderLayer):
    def _ff_block(self, x: Tensor) -> Tensor:
        return Centred()(super()._ff_block(x))


SHAPES: list[tuple[int, ...]] = []
CHANGES: dict[str, Any] = {
    "activation": lambda e: setattr(e.layers[1], "activation", Centred()),
    "activation hooked": lambda e: (
        setattr(e.layers[0], "activation", nn.ReLU()),
        e.layers[0].activation.register_forward_hook(lambda m, args, y: y - y.mean(1, keepdim=True)),
    ),
    "norm": lambda e: setattr(e.layers[0], "norm1", nn.LayerNorm([S, E])),
    "last norm": lambda e: setattr(e, "norm", Centred()),
    "class": lambda e: setattr(e.layers[1], "__class__", Changed),
    "block": lambda e: setattr(e.layers[1], "_ff_block", Changed._ff_block.__get__(e.layers[1], Changed)),
    "layer hooked": lambda e: e.layers[1].register_forward_hook(lambda m, args, y: SHAPES.append(tuple(y.shape))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_padding_is_computed_if_a_part_of_the_encoder_was_changed(change: str) -> None:
    model = encoder(batch_first=True)
    CHANGES[change](model)
    model.double().eval()
    mask, x = padding(S, 2, 1, 4), rand(N, S, E)
    SHAPES.clear()
    with torch.no_grad():
        got = model(x, src_key_padding_mask=mask)
        model.enable_nested_tensor = False
        torch.testing.assert_close(got, model(x, src_key_padding_mask=mask))
        assert got[mask].any()
    assert ([(N, S, E)] * 2 if change == "layer hooked" else []) == SHAPES


def unfit(attention: Any = None, **options: Any) -> None:
    """Attention over 13 packed rows with an option that does not go with packing."""
    mha = fasttfm.nn.MultiheadAttention(E, H, batch_first=True, **(attention or {}))
    packing, x = Packing.from_padding_mask(padding(S, 2, 1, 4)), torch.randn(13, E)
    mha(x, x, x, **{"need_weights": False, "packing": packing} | options)


def overridden(kind: str, **options: Any) -> None:
    """A layer whose _ff_block is overridden, called with an option."""
    layer = getattr(fasttfm.nn, f"Transformer{kind}Layer")(E, H, batch_first=True)
    layer._ff_block = lambda x: x
    layer(*[torch.randn(3, E)] * (2 if kind == "Decoder" else 1), **options)


X, PACKING = torch.randn(2, 2, E), Packing.from_padding_mask(padding(2, 1))
REFUSED: dict[str, Callable[[], object]] = {
    "mask other than is_causal": lambda: unfit(attn_mask=torch.zeros(13, 13)),
    "mask other than is_causal.*": lambda: unfit(key_padding_mask=torch.zeros(13).bool()),
    "need_weights": lambda: unfit(need_weights=True),
    "cache": lambda: unfit(cache=fasttfm.nn.AttentionCache(grows=True)),
    "add_bias_kv": lambda: unfit({"add_bias_kv": True}),
    "add_zero_attn": lambda: unfit({"add_zero_attn": True}),
    "packing does not go with an overridden _ff_block": lambda: overridden("Encoder", packing=PACKING),
    "cache does not go with an overridden _ff_block": lambda: overridden(
        "Decoder", cache=fasttfm.nn.DecoderCache().layer(0)
    ),
    "memory_packing": lambda: fasttfm.nn.TransformerDecoder(
        fasttfm.nn.TransformerDecoderLayer(E, H, batch_first=True), 1
    )(X, X, packing=PACKING),
    "key_packing goes with packing": lambda: fasttfm.nn.MultiheadAttention(E, H)(X, X, X, key_packing=PACKING),
    "int64": lambda: Packing.from_padding_mask(torch.zeros(2, 3, dtype=torch.int64)),
    r"\(6,\)": lambda: Packing.from_padding_mask(torch.zeros(6, dtype=torch.bool)),
    r"\(2, 4, 8\)": lambda: Packing.from_padding_mask(padding(3, 2)).pack(torch.zeros(2, 4, 8)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_packing_excludes_and_wrong_packings_are_refused(words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        REFUSED[words]()
