"""Base of encoder and decoder layers: maps torch.nn's arguments to the layers of fasttfm.models."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.activation import MultiheadAttention as TorchAttention
from torch.nn.modules.normalization import LayerNorm as TorchNorm

from fasttfm.cpu.linear import linear
from fasttfm.errors import ArgumentError, ArgumentTypeError
from fasttfm.functional import backends, draw_seed
from fasttfm.functional.signature import checks_arguments, renamed
from fasttfm.functional.subclasses import PLAIN_TENSORS, ordinary
from fasttfm.models import layers
from fasttfm.models.cache import AttentionCache
from fasttfm.models.layer_plan import Batch
from fasttfm.models.packing import Packing
from fasttfm.models.plain import attentions_of, children, untouched
from fasttfm.models.residual import WEIGHT_SITES, LayerSeed, through
from fasttfm.models.stack import may_run, prepared_for, without_prepared
from fasttfm.nn import masks
from fasttfm.nn.attention import MultiheadAttention
from fasttfm.nn.errors import check_layer, check_tensor, refuse_scripting
from fasttfm.nn.modules import LayerNorm, activation_function

Packings = tuple[Packing | None, Packing | None]
_ATTENTION = frozenset({MultiheadAttention})


class Attends(NamedTuple):
    """Arguments of one attention of a layer."""

    keys: Tensor | None
    """Keys and values; None: self-attention."""
    attn_mask: Tensor | None
    key_padding_mask: Tensor | None
    is_causal: bool
    names: dict[str, str]
    """For errors: the layer's name of each attention argument."""
    cache: AttentionCache | None = None


class Layer(layers.Layer):
    """Base of both layers, before torch.nn's class in the MRO."""

    @checks_arguments
    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = nn.functional.relu, layer_norm_eps: float = 1e-5,
        batch_first: bool = False, norm_first: bool = False, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        check_layer(d_model, nhead, dim_feedforward, dropout, layer_norm_eps)
        activation = activation_function(activation)
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device,
            dtype,
        )  # fmt: skip
        _adopt(self)

    __prepare_scriptable__ = refuse_scripting

    __getstate__ = without_prepared

    def dropouts(self: Any) -> list[Any]:
        """See models.layers.Layer."""
        modules = children(self, "dropout", "dropout1", "dropout2", "dropout3")
        attention_p = [getattr(a, "dropout", 0.0) if a.training else 0.0 for a in attentions_of(self)]
        return [*attention_p, *modules]

    def _compute(self, x: Tensor, args: Sequence[Attends], packings: Packings) -> Tensor:
        """The layer's output for x; args: of each attention; packings: of x and the memory."""
        attentions = attentions_of(self)
        for attention, each in zip(attentions, args):
            _check_input(attention, each.names["key"], x if each.keys is None else each.keys)
        output = self._as_node(x, attentions, args, packings) if args[0].cache is None else None
        if output is not None:
            return output
        drops = any(map(_drops, (*attentions, *self.dropouts()[len(attentions) :])))
        seed = LayerSeed(draw_seed(x.device) if drops else None)
        attends = [
            partial(_attend, attention, each, seed.seed, site, packings)
            for attention, each, site in zip(attentions, args, WEIGHT_SITES)
        ]
        return through(x, self.with_network(attends, seed), self.norm_first)

    def _as_node(self, x: Tensor, attentions: list[Any], args: Sequence[Attends], packings: Packings) -> Tensor | None:
        """_compute() as one autograd node, or None unless kernels compute and the layer is plain.

        Raises for masks of a wrong shape, dtype or device.
        """
        packed = packings[0] is not None
        if type(x) not in PLAIN_TENSORS or x.dim() != 3 - packed or not may_run():
            return None
        stack = prepared_for(self, [self]) if backends.kernel_route(backends.current, x) == "triton" else None
        if stack is None:
            return None
        memory, merged = args[-1].keys, []
        for attention, (keys, mask, padding, causal, names, _) in zip(attentions, args):
            if packed and (padding is not None or (mask is not None and not causal)):
                return None  # the attention raises
            keys = x if keys is None else keys
            if not packed:
                try:
                    attention.check(x, keys, keys, padding, mask, None)
                except (ArgumentError, ArgumentTypeError) as error:
                    raise renamed(error, names) from None
            merged.append(masks.merged(None if causal else mask, padding, attention.num_heads))
        if packed:
            x, memory = x[None], None if memory is None else memory[None]
        batch = Batch(None, packings[0], memory, packings[1], (merged[0], None if memory is None else merged[-1]))
        dtype = stack.dtype_of_products(x, batch)
        if dtype is None:
            return None
        if stack.drops:  # drawn last: the fallback draws its own
            batch = batch._replace(seed=draw_seed(x.device))
        y = stack.run(x, batch, dtype, causal=tuple([bool(each.is_causal) for each in args]))
        return y[0] if packed else y


