"""TransformerEncoder, TransformerDecoder and Transformer against torch.nn's, in float64."""

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasttfm.nn

from .twins import E, F, H, L, N, S, as_floats, causal, compare, hides_some, masks, padding, rand, share, tensor

LENGTHS = (5, 2, 3)
LIBRARIES = (nn, fasttfm.nn)


def stacks(
    name: str, *, norm: bool = False, stack: dict[str, Any] | None = None, **layer: Any
) -> tuple[nn.Module, nn.Module]:
    """torch.nn.Transformer{name} and ours, two layers each, with the same weights."""
    pair = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in LIBRARIES:
            one = getattr(library, f"Transformer{name}Layer")(E, H, F, 0.0, **{"batch_first": True} | layer)
            last = library.LayerNorm(E) if norm else None
            pair.append(getattr(library, f"Transformer{name}")(one, 2, last, **(stack or {})).double())
    share(*pair)
    return pair[0], pair[1]


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "post-norm": ("batch first", {}),
    "pre-norm, final norm, sequence first": (
        "sequence first",
        {"norm": True, "batch_first": False, "norm_first": True},
    ),
    "unbatched": ("unbatched", {}),
}
ENCODER_MASKS = ("none", "bool", "float", "bool 3-D", "causal", "padding", "float padding", "causal + padding")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", ENCODER_MASKS)
def test_encoder_masks(mask: str, kind: str) -> None:
    layout, options = KINDS[kind]
    attn, hidden = masks(layout, mask, S, S)
    compare(*stacks("Encoder", **options), tensor(layout, S), mask=attn, src_key_padding_mask=hidden)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("enable_nested_tensor", [True, False])
def test_encoder_with_padding_at_the_end(enable_nested_tensor: bool, batch_first: bool) -> None:
    """With a last norm too, where the batch comes first."""
    stack = {"enable_nested_tensor": enable_nested_tensor}
    pair, mask = stacks("Encoder", norm=batch_first, batch_first=batch_first, stack=stack), padding(*LENGTHS)
    x = rand(N, S, E) if batch_first else rand(S, N, E)
    compare(*pair, x, keep=~mask if batch_first else ~mask.t(), src_key_padding_mask=mask)


@pytest.mark.parametrize(
    ("options", "at_the_end", "left_out"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"mask_check": False}, False, True),
        ({"enable_nested_tensor": False}, True, False),
    ],
)
@torch.no_grad()
def test_padding_is_left_out_where_torch_would_nest(options: Any, at_the_end: bool, left_out: bool) -> None:
    theirs, ours = stacks("Encoder", stack=options)
    mask = torch.tensor([[False, not at_the_end, at_the_end], [False, False, False]])
    x = rand(2, 3, E)
    output, expected = ours.eval()(x, src_key_padding_mask=mask), theirs.train()(x, src_key_padding_mask=mask)
    torch.testing.assert_close(output[~mask], expected[~mask])
    assert bool(output[mask].any()) != left_out


@pytest.mark.parametrize("mask", ["none", "causal", "said", "causal + padding", "bool", "float", "triangular memory"])
@pytest.mark.parametrize("kind", KINDS)
def test_decoder_masks(mask: str, kind: str) -> None:
    layout, options = KINDS[kind]
    given: dict[str, Any] = {"tgt_mask": causal(L), "tgt_is_causal": True} if mask == "said" else {}
    if mask == "triangular memory":
        given = {"tgt_mask": causal(L), "memory_mask": as_floats(~torch.ones(L, S).bool().tril())}
    elif not given:
        both = {"bool": "bool + padding", "float": "float + float padding"}.get(mask, mask)
        given["tgt_mask"], given["tgt_key_padding_mask"] = masks(layout, both, L, L)
        memory = both.replace("causal", "none").replace("float +", "float 3-D +")
        given["memory_mask"], given["memory_key_padding_mask"] = masks(layout, memory, L, S)
    compare(*stacks("Decoder", **options), tensor(layout, L), tensor(layout, S), **given)


@pytest.mark.parametrize("name", ["Encoder", "Decoder"])
def test_a_learned_mask_that_begins_causal_takes_its_gradient(name: str) -> None:
    """It must not be replaced by the causal hint that equals it."""
    prefix, inputs = ("src", [rand(N, S, E)]) if name == "Encoder" else ("tgt", [rand(N, S, E), rand(N, L, E)])
    gradients, hidden = [], as_floats(padding(*LENGTHS))
    for module in stacks(name):
        mask = causal(S).requires_grad_()
        given = {"mask" if name == "Encoder" else "tgt_mask": mask, f"{prefix}_key_padding_mask": hidden}
        module(*inputs, **given).square().sum().backward()
        gradients.append(mask.grad)
    assert gradients[0].any()
    torch.testing.assert_close(gradients[1], gradients[0])


def test_is_causal_needs_no_mask() -> None:
    x, memory = rand(N, L, E), rand(N, S, E)
    theirs, ours = stacks("Encoder")
    torch.testing.assert_close(ours(x, is_causal=True), theirs(x, mask=causal(L)))
    theirs, ours = stacks("Decoder")
    torch.testing.assert_close(ours(x, memory, tgt_is_causal=True), theirs(x, memory, tgt_mask=causal(L)))


