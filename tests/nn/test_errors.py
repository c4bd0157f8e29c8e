"""Wrong input raises what torch.nn raises, as ValueError or TypeError, with a message that names the argument.

Every argument of every module, wrong in every way: functional/test_wrong_calls.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fasttfm.nn

B, L, S, E, H = 2, 3, 4, 8, 2


def z(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def call(make: Callable[..., torch.nn.Module]) -> Callable[..., Any]:
    """A function that creates a module of a library and calls it, in eval mode if gradients are off."""

    def made_and_called(nn: Any, *inputs: Any, options: dict[str, Any] | None = None, **keywords: Any) -> Any:
        return make(nn, **(options or {})).train(torch.is_grad_enabled())(*inputs, **keywords)

    return made_and_called


def layer(nn: Any, kind: str, **options: Any) -> torch.nn.Module:
    return getattr(nn, f"Transformer{kind}Layer")(E, H, 16, batch_first=True, **options)


mha = call(lambda nn, **options: nn.MultiheadAttention(E, H, **({"batch_first": True} | options)))
encoder_layer = call(lambda nn, **options: layer(nn, "Encoder", **options))
decoder_layer = call(lambda nn, **options: layer(nn, "Decoder", **options))
transformer = call(lambda nn: nn.Transformer(E, H, 1, 1, 16, batch_first=True))
LAYERS = ("TransformerEncoderLayer", "TransformerDecoderLayer", "Transformer")

X, Y = z(B, L, E), z(B, S, E)
CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    # constructors
    "embed_dim not divisible": (lambda nn: nn.MultiheadAttention(9, 2), "embed_dim 9.*num_heads 2"),
    **{f"d_model not divisible, {k}": (lambda nn, k=k: getattr(nn, k)(9, 2), "d_model 9.*nhead 2") for k in LAYERS},
    **{f"activation, {k}": (lambda nn, k=k: getattr(nn, k)(8, 2, activation="swish"), "swish") for k in LAYERS},
    # shapes of inputs
    "query 1-D": (lambda nn: mha(nn, z(E), z(E), z(E)), r"query \(8,\)"),
    "kdim": (lambda nn: mha(nn, X, Y, Y, options={"kdim": 5}), r"key \(2, 4, 8\).*kdim"),
    # masks
    "attn_mask transposed": (lambda nn: mha(nn, X, Y, Y, attn_mask=z(S, L)), r"attn_mask \(4, 3\) must be \(3, 4\)"),
    # layers and stacks
    "src 4-D": (lambda nn: encoder_layer(nn, z(1, B, L, E)), r"src \(1, 2, 3, 8\).*3-D"),
    "transformer batches": (lambda nn: transformer(nn, X, z(3, L, E)), "src.*tgt.*batch size"),
    "transformer tgt width": (lambda nn: transformer(nn, X, z(B, L, 9)), r"tgt \(2, 3, 9\).*d_model"),
    # dtypes
    "query float64": (lambda nn: mha(nn, X.double(), Y, Y), r"query has dtype torch\.float64.*torch\.float32"),
    "src float64, pre-norm": (
        lambda nn: encoder_layer(nn, X.double(), options={"norm_first": True}),
        r"src has .*float64",
    ),
    # LayerNorm
    "normalized_shape": (lambda nn: nn.LayerNorm((2, 8))(z(3, 8)), r"\(3, 8\).*\(2, 8\)"),
    "norm of float64": (lambda nn: nn.LayerNorm(8)(z(2, 8).double()), r"input has dtype torch\.float64.*float32"),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_wrong_input_is_refused_as_torch_does_and_named(case: str, grad: bool) -> None:
    run, message = CASES[case]
    with torch.set_grad_enabled(grad), pytest.raises((ValueError, TypeError), match=message) as ours:
        run(fasttfm.nn)
    if not grad:  # the fast path of torch.nn checks less, and with other errors
        return
    with pytest.raises(Exception) as theirs:  # noqa: PT011 (whatever torch raises)
        run(torch.nn)
    if theirs.type is not KeyError and issubclass(theirs.type, (AssertionError, RuntimeError, ValueError, TypeError)):
        of_dtype = "dtype" in str(ours.value)  # always a TypeError here
        assert isinstance(ours.value, (theirs.type, TypeError) if of_dtype else theirs.type)