def _adopt(layer: nn.Module) -> None:
    """Convert the attentions and norms that torch.nn's constructor built to our classes, keeping their parameters.

    Compares with torch's own classes, because the names in torch.nn may be patched.
    """
    for child in layer.children():
        if type(child) is TorchAttention:
            child.__class__ = MultiheadAttention
        elif type(child) is TorchNorm:
            child.__class__ = LayerNorm


def overrides(layer: Any, torch_class: type, **extensions: Any) -> bool:
    """Return whether a block of torch_class's forward is overridden, by a derived class or on the object.

    Raises ArgumentError if so and an extension, which torch.nn's forward does not have, is not None.
    """
    blocks, kind = ("_sa_block", "_mha_block", "_ff_block"), type(layer)
    changed = [b for b in blocks if getattr(kind, b, None) is not getattr(torch_class, b, None) or b in layer.__dict__]
    if changed and (names := [name for name, value in extensions.items() if value is not None]):
        raise ArgumentError(f"{names[0]} does not go with an overridden {changed[0]}: override forward, or omit it")
    return bool(changed)


def argument_names(queries: str, keys: str) -> dict[str, str]:
    """Map the names of an attention's arguments to those of a layer with inputs `queries` and `keys`."""
    masks = {"attn_mask": f"{keys}_mask", "key_padding_mask": f"{keys}_key_padding_mask"}
    return {"query": queries, "key": keys, "value": keys, **masks}


def _drops(module: Any) -> bool:
    """Return whether a dropout, or a fused attention, needs a seed."""
    if not module.training:
        return False
    if isinstance(module, MultiheadAttention):
        return module.dropout > 0.0 and untouched(module, _ATTENTION)
    return getattr(module, "p", 0.0) > 0.0


def _attend(attention: Any, args: Attends, seed: Tensor | None, site: int, packings: Packings, y: Tensor) -> Tensor:
    """The output of an attention sub-layer for y; extensions to torch.nn's arguments are passed only if not None."""
    keys, attn_mask, padding, causal, names, cache = args
    packing, key_packing = packings
    extensions = {"cache": cache, "packing": packing, "key_packing": None if keys is None else key_packing}
    options: dict[str, Any] = {
        "attn_mask": attn_mask, "key_padding_mask": padding, "need_weights": False, "is_causal": causal,
        **{name: value for name, value in extensions.items() if value is not None},
    }  # fmt: skip
    keys = y if keys is None else keys
    try:
        if untouched(attention, _ATTENTION) and attention.takes(y, keys, keys):
            heads, _ = attention.joined_heads(y, keys, keys, seed=seed, site=int(site), **options)
            # as in torch.nn, out_proj is not called: its attention reads the parameters
            return linear(heads, attention.out_proj.weight, attention.out_proj.bias)
        return attention(y, keys, keys, **options)[0]
    except (ArgumentError, ArgumentTypeError) as error:
        raise renamed(error, names) from None


def _check_input(attention: Any, name: str, tensor: Tensor) -> None:
    """Raise unless tensor fits attention; attentions of other classes check their own inputs."""
    if isinstance(attention, MultiheadAttention):
        weight = attention.in_proj_weight
        if ordinary(tensor, weight) and weight is not None:
            check_tensor(name, tensor, attention.embed_dim, "d_model", weight)
