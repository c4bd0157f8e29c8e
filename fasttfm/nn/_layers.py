"""What encoder and decoder layers share: how a sub-layer's output joins the residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.functional import draw_seed
from fasttfm.nn._inspect import DROPOUT, ordinary, untouched
from fasttfm.nn.attention import MultiheadAttention
from fasttfm.nn.errors import ArgumentError, ArgumentTypeError, check_tensor, renamed
from fasttfm.nn.layer_norm import LayerNorm

NORMS = frozenset({torch.nn.LayerNorm, LayerNorm})
ATTENTIONS = frozenset({MultiheadAttention})


def adopt(layer: nn.Module) -> None:
    """Makes the attentions and norms that torch.nn's constructor built in layer ours, parameters and all."""
    for child in layer.children():
        if type(child) is torch.nn.MultiheadAttention:
            child.__class__ = MultiheadAttention
        elif type(child) is torch.nn.LayerNorm:
            child.__class__ = LayerNorm


def seed_for(device: torch.device, dropouts: tuple[nn.Module, ...], attentions: tuple[nn.Module, ...]) -> Tensor | None:
    """One seed for all dropouts of a layer, whose streams tell them apart; None where none of them drops."""
    active = any(d.training and getattr(d, "p", 0.0) > 0.0 for d in dropouts)
    active = active or any(a.training and getattr(a, "dropout", 0.0) > 0.0 and _opens(a) for a in attentions)
    return draw_seed(device) if active else None


def _opens(attention: nn.Module) -> bool:
    """Whether a layer may compute attention without calling it, its output projection apart."""
    return untouched(attention, ATTENTIONS)


def _fuses(norm: Any, dropout: Any, residual: Tensor) -> bool:
    """Whether dropout, residual connection and norm are one pass, as they are what they seem."""
    return (
        untouched(norm, NORMS)
        and untouched(dropout, DROPOUT)
        and len(norm.normalized_shape) == 1
        and ordinary(residual, norm.weight, norm.bias)
    )


def branch(norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(x), x) where a pre-norm layer begins, both gradients in one pass where norm is what it seems."""
    whole = untouched(norm, NORMS) and norm.normalized_shape == tuple(x.shape[-1:]) and x.is_floating_point()
    if whole and ordinary(x, norm.weight, norm.bias):
        return F.branch_layer_norm(x, norm.weight, norm.bias, norm.eps)
    return norm(x), x


def late_bias(bias: Tensor | None, x: Tensor, norm: Any, dropout: Any, residual: Tensor) -> Tensor | None:
    """The bias of a sub-layer's last product over x, where norm adds it to the product in passing; else None."""
    return bias if bias is not None and _fuses(norm, dropout, residual) and F.adds_bias(x) else None


def add_and_normalise(
    output: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: Any,
    dropout: Any,
    *,
    seed: Tensor | None,
    stream: int,
    post_norm: bool,
) -> tuple[Tensor, Tensor]:
    """s = residual + dropout(output + bias) and y = norm(s), in one pass where norm and dropout are what they seem.

    output, residual (..., N), bias (N,) as late_bias() gives it. Returns y and the next residual: s, or with post_norm
    y once more, so that the gradients of its two uses meet in one pass. Under autocast y has output's dtype, as the
    residual stream keeps its own.
    """
    if _fuses(norm, dropout, residual) and ordinary(output):
        p = dropout.p if dropout.training else 0.0
        return F.residual_layer_norm(
            output, residual, norm.weight, norm.bias, norm.eps,
            x_bias=bias, dropout_p=p, seed=seed, stream=stream, post_norm=post_norm,
        )  # fmt: skip
    s = residual + dropout(output if bias is None else output + bias)
    y = norm(s)
    return y, y if post_norm else s


def add(output: Tensor, residual: Tensor, dropout: Any, *, seed: Tensor | None, stream: int) -> Tensor:
    """residual + dropout(output): the end of a pre-norm layer."""
    if untouched(dropout, DROPOUT) and ordinary(output, residual):
        p = dropout.p if dropout.training else 0.0
        return F.residual_add(output, residual, dropout_p=p, seed=seed, stream=stream)
    return residual + dropout(output)


def attend(
    attention: Any,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    names: dict[str, str],
    ends_in: tuple[Any, Any, Tensor],
    *,
    seed: Tensor | None,
    stream: int,
    **ours: Any,
) -> tuple[Tensor, Tensor | None]:
    """The output of an attention sub-layer, and the bias that it leaves to add_and_normalise(), or None.

    names: what the attention's arguments are called in the layer, for its errors. ends_in: the norm, dropout and
    residual that follow. ours: arguments that torch.nn's attention does not know, left out where None.
    """
    options: dict[str, Any] = {
        "attn_mask": attn_mask,
        "key_padding_mask": key_padding_mask,
        "need_weights": False,
        "is_causal": is_causal,
        **{name: value for name, value in ours.items() if value is not None},
    }
    try:
        if _opens(attention) and attention.takes(query, key, key):
            heads, _ = attention.joined_heads(query, key, key, seed=seed, stream=stream, **options)
            last: Any = attention.out_proj
            late = late_bias(last.bias, heads, *ends_in)
            return nn.functional.linear(heads, last.weight, last.bias if late is None else None), late
        return attention(query, key, key, **options)[0], None
    except (ArgumentError, ArgumentTypeError) as error:
        raise renamed(error, names) from None


def check_input(attention: Any, name: str, tensor: Tensor) -> None:
    """Raises unless tensor fits the layer of attention; one of another class looks for itself."""
    if isinstance(attention, MultiheadAttention):
        weight = attention.in_proj_weight
        if ordinary(tensor, weight) and weight is not None:
            check_tensor(name, tensor, attention.embed_dim, "d_model", weight)
