"""Packed input: tokens as in the padded batch, zeros at padding."""

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


@pytest.mark.parametrize("where", ["at the end", "anywhere", "nowhere", "a whole sequence"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_encoder_in_training(batch_first: bool, norm_first: bool, causal: bool, where: str) -> None:
    model = encoder(batch_first=batch_first, norm_first=norm_first)
    mask = {
        "at the end": padding(S, 2, 1, 4),
        "anywhere": hides_some(N, S),
        "nowhere": torch.zeros(N, S, dtype=torch.bool),
        "a whole sequence": padding(S, 0, 3, 1),
    }[where]
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


def test_the_dropout_of_attention_is_that_of_the_padded_batch() -> None:
    mha = fasttfm.nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True).double()
    mask, x = padding(S, 2, 1, 4), rand(N, S, E)
    packing = Packing.from_padding_mask(mask)
    torch.manual_seed(2)
    padded = mha(x, x, x, key_padding_mask=mask, need_weights=False)[0]
    torch.manual_seed(2)
    y = packing.pack(x)
    packed = packing.unpack(mha(y, y, y, need_weights=False, packing=packing)[0])
    torch.testing.assert_close(packed[~mask], padded[~mask])


class Convolution(nn.Module):
    """Convolution over the sequence of (N, S, E), as a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(E, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Changed(fasttfm.nn.TransformerEncoderLayer):
    def _ff_block(self, x: Tensor) -> Tensor:
        return Centred()(super()._ff_block(x))


def with_weights(attention: Any) -> None:
    """Override forward to compute attention weights, as scripts that plot them do."""
    attend = attention.forward
    attention.forward = lambda *args, **options: attend(*args, **{**options, "need_weights": True})


SHAPES: list[tuple[int, ...]] = []
CHANGES: dict[str, Any] = {
    "activation": lambda e: setattr(e.layers[1], "activation", lambda x: x - x.mean(1, keepdim=True)),
    "activation module": lambda e: setattr(e.layers[1], "activation", Centred()),
    "activation hooked": lambda e: (
        setattr(e.layers[0], "activation", nn.ReLU()),
        e.layers[0].activation.register_forward_hook(lambda m, args, y: y - y.mean(1, keepdim=True)),
    ),
    "linear1": lambda e: setattr(e.layers[0], "linear1", Convolution()),
    "dropout": lambda e: setattr(e.layers[0], "dropout1", Centred()),
    "norm": lambda e: setattr(e.layers[0], "norm1", nn.LayerNorm([S, E])),
    "last norm": lambda e: setattr(e, "norm", Centred()),
    "class": lambda e: setattr(e.layers[1], "__class__", Changed),
    "block": lambda e: setattr(e.layers[1], "_ff_block", Changed._ff_block.__get__(e.layers[1], Changed)),
    "weights, forward": lambda e: with_weights(e.layers[0].self_attn),
    "weights, pre-hook": lambda e: e.layers[0].self_attn.register_forward_pre_hook(
        lambda m, args, options: (args, {**options, "need_weights": True}), with_kwargs=True
    ),
    "layer hooked": lambda e: e.layers[1].register_forward_hook(lambda m, args, y: SHAPES.append(tuple(y.shape))),
    "hooked": lambda e: e.layers[1].linear2.register_forward_hook(lambda m, args, y: SHAPES.append(tuple(y.shape))),
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
    assert all(shape == (N, S, E) for shape in SHAPES)
    assert bool(SHAPES) == ("hooked" in change.split()[-1] and change != "activation hooked")


def test_an_overridden_block_does_not_go_with_packing_or_a_cache() -> None:
    layer, decoder = Changed(E, H, batch_first=True), fasttfm.nn.TransformerDecoderLayer(E, H, batch_first=True)
    decoder._ff_block = lambda x: x  # type: ignore[method-assign]
    x = torch.randn(1, 3, E)
    with pytest.raises(ValueError, match="packing does not go with an overridden _ff_block"):
        layer(x[0], packing=Packing.from_padding_mask(padding(3)))
    with pytest.raises(ValueError, match="cache does not go with an overridden _ff_block"):
        decoder(x, x, cache=fasttfm.nn.DecoderCache().layer(0))


@pytest.mark.parametrize(
    ("constructor", "option", "message"),
    [
        ({}, {"attn_mask": torch.zeros(13, 13)}, "mask other than is_causal"),
        ({}, {"key_padding_mask": torch.zeros(13).bool()}, "mask other than is_causal"),
        ({}, {"need_weights": True}, "need_weights"),
        ({}, {"cache": fasttfm.nn.AttentionCache(grows=True)}, "cache"),
        ({"add_bias_kv": True}, {}, "add_bias_kv"),
        ({"add_zero_attn": True}, {}, "add_zero_attn"),
    ],
)
def test_options_that_packing_excludes_are_refused(constructor: Any, option: dict[str, Any], message: str) -> None:
    mha = fasttfm.nn.MultiheadAttention(E, H, batch_first=True, **constructor)
    packing = Packing.from_padding_mask(padding(S, 2, 1, 4))
    x = torch.randn(13, E)
    with pytest.raises(ValueError, match=message):
        mha(x, x, x, **{"need_weights": False, "packing": packing} | option)


def test_wrong_packings_are_refused() -> None:
    layer = fasttfm.nn.TransformerDecoderLayer(E, H, batch_first=True)
    packing = Packing.from_padding_mask(padding(2, 1))
    with pytest.raises(ValueError, match="memory_packing"):
        fasttfm.nn.TransformerDecoder(layer, 1)(torch.randn(2, 2, E), torch.randn(2, 2, E), packing=packing)
    x = torch.randn(2, 2, E)
    for need_weights in (False, True):
        with pytest.raises(ValueError, match="key_packing goes with packing"):
            fasttfm.nn.MultiheadAttention(E, H)(x, x, x, need_weights=need_weights, key_packing=packing)
    with pytest.raises(TypeError, match="int64"):
        Packing.from_padding_mask(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\(6,\)"):
        Packing.from_padding_mask(torch.zeros(6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(2, 4, 8\)"):
        Packing.from_padding_mask(padding(3, 2)).pack(torch.zeros(2, 4, 8))