def test_a_causal_mask_sets_the_hint_of_the_layers() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor, *positional: Any, **named: Any) -> Tensor:
            given.append((positional, named))
            return x

    x, square = rand(1, 4, E), torch.ones(4, 4, dtype=torch.bool).triu(1)
    for mask, is_causal in ((square, True), (as_floats(square), True), (square.t(), False)):
        for encoder in stacks("Encoder", stack={"enable_nested_tensor": False}):
            given: list[Any] = []
            encoder.layers[1] = Layer()
            encoder(x, mask=mask)
            assert [(positional, sorted(named), named["is_causal"]) for positional, named in given] == [
                ((), ["is_causal", "src_key_padding_mask", "src_mask"], is_causal)
            ]


def test_constructing_and_bool_masks_give_no_warning_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    x, square, hidden = torch.randn(2, 3, E), torch.ones(3, 3, dtype=torch.bool).triu_(1), padding(3, 2)
    with warnings.catch_warnings(), caplog.at_level(logging.DEBUG):
        warnings.simplefilter("error")
        for norm_first in (False, True):
            options = {"batch_first": True, "norm_first": norm_first, "bias": norm_first}
            encoder = fasttfm.nn.TransformerEncoder(fasttfm.nn.TransformerEncoderLayer(E, H, F, **options), 2)
            decoder = fasttfm.nn.TransformerDecoder(fasttfm.nn.TransformerDecoderLayer(E, H, F, **options), 2)
            memory = encoder(x, mask=square, src_key_padding_mask=hidden)
            decoder(x, memory, tgt_mask=square, tgt_key_padding_mask=hidden, memory_key_padding_mask=hidden)
    assert not caplog.records


def test_as_many_sequences_as_positions_are_not_confused() -> None:
    mask = torch.tensor([[False, True], [False, False]])
    compare(*stacks("Encoder", stack={"enable_nested_tensor": False}), rand(2, 2, E), mask=mask)


def transformers(dropout: float = 0.0, **options: Any) -> tuple[nn.Module, nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, ours = (library.Transformer(E, H, 2, 1, F, dropout, **options).double() for library in LIBRARIES)
    share(theirs, ours)
    return theirs, ours


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", torch.sigmoid])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("layout", ["batch first", "sequence first", "unbatched"])
def test_transformer(layout: str, norm_first: bool, activation: Any, bias: bool) -> None:
    options = {"norm_first": norm_first, "activation": activation, "bias": bias, "layer_norm_eps": 1e-4}
    hidden = as_floats(padding(*LENGTHS)) if layout != "unbatched" else None
    compare(
        *transformers(batch_first=layout == "batch first", **options), tensor(layout, S), tensor(layout, L),
        tgt_mask=causal(L), src_key_padding_mask=hidden, memory_key_padding_mask=hidden,
    )  # fmt: skip


def test_transformer_takes_every_mask_and_causal_hint_and_trains_with_dropout() -> None:
    theirs, ours = transformers(batch_first=True)
    sizes = {"src": (S, S), "tgt": (L, L), "memory": (L, S)}
    given = {f"{name}_mask": hides_some(*size) for name, size in sizes.items()}
    given |= {f"{name}_key_padding_mask": hides_some(N, keys) for name, (_, keys) in sizes.items()}
    compare(theirs, ours, rand(N, S, E), rand(N, L, E), **given)
    hints = {f"{name}_mask": causal(L) for name in sizes} | {f"{name}_is_causal": True for name in sizes}
    compare(theirs, ours, rand(N, L, E), rand(N, L, E), **hints)
    _, ours = transformers(0.3, batch_first=True)
    output = ours(rand(N, S, E), rand(N, L, E), **given)
    (output * torch.randn_like(output)).sum().backward()  # a sum over all is constant after a norm
    assert torch.isfinite(output).all()
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().max() > 1e-6 for p in ours.parameters() if p.dim() > 1)


def test_transformer_with_custom_encoder_and_decoder() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
            return x

    compare(*transformers(custom_encoder=Same(), custom_decoder=Same()), rand(S, N, E), rand(L, N, E))


def test_a_stack_of_torch_layers_and_a_torch_stack_of_our_layers_work() -> None:
    theirs, ours = stacks("Encoder")
    mask = padding(*LENGTHS)
    for stack in (fasttfm.nn.TransformerEncoder(theirs.layers[0], 2), nn.TransformerEncoder(ours.layers[0], 2)):
        stack.load_state_dict(theirs.state_dict())
        compare(theirs, stack, rand(N, S, E), keep=~mask, src_key_padding_mask=mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_nested_input_goes_through_torch() -> None:
    nested = torch.nested.nested_tensor([rand(length, E) for length in LENGTHS])
    theirs, ours = (each.eval() for each in stacks("Encoder"))
    for call in (
        lambda stack: stack(nested),
        lambda stack: stack.layers[0].self_attn(nested, nested, nested, need_weights=False)[0],
    ):
        expected, got = call(theirs), call(ours)
        assert got.is_nested
        for a, b in zip(got.unbind(), expected.unbind(), strict=True):
            torch.testing.assert_close(a, b)
    for option in ("add_bias_kv", "add_zero_attn"):
        for library in LIBRARIES:
            attention = library.MultiheadAttention(E, H, batch_first=True, **{option: True}).double().eval()
            with pytest.raises(AssertionError, match=r"(?i)nested ?tensor"):
                attention(nested, nested, nested)
