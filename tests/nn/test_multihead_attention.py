"""MultiheadAttention against torch.nn's: every argument, forward and backward, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fasttfm.nn

from .twins import as_floats, causal, compare, hides_some, padding, twins

N, H, L, S, E = 3, 2, 4, 5, 8

MASKS: dict[str, Any] = {
    "no mask": lambda q, k, n: {},
    "bool 2-D": lambda q, k, n: {"attn_mask": hides_some(q, k)},
    "float 2-D": lambda q, k, n: {"attn_mask": torch.randn(q, k, dtype=torch.float64)},
    "float 2-D with -inf": lambda q, k, n: {"attn_mask": as_floats(hides_some(q, k))},
    "bool 3-D": lambda q, k, n: {"attn_mask": hides_some(n * H, q, k)},
    "float 3-D": lambda q, k, n: {"attn_mask": torch.randn(n * H, q, k, dtype=torch.float64)},
    "padding": lambda q, k, n: {"key_padding_mask": hides_some(n, k)},
    "float padding": lambda q, k, n: {"key_padding_mask": torch.randn(n, k, dtype=torch.float64)},
    "bool 2-D and padding": lambda q, k, n: {"attn_mask": hides_some(q, k), "key_padding_mask": hides_some(n, k)},
    "bool 3-D and padding": lambda q, k, n: MASKS["bool 3-D"](q, k, n) | MASKS["padding"](q, k, n),
    "float 2-D and float padding": lambda q, k, n: {
        **MASKS["float 2-D"](q, k, n), "key_padding_mask": as_floats(hides_some(n, k)),
    },
}  # fmt: skip
LAYOUTS = ("batch first", "sequence first", "unbatched")
WEIGHTS = {
    "without weights": {"need_weights": False},
    "averaged weights": {"need_weights": True},
    "weights per head": {"need_weights": True, "average_attn_weights": False},
}


def tensor(layout: str, length: int, width: int = E) -> Tensor:
    shape = {"batch first": (N, length, width), "sequence first": (length, N, width), "unbatched": (length, width)}
    return torch.randn(shape[layout], dtype=torch.float64)


def mask_options(layout: str, name: str, queries: int, keys: int) -> dict[str, Tensor]:
    options = MASKS[name](queries, keys, 1 if layout == "unbatched" else N)
    if layout == "unbatched" and "key_padding_mask" in options:
        options["key_padding_mask"] = options["key_padding_mask"][0]
    return options


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks(layout: str, mask: str, weights: str) -> None:
    theirs, ours = twins("MultiheadAttention", E, H, batch_first=layout == "batch first")
    memory = tensor(layout, S)
    compare(theirs, ours, tensor(layout, L), memory, memory, **mask_options(layout, mask, L, S), **WEIGHTS[weights])


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("inputs", ["self", "memory", "three", "query is value"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_which_tensors_are_one(layout: str, inputs: str, mode: str) -> None:
    theirs, ours = twins("MultiheadAttention", E, H, batch_first=layout == "batch first")
    theirs.train(mode == "train")
    ours.train(mode == "train")
    x, y, z = (tensor(layout, L) for _ in range(3))
    given = {"self": (x, x, x), "memory": (x, y, y), "three": (x, y, z), "query is value": (x, y, x)}[inputs]
    compare(theirs, ours, *given)


OPTIONS = {
    "no bias": {"bias": False},
    "bias keys": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True},
    "bias and zero keys": {"add_bias_kv": True, "add_zero_attn": True},
    "own key width": {"kdim": 6},
    "own key and value widths": {"kdim": 6, "vdim": 3},
    "own widths, no bias, extra keys": {
        "kdim": 6, "vdim": 3, "bias": False, "add_bias_kv": True, "add_zero_attn": True,
    },
    "one head": {"num_heads": 1},
    "a head for each channel": {"num_heads": E},
}  # fmt: skip


@pytest.mark.parametrize("weights", ["without weights", "averaged weights"])
@pytest.mark.parametrize("mask", ["no mask", "bool 2-D", "padding", "float 2-D and float padding"])
@pytest.mark.parametrize("option", OPTIONS)
def test_constructor_options(option: str, mask: str, weights: str) -> None:
    arguments = {"embed_dim": E, "num_heads": H, "batch_first": True, **OPTIONS[option]}
    theirs, ours = twins("MultiheadAttention", **arguments)
    key = tensor("batch first", S, arguments.get("kdim", E))
    value = tensor("batch first", S, arguments.get("vdim", E))
    options = mask_options("batch first", mask, L, S)
    compare(theirs, ours, tensor("batch first", L), key, value, **options, **WEIGHTS[weights])


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("extra", ["", "padding"])
@pytest.mark.parametrize("keys", [4, 6])
def test_a_true_causal_hint_changes_nothing(keys: int, extra: str, weights: str) -> None:
    theirs, ours = twins("MultiheadAttention", E, H, batch_first=True)
    mask = torch.ones(4, keys, dtype=torch.bool).triu(1)
    options = {"key_padding_mask": padding(*range(keys - N + 1, keys + 1))} if extra else {}
    x, y = tensor("batch first", 4), tensor("batch first", keys)
    compare(theirs, ours, x, y, y, attn_mask=mask, is_causal=True, **options, **WEIGHTS[weights])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_causal_needs_no_mask(layout: str) -> None:
    theirs, ours = twins("MultiheadAttention", E, H, batch_first=layout == "batch first")
    x = tensor(layout, L)
    expected, _ = theirs(x, x, x, attn_mask=causal(L), need_weights=False)
    got, _ = ours(x, x, x, is_causal=True, need_weights=False)
    torch.testing.assert_close(got, expected)


def test_an_additive_mask_may_be_learned() -> None:
    theirs, ours = twins("MultiheadAttention", E, H, batch_first=True)
    x, bias = tensor("batch first", L), torch.randn(N * H, L, L, dtype=torch.float64)
    gradients = []
    for module in (theirs, ours):
        mask = bias.clone().requires_grad_()
        module(x, x, x, attn_mask=mask, need_weights=False)[0].square().sum().backward()
        gradients.append(mask.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("floats", ["attn_mask", "key_padding_mask"])
def test_masks_of_two_dtypes_go_together(floats: str) -> None:
    theirs, ours = twins("MultiheadAttention", E, H, batch_first=True)
    masks = {"attn_mask": hides_some(L, S), "key_padding_mask": hides_some(N, S)}
    masks[floats] = as_floats(masks[floats])
    memory = tensor("batch first", S)
    compare(theirs, ours, tensor("batch first", L), memory, memory, **masks)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 4), (2, 0, 4), (2, 1, 1)])
def test_empty_and_tiny_batches(batch: int, queries: int, keys: int) -> None:
    theirs, ours = twins("MultiheadAttention", E, H, batch_first=True)
    x, y = torch.randn(batch, queries, E, dtype=torch.float64), torch.randn(batch, keys, E, dtype=torch.float64)
    expected, got = theirs(x, y, y)[0], ours(x, y, y)[0]
    torch.testing.assert_close(got, expected)


def test_non_contiguous_and_expanded_inputs() -> None:
    theirs, ours = twins("MultiheadAttention", E, H)
    x = torch.randn(E, N, L, dtype=torch.float64).permute(2, 1, 0)
    y = torch.randn(S, 1, E, dtype=torch.float64).expand(S, N, E)
    compare(theirs, ours, x, y, y)


# ------------------------------------------------------------------------------------ better than torch.nn


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("form", ["bool", "float"])
def test_a_row_with_no_key_to_attend_gives_the_output_bias_and_no_gradient(mode: str, weights: str, form: str) -> None:
    _, ours = twins("MultiheadAttention", E, H, batch_first=True)
    ours.train(mode == "train")
    x = tensor("batch first", L).requires_grad_()
    mask = padding(L, 0, 2)
    mask = mask if form == "bool" else as_floats(mask)
    output, given = ours(x, x, x, key_padding_mask=mask, **WEIGHTS[weights])
    torch.testing.assert_close(output[1], ours.out_proj.bias.expand(L, E))
    if given is not None:
        assert not given[1].any()
    output[1].sum().backward()
    assert not x.grad.any()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters() if p.grad is not None)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("mask", MASKS)
def test_with_weights_and_without_give_one_output(mask: str, dropout: float) -> None:
    ours = fasttfm.nn.MultiheadAttention(E, H, dropout=dropout, batch_first=True).double()
    x, y = tensor("batch first", L), tensor("batch first", S)
    options = mask_options("batch first", mask, L, S)
    outputs = []
    for need_weights in (False, True):
        torch.manual_seed(3)
        outputs.append(ours(x, y, y, need_weights=need_weights, **options)[0])
    torch.testing.assert_close(outputs[1], outputs[0])


def test_with_extra_keys_the_causal_hint_keeps_them_visible_with_weights_and_without() -> None:
    _, ours = twins("MultiheadAttention", E, H, batch_first=True, add_bias_kv=True)
    x = tensor("batch first", L)
    with_weights, weights = ours(x, x, x, is_causal=True)
    without, _ = ours(x, x, x, is_causal=True, need_weights=False)
    torch.testing.assert_close(without, with_weights)
    assert (weights[:, :, -1] > 0).all()  # the learned key, which torch.nn hides without weights
    assert not weights[:, 0, 1:-1].any()


# --------------------------------------------------------------------------------------------------- dropout


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


def test_dropped_weights_are_zero_and_the_others_scaled() -> None:
    ours = fasttfm.nn.MultiheadAttention(E, H, dropout=0.25, batch_first=True)
    x = torch.randn(4, 32, E)
    weights = ours(x, x, x, average_attn_weights=False)[1]
    ours.eval()
    full = ours(x, x, x, average_attn_weights=False)[1]
    dropped = weights == 0
    assert 0.22 < dropped.float().mean() < 0.28
    torch.testing.assert_close(weights[~dropped], full[~dropped] / 0.75)


def test_dropout_one_leaves_the_output_bias() -> None:
    _, ours = twins("MultiheadAttention", E, H, dropout=1.0, batch_first=True)
    x = tensor("batch first", L)
    torch.testing.assert_close(ours(x, x, x, need_weights=False)[0], ours.out_proj.bias.expand(N, L, E))
