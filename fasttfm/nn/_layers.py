"""Base of encoder and decoder layers of torch.nn's interface: from its arguments to the blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.activation import MultiheadAttention as TorchAttention
from torch.nn.modules.normalization import LayerNorm as TorchNorm

from fasttfm.cpu.linear import linear
from fasttfm.errors import ArgumentError, ArgumentTypeError
from fasttfm.functional import draw_seed
from fasttfm.functional.signature import checks_arguments, renamed
from fasttfm.functional.subclasses import ordinary
from fasttfm.models.dropout import Site, dropout_of
from fasttfm.models.feed_forward import feed_forward
from fasttfm.models.plain import untouched
from fasttfm.models.residual import SubLayer
from fasttfm.nn.attention import MultiheadAttention
from fasttfm.nn.errors import check_layer, check_tensor, refuse_scripting
from fasttfm.nn.feed_forward import activation_function
from fasttfm.nn.layer_node import ATTENTIONS
from fasttfm.nn.norms import LayerNorm


class Layer(nn.Module):
    """Base of both kinds of layers; torch.nn's class follows it among the bases."""

    @checks_arguments
    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = nn.functional.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_layer(d_model, nhead, dim_feedforward, dropout)
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation_function(activation),
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )
        _adopt(self)

    __prepare_scriptable__ = refuse_scripting

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_prepared"}

    def _network(self: Any, norm: nn.Module, dropout: nn.Module, seed: Tensor | None) -> SubLayer:
        """The feed-forward network; norm and dropout: its own."""
        network = partial(
            feed_forward, linear1=self.linear1, activation=self.activation, linear2=self.linear2,
            dropout=dropout_of(self.dropout, seed, Site.HIDDEN),
        )  # fmt: skip
        return SubLayer(network, norm, dropout_of(dropout, seed, Site.FEED_FORWARD))


def _adopt(layer: nn.Module) -> None:
    """Makes the attentions and norms that torch.nn's constructor built in layer ours, parameters and all.

    They are known by torch's own classes, also where the names in torch.nn have been given to others.
    """
    for child in layer.children():
        if type(child) is TorchAttention:
            child.__class__ = MultiheadAttention
        elif type(child) is TorchNorm:
            child.__class__ = LayerNorm


def seed_for(device: torch.device, dropouts: tuple[nn.Module, ...], attentions: tuple[nn.Module, ...]) -> Tensor | None:
    """One seed for all dropouts of a layer, whose sites tell them apart; None where none of them drops."""
    active = any(d.training and getattr(d, "p", 0.0) > 0.0 for d in dropouts)
    active = active or any(a.training and getattr(a, "dropout", 0.0) > 0.0 and _opens(a) for a in attentions)
    return draw_seed(device) if active else None


def overrides(layer: Any, theirs: type, **given: Any) -> bool:
    """Return whether a block of torch.nn's forward is not that of `theirs`, torch.nn's class: in a derived class, or
    set on the object. Raises ArgumentError where something is given, not None, that torch.nn's forward does not know.
    """
    blocks, kind = ("_sa_block", "_mha_block", "_ff_block"), type(layer)
    changed = [b for b in blocks if getattr(kind, b, None) is not getattr(theirs, b, None) or b in layer.__dict__]
    if changed and (names := [name for name, value in given.items() if value is not None]):
        raise ArgumentError(
            f"{names[0]} does not go with an overridden {changed[0]}: override forward, or leave it out"
        )
    return bool(changed)


def _opens(attention: nn.Module) -> bool:
    """Return whether a layer may compute attention without calling it, its output projection apart."""
    return untouched(attention, ATTENTIONS)


def argument_names(queries: str, keys: str) -> dict[str, str]:
    """Return the names of an attention's arguments in a layer whose own are `queries` and `keys`."""
    masks = {"attn_mask": f"{keys}_mask", "key_padding_mask": f"{keys}_key_padding_mask"}
    return {"query": queries, "key": keys, "value": keys, **masks}


def attend(
    attention: Any,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    names: dict[str, str],
    *,
    seed: Tensor | None,
    site: int,
    **extensions: Any,
) -> Tensor:
    """The output of an attention sub-layer.

    names: what the attention's arguments are called in the layer, for its errors. extensions: arguments that
    torch.nn's attention does not know, left out where None.
    """
    options: dict[str, Any] = {
        "attn_mask": attn_mask,
        "key_padding_mask": key_padding_mask,
        "need_weights": False,
        "is_causal": is_causal,
        **{name: value for name, value in extensions.items() if value is not None},
    }
    try:
        if _opens(attention) and attention.takes(query, key, key):
            heads, _ = attention.joined_heads(query, key, key, seed=seed, site=int(site), **options)
            # As torch.nn does: its attention reads the projection's parameters and never calls the module.
            return linear(heads, attention.out_proj.weight, attention.out_proj.bias)
        return attention(query, key, key, **options)[0]
    except (ArgumentError, ArgumentTypeError) as error:
        raise renamed(error, names) from None


def check_input(attention: Any, name: str, tensor: Tensor) -> None:
    """Raises unless tensor fits the layer of attention; one of another class looks for itself."""
    if isinstance(attention, MultiheadAttention):
        weight = attention.in_proj_weight
        if ordinary(tensor, weight) and weight is not None:
            check_tensor(name, tensor, attention.embed_dim, "d_model", weight)
