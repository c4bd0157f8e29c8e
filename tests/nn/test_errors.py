"""Wrong input: what torch.nn raises, as ValueError or TypeError, with a message that names the argument."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fasttfm.nn

B, L, S, E, H = 2, 3, 4, 8, 2


def z(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def mha(nn: Any, *inputs: Any, options: dict[str, Any] | None = None, **given: Any) -> Any:
    return nn.MultiheadAttention(E, H, **({"batch_first": True} | (options or {})))(*inputs, **given)


def encoder_layer(nn: Any, *inputs: Any, **given: Any) -> Any:
    return nn.TransformerEncoderLayer(E, H, 16, batch_first=True)(*inputs, **given)


def decoder_layer(nn: Any, *inputs: Any, **given: Any) -> Any:
    return nn.TransformerDecoderLayer(E, H, 16, batch_first=True)(*inputs, **given)


def encoder(nn: Any, *inputs: Any, **given: Any) -> Any:
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 1)(*inputs, **given)


def transformer(nn: Any, *inputs: Any, **given: Any) -> Any:
    return nn.Transformer(E, H, 1, 1, 16, batch_first=True)(*inputs, **given)


X, Y = z(B, L, E), z(B, S, E)
CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    # constructors
    "embed_dim not divisible": (lambda nn: nn.MultiheadAttention(9, 2), "embed_dim 9.*num_heads 2"),
    "embed_dim zero": (lambda nn: nn.MultiheadAttention(0, 2), "embed_dim 0"),
    "num_heads negative": (lambda nn: nn.MultiheadAttention(8, -2), "num_heads -2"),
    "d_model not divisible, encoder": (lambda nn: nn.TransformerEncoderLayer(9, 2), "d_model 9.*nhead 2"),
    "d_model not divisible, decoder": (lambda nn: nn.TransformerDecoderLayer(9, 2), "d_model 9.*nhead 2"),
    "d_model not divisible, transformer": (lambda nn: nn.Transformer(9, 2), "d_model 9.*nhead 2"),
    "dropout above one, encoder": (lambda nn: nn.TransformerEncoderLayer(8, 2, dropout=1.1), r"dropout is 1\.1"),
    "dropout negative, decoder": (lambda nn: nn.TransformerDecoderLayer(8, 2, dropout=-1), "dropout is -1"),
    "activation unknown, encoder": (lambda nn: nn.TransformerEncoderLayer(8, 2, activation="swish"), "swish"),
    "activation unknown, decoder": (lambda nn: nn.TransformerDecoderLayer(8, 2, activation="swish"), "swish"),
    "activation unknown, transformer": (lambda nn: nn.Transformer(8, 2, activation="swish"), "swish"),
    # shapes of inputs
    "query 1-D": (lambda nn: mha(nn, z(E), z(E), z(E)), r"query \(8,\)"),
    "query 4-D": (lambda nn: mha(nn, z(1, B, L, E), Y, Y), "3-D"),
    "key 2-D for query 3-D": (lambda nn: mha(nn, X, z(S, E), Y), r"key \(4, 8\)"),
    "value 2-D for query 3-D": (lambda nn: mha(nn, X, Y, z(S, E)), r"value \(4, 8\)"),
    "key 3-D for query 2-D": (lambda nn: mha(nn, z(L, E), Y, z(S, E)), r"key \(2, 4, 8\)"),
    "query too wide": (lambda nn: mha(nn, z(B, L, 9), Y, Y), r"query \(2, 3, 9\).*8 wide"),
    "key too wide": (lambda nn: mha(nn, X, z(B, S, 9), z(B, S, 9)), r"key \(2, 4, 9\)"),
    "value too narrow": (lambda nn: mha(nn, X, Y, z(B, S, 7)), r"value \(2, 4, 7\)"),
    "kdim": (lambda nn: mha(nn, X, Y, Y, options={"kdim": 5}), r"key \(2, 4, 8\).*kdim"),
    "vdim": (lambda nn: mha(nn, X, z(B, S, 5), Y, options={"kdim": 5, "vdim": 6}), r"value \(2, 4, 8\).*vdim"),
    "key and value lengths": (lambda nn: mha(nn, X, Y, z(B, S + 1, E)), "key.*value"),
    "batch sizes": (lambda nn: mha(nn, X, z(3, S, E), z(3, S, E)), "batch size"),
    "batch sizes, sequence first": (
        lambda nn: mha(nn, z(L, 2, E), z(S, 3, E), z(S, 3, E), options={"batch_first": False}),
        "batch size",
    ),
    # masks
    "attn_mask 1-D": (lambda nn: mha(nn, X, Y, Y, attn_mask=z(S)), r"attn_mask \(4,\)"),
    "attn_mask 4-D": (lambda nn: mha(nn, X, Y, Y, attn_mask=z(B, H, L, S)), r"attn_mask \(2, 2, 3, 4\)"),
    "attn_mask transposed": (lambda nn: mha(nn, X, Y, Y, attn_mask=z(S, L)), r"attn_mask \(4, 3\) must be \(3, 4\)"),
    "attn_mask 3-D of the batch alone": (lambda nn: mha(nn, X, Y, Y, attn_mask=z(B, L, S)), r"\(4, 3, 4\)"),
    "attn_mask int": (lambda nn: mha(nn, X, Y, Y, attn_mask=z(L, S, dtype=torch.int64)), "attn_mask has dtype"),
    "attn_mask uint8": (lambda nn: mha(nn, X, Y, Y, attn_mask=z(L, S, dtype=torch.uint8)), "uint8"),
    "attn_mask 3-D for unbatched": (
        lambda nn: mha(nn, z(L, E), z(S, E), z(S, E), attn_mask=z(5, L, S)),
        r"attn_mask \(5, 3, 4\)",
    ),
    "padding 1-D": (lambda nn: mha(nn, X, Y, Y, key_padding_mask=z(S).bool()), r"key_padding_mask \(4,\)"),
    "padding 2-D for unbatched": (
        lambda nn: mha(nn, z(L, E), z(S, E), z(S, E), key_padding_mask=z(1, S).bool()),
        r"key_padding_mask \(1, 4\)",
    ),
    "padding of queries": (lambda nn: mha(nn, X, Y, Y, key_padding_mask=z(B, L).bool()), r"\(2, 3\) must be \(2, 4\)"),
    "padding of another batch": (lambda nn: mha(nn, X, Y, Y, key_padding_mask=z(3, S).bool()), r"\(3, 4\)"),
    "padding int": (lambda nn: mha(nn, X, Y, Y, key_padding_mask=z(B, S, dtype=torch.int64)), "int64"),
    # layers and stacks
    "src too wide": (lambda nn: encoder_layer(nn, z(B, L, 9)), r"9"),
    "src_mask shape": (lambda nn: encoder_layer(nn, X, src_mask=z(L, S)), r"\(3, 4\) must be \(3, 3\)"),
    "src padding shape": (lambda nn: encoder_layer(nn, X, src_key_padding_mask=z(B, S).bool()), r"\(2, 4\)"),
    "src padding int": (lambda nn: encoder_layer(nn, X, src_key_padding_mask=z(B, L, dtype=torch.uint8)), "uint8"),
    "encoder padding int": (lambda nn: encoder(nn, X, src_key_padding_mask=z(B, L, dtype=torch.uint8)), "uint8"),
    "encoder mask int": (lambda nn: encoder(nn, X, mask=z(L, L, dtype=torch.int32)), "int32"),
    "memory too wide": (lambda nn: decoder_layer(nn, X, z(B, S, 9)), r"\(2, 4, 9\)"),
    "memory of another batch": (lambda nn: decoder_layer(nn, X, z(3, S, E)), "batch size"),
    "tgt_mask shape": (lambda nn: decoder_layer(nn, X, Y, tgt_mask=z(L, S)), r"\(3, 4\)"),
    "memory_mask shape": (lambda nn: decoder_layer(nn, X, Y, memory_mask=z(L, L)), r"\(3, 3\) must be \(3, 4\)"),
    "memory padding shape": (
        lambda nn: decoder_layer(nn, X, Y, memory_key_padding_mask=z(B, L).bool()),
        r"\(2, 3\) must be \(2, 4\)",
    ),
    "transformer batches": (lambda nn: transformer(nn, X, z(3, L, E)), "src.*tgt.*batch size"),
    "transformer src width": (lambda nn: transformer(nn, z(B, L, 9), X), r"src \(2, 3, 9\).*d_model"),
    "transformer tgt width": (lambda nn: transformer(nn, X, z(B, L, 9)), r"tgt \(2, 3, 9\).*d_model"),
    # LayerNorm
    "normalized_shape": (lambda nn: nn.LayerNorm(8)(z(2, 7)), r"\(2, 7\).*\(8,\)"),
    "normalized_shape 2-D": (lambda nn: nn.LayerNorm((2, 8))(z(3, 8)), r"\(3, 8\).*\(2, 8\)"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_wrong_input_is_refused_as_torch_does_and_named(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(Exception) as theirs:  # noqa: PT011 — whatever torch raises
        call(torch.nn)
    with pytest.raises((ValueError, TypeError), match=message) as ours:
        call(fasttfm.nn)
    kind = theirs.type if theirs.type in (AssertionError, RuntimeError, ValueError, TypeError) else Exception
    if kind is ValueError or "dtype" in str(ours.value):  # a wrong dtype is a TypeError, whatever torch says
        kind = (ValueError, TypeError)
    assert isinstance(ours.value, kind)


def test_torch_checks_the_dropout_of_attention_later() -> None:
    with pytest.raises(ValueError, match=r"dropout is 1\.5"):
        fasttfm.nn.MultiheadAttention(E, H, dropout=1.5)


@pytest.mark.parametrize("make", [mha, encoder_layer, decoder_layer])
def test_dtypes_that_do_not_agree(make: Any) -> None:
    inputs = {mha: (X.double(), Y.double(), Y.double()), encoder_layer: (X.double(),), decoder_layer: (X.double(), Y)}
    for nn in (torch.nn, fasttfm.nn):
        with pytest.raises((RuntimeError, ValueError, TypeError), match=r"(?i)dtype|type|double"):
            make(nn, *inputs[make])


def test_devices_that_do_not_agree() -> None:
    with pytest.raises(ValueError, match="key is on meta but the module is on cpu"):
        mha(fasttfm.nn, X, z(B, S, E, device="meta"), Y)
