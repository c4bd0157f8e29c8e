"""MultiheadAttention against torch.nn's: every argument, forward, backward and at inference, in float64."""

from typing import Any

import pytest
import torch

import fasttfm.nn

from .twins import LAYOUTS, E, H, L, N, S, as_floats, causal, compare, masks, padding, rand, tensor, twins

MASKS = (
    "none", "bool", "float", "-inf", "bool 3-D", "float 3-D", "padding", "float padding", "bool + padding",
    "bool 3-D + padding", "float + padding", "bool + float padding", "float + float padding",
)  # fmt: skip
WEIGHTS = {
    "without weights": {"need_weights": False},
    "averaged weights": {"need_weights": True},
    "weights per head": {"need_weights": True, "average_attn_weights": False},
}


def options(layout: str, mask: str, weights: str = "without weights") -> dict[str, Any]:
    attn, padded = masks(layout, mask, L, S)
    return {"attn_mask": attn, "key_padding_mask": padded, **WEIGHTS[weights]}


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks(layout: str, mask: str, weights: str) -> None:
    theirs, ours = twins("MultiheadAttention", E, H, batch_first=layout == "batch first")
    memory = tensor(layout, S)
    compare(theirs, ours, tensor(layout, L), memory, memory, **options(layout, mask, weights))


@pytest.mark.parametrize("inputs", ["self", "memory", "three", "query is value"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_which_tensors_are_one(layout: str, inputs: str) -> None:
    theirs, ours = twins("MultiheadAttention", E, H, batch_first=layout == "batch first")
    x, y, z = (tensor(layout, L) for _ in range(3))
    given = {"self": (x, x, x), "memory": (x, y, y), "three": (x, y, z), "query is value": (x, y, x)}[inputs]
    compare(theirs, ours, *given)


OPTIONS = {
    "no bias": {"bias": False},
    "bias keys": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True},
    "own key width": {"kdim": 6},
    "own key and value widths": {"kdim": 6, "vdim": 3},
    "own widths, no bias, extra keys": {
        "kdim": 6, "vdim": 3, "bias": False, "add_bias_kv": True, "add_zero_attn": True,
    },
    "one head": {"num_heads": 1},
    "a head for each channel": {"num_heads": E},
}  # fmt: skip


@pytest.mark.parametrize("weights", ["without weights", "averaged weights"])
@pytest.mark.parametrize("mask", ["none", "bool", "padding", "float + float padding"])
@pytest.mark.parametrize("option", OPTIONS)
def test_constructor_options(option: str, mask: str, weights: str) -> None:
    arguments = {"embed_dim": E, "num_heads": H, "batch_first": True, **OPTIONS[option]}
    theirs, ours = twins("MultiheadAttention", **arguments)
    key, value = (tensor("batch first", S, arguments.get(name, E)) for name in ("kdim", "vdim"))
    compare(theirs, ours, tensor("batch first", L), key, value, **options("batch first", mask, weights))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_causal_needs_no_mask(layout: str) -> None:
    theirs, ours = twins("MultiheadAttention", E, H, batch_first=layout == "batch first")
    x = tensor(layout, L)
    expected, _ = theirs(x, x, x, attn_mask=causal(L), need_weights=False)
    got, _ = ours(x, x, x, is_causal=True, need_weights=False)
    torch.testing.assert_close(got, expected)


def test_non_contiguous_and_expanded_inputs() -> None:
    theirs, ours = twins("MultiheadAttention", E, H)
    y = rand(S, 1, E).expand(S, N, E)
    compare(theirs, ours, rand(E, N, L).permute(2, 1, 0), y, y)


@torch.no_grad()
def test_a_bias_of_another_dtype_is_taken_as_torch_takes_it() -> None:
    theirs, ours = twins("MultiheadAttention", 4, 4, batch_first=True)
    for module in (theirs, ours):
        module.eval().in_proj_bias = torch.nn.Parameter(module.in_proj_bias.half())
    x = rand(4, 4, 4)
    torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x)[0])


# ------------------------------------------------------------------------------------------------ better than torch.nn


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("form", ["bool", "float"])
def test_a_row_with_no_key_to_attend_gives_the_output_bias_and_no_gradient(mode: str, weights: str, form: str) -> None:
    theirs, ours = twins("MultiheadAttention", E, H, batch_first=True)
    ours.train(mode == "train")
    x = tensor("batch first", L).requires_grad_()
    mask = padding(L, 0, 2)
    mask = mask if form == "bool" else as_floats(mask)
    output, given = ours(x, x, x, key_padding_mask=mask, **WEIGHTS[weights])
    torch.testing.assert_close(output[1], ours.out_proj.bias.expand(L, E))
    torch.testing.assert_close(output[::2], theirs(x, x, x, key_padding_mask=mask, **WEIGHTS[weights])[0][::2])
    if given is not None:
        assert not given[1].any()
    output[1].sum().backward()
    assert not x.grad.any()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters() if p.grad is not None)


def test_with_extra_keys_the_causal_hint_keeps_them_visible_with_weights_and_without() -> None:
    _, ours = twins("MultiheadAttention", E, H, batch_first=True, add_bias_kv=True)
    x = tensor("batch first", L)
    with_weights, weights = ours(x, x, x, is_causal=True)
    without, _ = ours(x, x, x, is_causal=True, need_weights=False)
    torch.testing.assert_close(without, with_weights)
    assert (weights[:, :, -1] > 0).all()  # the learned key, which torch.nn hides without weights
    assert not weights[:, 0, 1:-1].any()


# ------------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("mask", ["none", "bool 3-D", "float + float padding"])
def test_the_same_weights_are_dropped_whether_they_are_returned_or_not(mask: str) -> None:
    ours = fasttfm.nn.MultiheadAttention(E, H, dropout=0.4, batch_first=True).double()
    x, y = tensor("batch first", L), tensor("batch first", S)
    chosen, outputs = options("batch first", mask), []
    for need_weights in (False, True):
        torch.manual_seed(3)
        outputs.append(ours(x, y, y, **chosen | {"need_weights": need_weights})[0])
    torch.testing.assert_close(outputs[1], outputs[0])


def test_dropout_is_drawn_from_the_generator_and_only_in_training() -> None:
    ours = fasttfm.nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True)
    x = torch.randn(N, L, E)
    torch.manual_seed(1)
    a, b = ours(x, x, x)[0], ours(x, x, x)[0]
    torch.manual_seed(1)
    assert torch.equal(ours(x, x, x)[0], a)
    assert not torch.equal(a, b)
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
