"""An example call of every public function and module, for tests of the whole public API.

tests/functional/test_in_place.py fails if a name in __all__ is missing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fasttfm.nn
from fasttfm import functional as F
from fasttfm.compat import flash_attn, losses, varlen

SEED = torch.tensor([11])
NO_FUNCTIONS = {"backend", "draw_seed", "rotary_tables"}
"""Names in functional.__all__ without floating-point tensor arguments."""
NO_GRADIENT = {"attention_with_cache", "flash_attn_with_kvcache"}
"""Functions that write to their arguments."""
NO_MODULES = {"ArgumentError", "ArgumentTypeError", "AttentionCache", "DecoderCache", "Packing"}
"""Names in nn.__all__ that are not modules."""


class Use(NamedTuple):
    """A call and its inputs."""

    call: Callable[..., Any]
    inputs: list[Tensor]


def new(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def functions(length: int = 5, width: int = 16, batch: int = 2, dropout_p: float = 0.0) -> dict[str, Use]:
    """Return calls of functional and compat by name, on (batch, length, width) with heads of size 8."""
    drop: dict[str, Any] = {"dropout_p": dropout_p, "seed": SEED} if dropout_p else {}
    heads, tokens = width // 8, batch * length
    starts = torch.arange(0, tokens + 1, length, dtype=torch.int32)
    target = torch.arange(tokens) % 9
    ids = (torch.arange(tokens) % 9).view(batch, length)
    tables = F.rotary_tables(length, 8)
    rows, padded, packed = (batch, length, width), (batch, heads, length, 8), (tokens, heads, 8)
    flash = (batch, length, heads, 8)
    hidden = 2 * width

    def varlen_arguments(*x: Tensor) -> tuple[Any, ...]:
        return (*x, starts, starts, length, length)

    norm = [rows, (width,), (width,)]
    network = [rows, (hidden, width), (hidden,), (width, hidden), (width,)]
    return {
        "attention": Use(lambda q, k, v: F.attention(q, k, v, causal=True, **drop), new(padded, padded, padded)),
        "attention_weights": Use(lambda q, k: F.attention_weights(q, k, causal=True, **drop), new(padded, padded)),
        "scaled_dot_product_attention": Use(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p), new(padded, padded, padded)
        ),
        "packed_qkv_attention": Use(
            lambda x: F.packed_qkv_attention(x, causal=True, **drop), new((batch, length, 3, heads, 8))
        ),
        "varlen_packed_qkv_attention": Use(
            lambda x: F.varlen_packed_qkv_attention(x, None, starts, starts, length, length, **drop),
            new((tokens, 3, heads, 8)),
        ),
        "varlen_attention": Use(
            lambda q, k, v: F.varlen_attention(*varlen_arguments(q, k, v), **drop), new(packed, packed, packed)
        ),
        "cross_entropy": Use(lambda x: F.cross_entropy(x, target)[0], new((tokens, 9))),
        "linear_cross_entropy": Use(
            lambda x, w: F.linear_cross_entropy(x, w, target.view(batch, length))[0], new(rows, (9, width))
        ),
        "losses.cross_entropy": Use(lambda x: losses.cross_entropy(x, target), new((tokens, 9))),
        "losses.linear_cross_entropy": Use(
            lambda x, w, b: losses.linear_cross_entropy(x, w, target, linear_bias=b),
            new((tokens, width), (9, width), (9,)),
        ),
        "embed": Use(lambda w, p: F.embed(ids, w, p, **drop), new((9, width), (length, width))),
        "feed_forward": Use(lambda *t: F.feed_forward(*t, **drop), new(*network)),
        "feed_forward_gelu": Use(lambda *t: F.feed_forward(*t, activation="gelu_tanh", **drop), new(*network)),
        "layer_norm": Use(F.layer_norm, new(*norm)),
        "residual_layer_norm": Use(lambda x, *t: F.residual_layer_norm(x, *t, **drop), new(rows, *norm)),
        "rms_norm": Use(F.rms_norm, new(*norm[:2])),
        "residual_rms_norm": Use(lambda x, *t: F.residual_rms_norm(x, *t, **drop), new(rows, *norm[:2])),
        "residual_add": Use(lambda *t: F.residual_add(*t, **drop), new(rows, rows)),
        "rotary": Use(lambda x: F.rotary(x, *tables), new(padded)),
        "flash_attn_func": Use(
            lambda *t: flash_attn.flash_attn_func(*t, dropout_p, causal=True), new(flash, flash, flash)
        ),
        "flash_attn_qkvpacked_func": Use(
            lambda x: flash_attn.flash_attn_qkvpacked_func(x, dropout_p), new((batch, length, 3, heads, 8))
        ),
        "flash_attn_kvpacked_func": Use(
            lambda *t: flash_attn.flash_attn_kvpacked_func(*t, dropout_p), new(flash, (batch, length, 2, heads, 8))
        ),
        "flash_attn_varlen_func": Use(
            lambda *t: flash_attn.flash_attn_varlen_func(*varlen_arguments(*t), dropout_p), new(packed, packed, packed)
        ),
        "flash_attn_varlen_qkvpacked_func": Use(
            lambda x: flash_attn.flash_attn_varlen_qkvpacked_func(x, starts, length, dropout_p),
            new((tokens, 3, heads, 8)),
        ),
        "flash_attn_varlen_kvpacked_func": Use(
            lambda q, kv: flash_attn.flash_attn_varlen_kvpacked_func(q, kv, starts, starts, length, length, dropout_p),
            new(packed, (tokens, 2, heads, 8)),
        ),
        "varlen_attn": Use(
            lambda *t: varlen.varlen_attn(*varlen_arguments(*t), dropout_p=dropout_p), new(packed, packed, packed)
        ),
    }


def compat_names() -> set[str]:
    """Return the names of all public functions of compat."""
    return {
        f"losses.{name}" if module is losses else name
        for module in (flash_attn, losses, varlen)
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    }


def modules(width: int = 16, dropout: float = 0.0) -> dict[str, torch.nn.Module]:
    """Return modules of nn by name, batch first and in training mode."""
    nn, heads, hidden = fasttfm.nn, width // 8, 2 * width
    layer: dict[str, Any] = {"dim_feedforward": hidden, "dropout": dropout, "batch_first": True}

    def encoder(**options: Any) -> torch.nn.Module:
        return nn.TransformerEncoderLayer(width, heads, **layer, **options)

    def decoder(**options: Any) -> torch.nn.Module:
        return nn.TransformerDecoderLayer(width, heads, **layer, **options)

    return {
        "LayerNorm": nn.LayerNorm(width),
        "RMSNorm": nn.RMSNorm(width),
        "FeedForward": nn.FeedForward(width, hidden, dropout),
        "PositionalEncoding": nn.PositionalEncoding(width, dropout, max_length=1000, batch_first=True),
        "MultiheadAttention": nn.MultiheadAttention(width, heads, dropout, batch_first=True),
        "TransformerEncoderLayer": encoder(),
        "TransformerEncoderLayer_pre": encoder(norm_first=True, activation="gelu"),
        "TransformerDecoderLayer": decoder(),
        "TransformerDecoderLayer_pre": decoder(norm_first=True),
        "TransformerEncoder": nn.TransformerEncoder(encoder(), 2, nn.LayerNorm(width)),
        "TransformerDecoder": nn.TransformerDecoder(decoder(), 2, nn.LayerNorm(width)),
        "Transformer": nn.Transformer(width, heads, 1, 1, **layer),
    }


INPUTS = {"MultiheadAttention": 3, "TransformerDecoder": 2, "Transformer": 2}
"""Number of inputs (B, L, width) by name without _ and Layer suffixes; default 1."""


def input_count(name: str) -> int:
    name = name.split("_")[0].removesuffix("Layer")
    return INPUTS.get(name, 1)


def public_name(name: str) -> str:
    """Return the name in __all__ of an example, of which a function may have several."""
    for ending in ("_gelu", "_pre"):
        name = name.removesuffix(ending)
    return name


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
