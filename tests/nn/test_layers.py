"""Encoder and decoder layers against torch.nn's: every argument, forward and backward, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasttfm.nn
from fasttfm import reference
from fasttfm.functional import draw_seed
from fasttfm.models.residual import Site

from .twins import as_floats, causal, compare, hides_some, share, twins

N, H, L, S, E, F = 3, 2, 4, 5, 8, 12
LAYERS = ("TransformerEncoderLayer", "TransformerDecoderLayer")
LAYOUTS = ("batch first", "sequence first", "unbatched")
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


def tensor(layout: str, length: int) -> Tensor:
    shape = {"batch first": (N, length, E), "sequence first": (length, N, E), "unbatched": (length, E)}
    return torch.randn(shape[layout], dtype=torch.float64)


def one_sequence(layout: str, mask: Tensor) -> Tensor:
    return mask[0] if layout == "unbatched" else mask


def masks(layout: str, name: str, queries: int, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """attn_mask and key_padding_mask by name."""
    batch = 1 if layout == "unbatched" else N
    attn = {
        "bool": hides_some(queries, keys),
        "float": torch.randn(queries, keys, dtype=torch.float64),
        "3-D": hides_some(batch * H, queries, keys),
        "causal": torch.ones(queries, keys, dtype=torch.bool).triu(1),
    }
    padding = one_sequence(layout, hides_some(batch, keys))
    wanted = name.split(" + ")
    chosen = next((attn[n] for n in wanted if n in attn), None)
    if "float padding" in wanted:
        return chosen, as_floats(padding)
    return chosen, padding if "padding" in wanted else None


MASKS = ("none", "bool", "float", "3-D", "padding", "float padding", "causal + padding", "float + float padding")


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_masks(name: str, layout: str, mask: str, norm_first: bool) -> None:
    theirs, ours = twins(name, E, H, F, 0.0, batch_first=layout == "batch first", norm_first=norm_first)
    inputs, options = [tensor(layout, L)], {}
    sides = {"src": L} if "Encoder" in name else {"tgt": L, "memory": S}
    for side, keys in sides.items():
        options[f"{side}_mask"], options[f"{side}_key_padding_mask"] = masks(layout, mask, L, keys)
    inputs += [tensor(layout, S)] if "memory" in sides else []
    compare(theirs, ours, *inputs, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_activations_and_biases(name: str, activation: str, norm_first: bool, bias: bool) -> None:
    theirs, ours = twins(
        name, E, H, F, 0.0, ACTIVATIONS[activation], 1e-3, batch_first=True, norm_first=norm_first, bias=bias
    )
    inputs = [tensor("batch first", L), tensor("batch first", S)]
    compare(theirs, ours, *inputs[: 1 if "Encoder" in name else 2])


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_true_causal_hint_changes_nothing(norm_first: bool) -> None:
    theirs, ours = twins("TransformerEncoderLayer", E, H, F, 0.0, batch_first=True, norm_first=norm_first)
    compare(theirs, ours, tensor("batch first", L), src_mask=causal(L), is_causal=True)
    theirs, ours = twins("TransformerDecoderLayer", E, H, F, 0.0, batch_first=True, norm_first=norm_first)
    options = {"tgt_mask": causal(L), "tgt_is_causal": True, "memory_mask": causal(L), "memory_is_causal": True}
    compare(theirs, ours, tensor("batch first", L), tensor("batch first", L), **options)


@pytest.mark.parametrize("mask", ["none", "bool", "padding", "3-D"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_eval_without_gradients_is_what_the_fast_path_of_torch_gives(
    activation: str, norm_first: bool, mask: str
) -> None:
    theirs, ours = twins("TransformerEncoderLayer", E, H, F, 0.3, activation, batch_first=True, norm_first=norm_first)
    attn, padding = masks("batch first", mask, L, L)
    x = tensor("batch first", L)
    with torch.no_grad():
        expected = theirs.eval()(x, attn, padding)
        got = ours.eval()(x, attn, padding)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_fully_padded_sequence_stays_finite_in_training_and_in_eval(name: str, mode: str) -> None:
    _, ours = twins(name, E, H, F, 0.0, batch_first=True)
    ours.train(mode == "train")
    padding = torch.zeros(N, L, dtype=torch.bool)
    padding[1] = True
    x = tensor("batch first", L)
    if "Encoder" in name:
        output = ours(x, src_key_padding_mask=padding)
    else:
        output = ours(x, x, tgt_key_padding_mask=padding, memory_key_padding_mask=padding)
    output.sum().backward()
    assert torch.isfinite(output).all()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters())


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
    x, *memory = (tensor("batch first", n) for n in ((L, S) if "Decoder" in name else (L,)))
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
    "parametrised": lambda layer: nn.utils.parametrizations.weight_norm(layer.linear2),
    "forward of its own": forward_of_its_own,
    "forward hook": lambda layer: layer.linear2.register_forward_hook(lambda module, inputs, output: output * 3),
    "forward pre-hook": lambda layer: layer.dropout2.register_forward_pre_hook(lambda module, x: (x[0] + 1,)),
}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_sub_module_is_called(change: str, norm_first: bool) -> None:
    theirs, ours = twins("TransformerEncoderLayer", E, H, F, 0.0, batch_first=True, norm_first=norm_first)
    for layer in (theirs, ours):
        CHANGES[change](layer)
    share(theirs, ours)
    compare(theirs, ours, tensor("batch first", L))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ["self_attn", "norm1", "linear1", "dropout", "linear2", "dropout1", "norm2"])
def test_hooks_on_sub_modules_fire_as_in_torch(name: str, inference: bool) -> None:
    calls: dict[str, list[tuple[int, ...]]] = {"theirs": [], "ours": []}
    for key, layer in zip(calls, twins("TransformerEncoderLayer", E, H, F, 0.0, batch_first=True)):

        def note(module: nn.Module, inputs: Any, output: Any, key: str = key) -> None:
            calls[key].append(tuple((output[0] if isinstance(output, tuple) else output).shape))

        getattr(layer, name).register_forward_hook(note)
        with torch.inference_mode(inference):
            layer.train(not inference)(tensor("batch first", L))
    assert calls["ours"] == calls["theirs"]
    assert len(calls["ours"]) == 1


@pytest.mark.parametrize("name", ["norm1", "linear1", "linear2", "dropout2"])
def test_backward_hooks_on_sub_modules_fire(name: str) -> None:
    layer = fasttfm.nn.TransformerEncoderLayer(E, H, F, 0.0, batch_first=True)
    fired = []
    getattr(layer, name).register_full_backward_hook(lambda *_: fired.append(name))
    layer(torch.randn(N, L, E, requires_grad=True)).sum().backward()
    assert fired == [name]


@pytest.mark.parametrize(("name", "block"), list(zip(LAYERS, ("_ff_block", "_mha_block"))))
def test_a_subclass_may_override_a_block(name: str, block: str) -> None:
    def scaled(library: Any) -> nn.Module:
        base = getattr(library, name)

        def half(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            return getattr(base, block)(self, *args, **kwargs) * 0.5

        return type("Scaled", (base,), {block: half})(E, H, F, 0.0, batch_first=True).double()

    theirs, ours = scaled(nn), scaled(fasttfm.nn)
    share(theirs, ours)
    compare(theirs, ours, *(tensor("batch first", n) for n in ((L, S) if "Decoder" in name else (L,))))
