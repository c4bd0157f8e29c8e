"""Encoder and decoder layers against torch.nn's: every argument, forward, backward and at inference, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasttfm.nn
from fasttfm import reference
from fasttfm.functional import draw_seed
from fasttfm.models.residual import Site

from .twins import LAYOUTS, E, F, H, L, N, S, compare, masks, share, tensor, twins

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


# -------------------------------------------------------------------------------------------- dropout places


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
@pytest.mark.parametrize("position", ["dropout", "dropout1", "dropout2", "self_attn"])
def test_each_dropout_can_be_changed_or_switched_off_by_itself(position: str, norm_first: bool) -> None:
    layer = fasttfm.nn.TransformerEncoderLayer(E, H, F, 0.0, batch_first=True, norm_first=norm_first)
    module = getattr(layer, position)
    x = torch.randn(N, L, E)
    clean = layer(x)
    if position == "self_attn":
        module.dropout = 0.5
    else:
        module.p = 0.5
    assert not torch.equal(layer(x), clean)
    module.eval()
    torch.testing.assert_close(layer(x), clean)


# --------------------------------------------------------------------------- sub-modules that are not what they were


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def forward_of_its_own(layer: nn.Module) -> None:
    before = layer.norm1.forward
    layer.norm1.forward = lambda x: before(x) + 1


CHANGES: dict[str, Any] = {
    "double linear": lambda layer: setattr(layer.linear1, "__class__", Doubled),
    "root mean square": lambda layer: setattr(layer, "norm2", nn.RMSNorm(E).double()),
    "identity dropout": lambda layer: setattr(layer, "dropout1", nn.Identity()),
    "forward of its own": forward_of_its_own,
    "forward pre-hook": lambda layer: layer.dropout2.register_forward_pre_hook(lambda module, x: (x[0] + 1,)),
}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_sub_module_is_called(change: str, norm_first: bool) -> None:
    theirs, ours = twins("TransformerEncoderLayer", E, H, F, 0.0, batch_first=True, norm_first=norm_first)
    for layer in (theirs, ours):
        CHANGES[change](layer)
    share(theirs, ours)
    compare(theirs, ours, tensor("batch first", L), inference=False)  # torch.nn's fast path reads the weights


@pytest.mark.parametrize("name", ["self_attn", "norm1", "linear1", "dropout", "linear2", "dropout1", "norm2"])
def test_hooks_on_a_sub_module_fire_once_as_in_torch(name: str) -> None:
    """In training, at inference and in the backward pass."""
    calls: dict[str, list[Any]] = {"theirs": [], "ours": []}
    for key, layer in zip(calls, twins("TransformerEncoderLayer", E, H, F, 0.0, batch_first=True)):

        def note(module: nn.Module, inputs: Any, output: Any, key: str = key) -> None:
            calls[key].append(tuple((output[0] if isinstance(output, tuple) else output).shape))

        module = getattr(layer, name)
        module.register_forward_hook(note)
        module.register_full_backward_hook(lambda *_, key=key: calls[key].append("backward"))
        layer(tensor("batch first", L).requires_grad_()).sum().backward()
        with torch.inference_mode():
            layer.eval()(tensor("batch first", L))
    assert calls["ours"] == calls["theirs"]
    assert len(calls["ours"]) == 3


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
