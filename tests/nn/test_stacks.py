"""TransformerEncoder, TransformerDecoder and Transformer against torch.nn's, in float64."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fasttfm.nn

from .twins import as_floats, causal, compare, hides_some, padding, rand, share

N, H, L, S, E, F = 3, 2, 4, 5, 8, 12
LENGTHS = (5, 2, 3)


def stacks(
    name: str, *, norm: bool = False, stack: dict[str, Any] | None = None, **layer: Any
) -> tuple[nn.Module, nn.Module]:
    """torch.nn.Transformer{name} and ours, two layers each, with the same weights."""
    pair = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in (nn, fasttfm.nn):
            one = getattr(library, f"Transformer{name}Layer")(E, H, F, 0.0, **layer)
            last = library.LayerNorm(E) if norm else None
            pair.append(getattr(library, f"Transformer{name}")(one, 2, last, **(stack or {})).double())
    share(*pair)
    return pair[0], pair[1]


ENCODER_MASKS: dict[str, Any] = {
    "none": dict,
    "bool": lambda: {"mask": hides_some(S, S)},
    "float": lambda: {"mask": rand(S, S)},
    "3-D": lambda: {"mask": hides_some(N * H, S, S)},
    "causal": lambda: {"mask": causal(S)},
    "bool causal": lambda: {"mask": torch.ones(S, S, dtype=torch.bool).triu(1)},
    "causal, said": lambda: {"mask": causal(S), "is_causal": True},
    "padding anywhere": lambda: {"src_key_padding_mask": hides_some(N, S)},
    "float padding": lambda: {"src_key_padding_mask": as_floats(hides_some(N, S))},
    "causal and padding": lambda: {
        "mask": torch.ones(S, S, dtype=torch.bool).triu(1),
        "src_key_padding_mask": hides_some(N, S),
    },
}


@pytest.mark.parametrize("kind", ["post-norm", "pre-norm, final norm, sequence first"])
@pytest.mark.parametrize("mask", ENCODER_MASKS)
def test_encoder_masks(mask: str, kind: str) -> None:
    first = kind == "post-norm"
    theirs, ours = stacks("Encoder", norm=not first, batch_first=first, norm_first=not first)
    compare(theirs, ours, rand(N, S, E) if first else rand(S, N, E), **ENCODER_MASKS[mask]())


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("enable_nested_tensor", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_encoder_with_padding_at_the_end(norm: bool, enable_nested_tensor: bool, mode: str, batch_first: bool) -> None:
    theirs, ours = stacks(
        "Encoder", norm=norm, batch_first=batch_first, stack={"enable_nested_tensor": enable_nested_tensor}
    )
    theirs.train(mode == "train")
    ours.train(mode == "train")
    mask = padding(*LENGTHS)
    x = rand(N, S, E) if batch_first else rand(S, N, E)
    keep = ~mask if batch_first else ~mask.t()
    with torch.set_grad_enabled(mode == "train"):
        if mode == "train":
            compare(theirs, ours, x, keep=keep, src_key_padding_mask=mask)
        expected, got = (m(x, src_key_padding_mask=mask) for m in (theirs, ours))
    torch.testing.assert_close(got[keep], expected[keep])
    assert got.shape == x.shape  # torch.nn may cut trailing padding off


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_unbatched(norm_first: bool) -> None:
    theirs, ours = stacks("Encoder", batch_first=True, norm_first=norm_first)
    compare(theirs, ours, rand(S, E), src_key_padding_mask=padding(3, 5)[0])


def test_mask_check_false_packs_padding_that_lies_anywhere() -> None:
    theirs, ours = stacks("Encoder", batch_first=True, stack={"mask_check": False})
    mask, x = hides_some(N, S), rand(N, S, E)
    expected = theirs.train()(x, src_key_padding_mask=mask)
    with torch.no_grad():
        got = ours.eval()(x, src_key_padding_mask=mask)
    torch.testing.assert_close(got[~mask], expected[~mask])
    assert not got[mask].any()


def test_constructing_does_not_warn_of_nested_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fasttfm.nn.TransformerEncoder(fasttfm.nn.TransformerEncoderLayer(E, H, F, norm_first=True), 1)


DECODER_MASKS: dict[str, Any] = {
    "none": dict,
    "causal": lambda: {"tgt_mask": causal(L)},
    "causal, said": lambda: {"tgt_mask": causal(L), "tgt_is_causal": True},
    "bool causal and memory padding": lambda: {
        "tgt_mask": torch.ones(L, L, dtype=torch.bool).triu(1),
        "memory_key_padding_mask": hides_some(N, S),
    },
    "all of bool": lambda: {
        "tgt_mask": hides_some(L, L),
        "memory_mask": hides_some(L, S),
        "tgt_key_padding_mask": hides_some(N, L),
        "memory_key_padding_mask": hides_some(N, S),
    },
    "all of float": lambda: {
        "tgt_mask": rand(L, L),
        "memory_mask": rand(N * H, L, S),
        "tgt_key_padding_mask": as_floats(hides_some(N, L)),
        "memory_key_padding_mask": as_floats(hides_some(N, S)),
    },
    "triangular memory mask": lambda: {
        "tgt_mask": causal(L),
        "memory_mask": as_floats(~torch.ones(L, S).bool().tril()),
    },
}


@pytest.mark.parametrize("kind", ["post-norm", "pre-norm, final norm, sequence first"])
@pytest.mark.parametrize("mask", DECODER_MASKS)
def test_decoder_masks(mask: str, kind: str) -> None:
    first = kind == "post-norm"
    theirs, ours = stacks("Decoder", norm=not first, batch_first=first, norm_first=not first)
    inputs = (rand(N, L, E), rand(N, S, E)) if first else (rand(L, N, E), rand(S, N, E))
    compare(theirs, ours, *inputs, **DECODER_MASKS[mask]())


def test_decoder_unbatched() -> None:
    theirs, ours = stacks("Decoder")
    compare(theirs, ours, rand(L, E), rand(S, E), tgt_mask=causal(L))


@pytest.mark.parametrize("name", ["Encoder", "Decoder"])
def test_a_learned_mask_that_begins_causal_takes_its_gradient(name: str) -> None:
    """It must not be replaced by the causal hint that equals it."""
    theirs, ours = stacks(name, batch_first=True)
    prefix, inputs = ("src", [rand(N, S, E)]) if name == "Encoder" else ("tgt", [rand(N, S, E), rand(N, L, E)])
    gradients, hidden = [], as_floats(padding(*LENGTHS))
    for module in (theirs, ours):
        mask = causal(S).requires_grad_()
        masks = {"mask" if name == "Encoder" else "tgt_mask": mask, f"{prefix}_key_padding_mask": hidden}
        module(*inputs, **masks).square().sum().backward()
        gradients.append(mask.grad)
    assert gradients[0].any()
    torch.testing.assert_close(gradients[1], gradients[0])


def test_is_causal_needs_no_mask() -> None:
    x, memory = rand(N, L, E), rand(N, S, E)
    theirs, ours = stacks("Encoder", batch_first=True)
    torch.testing.assert_close(ours(x, is_causal=True), theirs(x, mask=causal(L)))
    theirs, ours = stacks("Decoder", batch_first=True)
    torch.testing.assert_close(ours(x, memory, tgt_is_causal=True), theirs(x, memory, tgt_mask=causal(L)))


def transformers(**options: Any) -> tuple[nn.Module, nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, ours = (library.Transformer(E, H, 2, 1, F, 0.0, **options).double() for library in (nn, fasttfm.nn))
    share(theirs, ours)
    return theirs, ours


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", torch.sigmoid])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer(batch_first: bool, norm_first: bool, activation: Any, bias: bool) -> None:
    theirs, ours = transformers(
        batch_first=batch_first, norm_first=norm_first, activation=activation, bias=bias, layer_norm_eps=1e-4
    )
    src, tgt = rand(N, S, E), rand(N, L, E)
    inputs = (src, tgt) if batch_first else (src.transpose(0, 1), tgt.transpose(0, 1))
    hidden = as_floats(padding(*LENGTHS))
    compare(theirs, ours, *inputs, tgt_mask=causal(L), src_key_padding_mask=hidden, memory_key_padding_mask=hidden)


def test_transformer_takes_every_mask_and_causal_hint() -> None:
    theirs, ours = transformers(batch_first=True)
    sizes = {"src": (S, S), "tgt": (L, L), "memory": (L, S)}
    masks = {f"{name}_mask": hides_some(*size) for name, size in sizes.items()}
    masks |= {f"{name}_key_padding_mask": hides_some(N, keys) for name, (_, keys) in sizes.items()}
    compare(theirs, ours, rand(N, S, E), rand(N, L, E), **masks)
    hints = {f"{name}_mask": causal(L) for name in sizes} | {f"{name}_is_causal": True for name in sizes}
    compare(theirs, ours, rand(N, L, E), rand(N, L, E), **hints)


def test_transformer_unbatched() -> None:
    theirs, ours = transformers()
    compare(theirs, ours, rand(S, E), rand(L, E), tgt_mask=causal(L))


def test_transformer_with_custom_encoder_and_decoder() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
            return x

    theirs, ours = transformers(custom_encoder=Same(), custom_decoder=Same())
    compare(theirs, ours, rand(S, N, E), rand(L, N, E))


def test_a_stack_of_torch_layers_and_a_torch_stack_of_our_layers_work() -> None:
    theirs, ours = stacks("Encoder", batch_first=True)
    mixed = fasttfm.nn.TransformerEncoder(theirs.layers[0], 2)
    turned = nn.TransformerEncoder(ours.layers[0], 2)
    for stack in (mixed, turned):
        stack.load_state_dict(theirs.state_dict())
    x, mask = rand(N, S, E), padding(*LENGTHS)
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            expected = theirs.train(mode)(x, src_key_padding_mask=mask)[~mask]
            for stack in (mixed, turned):
                got = stack.train(mode)(x, src_key_padding_mask=mask)[~mask]
                torch.testing.assert_close(got, expected)


def test_nested_input_goes_through_torch() -> None:
    theirs, ours = stacks("Encoder", batch_first=True)
    rows = [rand(length, E) for length in LENGTHS]
    with torch.no_grad():
        expected, got = (m.eval()(torch.nested.nested_tensor(rows)) for m in (theirs, ours))
    assert got.is_nested
    for a, b in zip(got.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(a, b)


def test_wrapped_tensors_go_through_torch() -> None:
    theirs, ours = stacks("Encoder", batch_first=True)
    x, y = rand(N, S, E), rand(N, S, E)
    expected, got = (m.layers[0](TwoTensor(x, y)) for m in (theirs, ours))
    assert isinstance(got, TwoTensor)
    torch.testing.assert_close(got.b, expected.b)
