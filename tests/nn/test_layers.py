"""Encoder and decoder layers against torch.nn's: every argument, forward, backward and at inference, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasttfm.nn
from fasttfm import reference
from fasttfm.functional import draw_seed
from fasttfm.models.residual import Site

from .twins import LAYOUTS, E, F, H, L, S, compare, masks, share, tensor, twins

LAYERS = ("TransformerEncoderLayer", "TransformerDecoderLayer")
ACTIVATIONS: dict[str, Any] = {
    "relu": "relu",
    "gelu": "gelu",
    "F.relu": nn.functional.relu,
    "torch.relu": torch.relu,
    "nn.ReLU": nn.ReLU(),
    "nn.GELU": nn.GELU(),
    "F.silu": nn.functional.silu,
    "callable": lambda x: x.tanh() * 2,
}
MASKS = (
    "none", "bool", "float", "bool 3-D", "padding", "float padding", "causal + padding", "float + float padding"
)  # fmt: skip


def inputs_of(name: str, layout: str = "batch first") -> list[Tensor]:
    """The target, and the memory of a decoder."""
    return [tensor(layout, length) for length in ((L, S) if "Decoder" in name else (L,))]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_masks(name: str, layout: str, mask: str, norm_first: bool) -> None:
    theirs, ours = twins(name, E, H, F, 0.0, batch_first=layout == "batch first", norm_first=norm_first)
    options: dict[str, Any] = {}
    for side, keys in ({"src": L} if "Encoder" in name else {"tgt": L, "memory": S}).items():
        options[f"{side}_mask"], options[f"{side}_key_padding_mask"] = masks(layout, mask, L, keys)
    compare(theirs, ours, *inputs_of(name, layout), **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_activations_and_biases(name: str, activation: str, norm_first: bool, bias: bool) -> None:
    options = {"batch_first": True, "norm_first": norm_first, "bias": bias}
    compare(*twins(name, E, H, F, 0.0, ACTIVATIONS[activation], 1e-3, **options), *inputs_of(name))


def dropped_attention(mha: nn.Module, x: Tensor, memory: Tensor, p: float, seed: Tensor, site: int) -> Tensor:
    """Multi-head attention from the reference."""
    q, k, v = (
        nn.functional.linear(y, w, b).unflatten(-1, (H, -1)).transpose(1, 2)
        for y, w, b in zip((x, memory, memory), mha.in_proj_weight.chunk(3), mha.in_proj_bias.chunk(3))
    )
    output, _ = reference.attention(q, k, v, dropout_p=p, seed=seed, site=site)
    return mha.out_proj(output.transpose(1, 2).flatten(2))


def sub_layer_norm(x: Tensor, residual: Tensor, norm: nn.LayerNorm, p: float, seed: Tensor, site: int) -> Tensor:
    y, _ = reference.residual_layer_norm(x, residual, norm.weight, norm.bias, dropout_p=p, seed=seed, site=site)
    return y


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_drops_in_its_four_places_and_a_decoders_in_six(name: str) -> None:
    p = 0.4
    layer = getattr(fasttfm.nn, name)(E, H, F, p, batch_first=True).double()
    x, *memory = inputs_of(name)
    torch.manual_seed(5)
    got = layer(x, *memory)
    torch.manual_seed(5)
    seed = draw_seed()
    attended = dropped_attention(layer.self_attn, x, x, p, seed, Site.SELF_ATTENTION_WEIGHTS)
    y = sub_layer_norm(attended, x, layer.norm1, p, seed, Site.SELF_ATTENTION)
    if memory:
        crossed = dropped_attention(layer.multihead_attn, y, *memory, p, seed, Site.CROSS_ATTENTION_WEIGHTS)
        y = sub_layer_norm(crossed, y, layer.norm2, p, seed, Site.CROSS_ATTENTION)
    one, two = layer.linear1, layer.linear2
    z = reference.feed_forward(y, one.weight, one.bias, two.weight, two.bias, dropout_p=p, seed=seed, site=Site.HIDDEN)
    last = layer.norm3 if memory else layer.norm2
    torch.testing.assert_close(got, sub_layer_norm(z, y, last, p, seed, Site.FEED_FORWARD))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", ["linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "self_attn.out_proj"])
def test_a_changed_sub_module_is_called(name: str, norm_first: bool) -> None:
    """Its class is derived. torch.nn reads the output projection but never calls it."""
    pair = twins("TransformerEncoderLayer", E, H, F, 0.0, batch_first=True, norm_first=norm_first)
    for part in (layer.get_submodule(name) for layer in pair):
        kind = type(part)
        part.__class__ = type("Doubled", (kind,), {"forward": lambda self, x, kind=kind: 2 * kind.forward(self, x)})
    compare(*pair, tensor("batch first", L), inference=False)  # torch.nn's fast path reads the weights


@pytest.mark.parametrize(("name", "block"), list(zip(LAYERS, ("_ff_block", "_mha_block"))))
def test_a_subclass_may_override_a_block(name: str, block: str) -> None:
    def scaled(library: Any) -> nn.Module:
        base = getattr(library, name)

        def half(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            return getattr(base, block)(self, *args, **kwargs) * 0.5

        return type("Scaled", (base,), {block: half})(E, H, F, 0.0, batch_first=True).double()

    theirs, ours = scaled(nn), scaled(fasttfm.nn)
    share(theirs, ours)
    compare(theirs, ours, *inputs_of(name), inference=False)
