"""Constructors, state dicts, initialization and repr are those of torch.nn."""

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch

import fasttfm.nn

NAMES = {
    "LayerNorm": (8,), "MultiheadAttention": (8, 2), "TransformerEncoderLayer": (8, 2, 12),
    "TransformerDecoderLayer": (8, 2, 12), "Transformer": (8, 2, 2, 1, 12),
}  # fmt: skip
LAYER: list[dict[str, Any]] = [
    {}, {"bias": False}, {"norm_first": True, "activation": "gelu"}, {"batch_first": True}
]  # fmt: skip
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "LayerNorm": [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 1e-3}],
    "MultiheadAttention": [
        {}, {"bias": False}, {"add_bias_kv": True, "batch_first": True}, {"add_zero_attn": True},
        {"kdim": 4, "vdim": 6, "dropout": 0.2},
    ],
    "TransformerEncoderLayer": LAYER,
    "TransformerDecoderLayer": LAYER,
    "Transformer": [{}, {"bias": False, "norm_first": True, "batch_first": True}, {"layer_norm_eps": 1e-3}],
}  # fmt: skip


def pair(name: str, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    modules = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in (torch.nn, fasttfm.nn):
            torch.manual_seed(7)
            modules.append(getattr(library, name)(*NAMES[name], **options))
    return modules[0], modules[1]


@pytest.mark.parametrize(("name", "options"), [(name, each) for name, choices in OPTIONS.items() for each in choices])
def test_values_keys_and_representation_are_those_of_torch(name: str, options: dict[str, Any]) -> None:
    theirs, ours = pair(name, **options)
    expected, got = theirs.state_dict(), ours.state_dict()
    assert list(got) == list(expected)
    assert all(torch.equal(got[key], expected[key]) for key in expected)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert repr(ours) == repr(theirs)
    assert isinstance(ours, type(theirs))
    replaced = [type(m) for m in ours.modules() if type(m).__name__ in fasttfm.nn.__all__]
    assert all(kind.__module__.startswith("fasttfm.") for kind in replaced)
    other = copy.deepcopy(theirs)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    other.load_state_dict(ours.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("name", [*NAMES, "TransformerEncoder", "TransformerDecoder"])
def test_constructor_and_forward_take_the_arguments_of_torch_in_their_order(name: str) -> None:
    theirs, ours = getattr(torch.nn, name), getattr(fasttfm.nn, name)
    for method in ("__init__", "forward"):
        expected = inspect.signature(getattr(theirs, method)).parameters
        got = inspect.signature(getattr(ours, method)).parameters
        positional = {n: p for n, p in got.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY}
        assert list(positional) == list(expected)
        assert [p.default for p in positional.values()] == [p.default for p in expected.values()]


@pytest.mark.parametrize("name", NAMES)
def test_device_and_dtype(name: str) -> None:
    """As arguments, and by torch's default dtype."""
    _, ours = pair(name, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in ours.parameters())
    torch.set_default_dtype(torch.float64)
    try:
        _, ours = pair(name)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(p.dtype == torch.float64 for p in ours.parameters())
