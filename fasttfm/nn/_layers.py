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


def adopt(layer: nn.Module) -> None:
    """Makes the attentions and norms that torch.nn's constructor built in layer ours, parameters and all."""
    for child in layer.children():
        if type(child) is torch.nn.MultiheadAttention:
            child.__class__ = MultiheadAttention
        elif type(child) is torch.nn.LayerNorm:
            child.__class__ = LayerNorm


def seed_for(device: torch.device, *dropouts: nn.Module) -> Tensor | None:
    """One seed for all dropouts of a layer, whose streams tell them apart; None where none of them drops."""
    active = any(d.training and getattr(d, "p", 0.0) > 0.0 for d in dropouts)
    return draw_seed(device) if active else None


def add_and_normalise(
    output: Tensor,
    residual: Tensor,
    norm: Any,
    dropout: Any,
    *,
    seed: Tensor | None,
    stream: int,
) -> tuple[Tensor, Tensor]:
    """s = residual + dropout(output) and y = norm(s), in one pass where norm and dropout are what they seem: (y, s).

    output, residual (..., N). Under autocast y has output's dtype, as the residual stream keeps its own.
    """
    if (
        untouched(norm, NORMS)
        and untouched(dropout, DROPOUT)
        and len(norm.normalized_shape) == 1
        and ordinary(output, residual, norm.weight, norm.bias)
    ):
        p = dropout.p if dropout.training else 0.0
        return F.residual_layer_norm(
            output, residual, norm.weight, norm.bias, norm.eps, dropout_p=p, seed=seed, stream=stream
        )
    s = residual + dropout(output)
    return norm(s), s


def add(output: Tensor, residual: Tensor, dropout: Any, *, seed: Tensor | None, stream: int) -> Tensor:
    """residual + dropout(output): the end of a pre-norm layer."""
    if untouched(dropout, DROPOUT) and ordinary(output, residual):
        p = dropout.p if dropout.training else 0.0
        return F.residual_add(output, residual, dropout_p=p, seed=seed, stream=stream)
    return residual + dropout(output)


def attend(
    attention: nn.Module,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    names: dict[str, str],
    **ours: Any,
) -> Tensor:
    """The output of an attention sub-layer; ours are arguments that torch.nn's does not know, left out where None.

    names: what the attention's arguments are called in the layer, for its errors.
    """
    try:
        return attention(
            query,
            key,
            key,
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            need_weights=False,
            is_causal=is_causal,
            **{name: value for name, value in ours.items() if value is not None},
        )[0]
    except (ArgumentError, ArgumentTypeError) as error:
        raise renamed(error, names) from None


def check_input(attention: Any, name: str, tensor: Tensor) -> None:
    """Raises unless tensor fits the layer of attention; one of another class looks for itself."""
    if isinstance(attention, MultiheadAttention):
        weight = attention.in_proj_weight
        if ordinary(tensor, weight) and weight is not None:
            check_tensor(name, tensor, attention.embed_dim, "d_model", weight)
