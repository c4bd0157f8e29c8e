"""Stacks of layers, one after the other, and layers that are prepared once.

A stack of layers that are no more than their classes computes their sub-layers one after the other; a wrapped, hooked,
sharded or derived layer is called and not opened. Plain layers are prepared: each is a node of autograd, whose plan all
batches of a signature share. Whether anything has changed since, a hook, an exchanged module, a parameter's memory, is
asked in a few calls a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint

from fasttfm.cpu.linear import on_this_thread
from fasttfm.functional import backends
from fasttfm.functional.onlookers import looked_at
from fasttfm.functional.operator import on_forget
from fasttfm.functional.plan import without_autocast
from fasttfm.functional.subclasses import PLAIN_TENSORS
from fasttfm.kernels import choices
from fasttfm.models.cache import DecoderCache
from fasttfm.models.layer_plan import NODE, PER_SUBLAYER, Batch, LayerPlan, Settings
from fasttfm.models.layers import DecoderLayer
from fasttfm.models.packing import Packing
from fasttfm.models.plain import (
    LAYER,
    NORM,
    Snapshot,
    attentions_of,
    fused_activation,
    norms_behind,
    plain_width,
    untouched,
)
from fasttfm.models.residual import SITES_PER_LAYER, LayerSeed, normalise, probability, through

MOST_PLANS = 1024
"""Batches of ever new lengths have ever new signatures."""
_plans: dict[tuple, LayerPlan] = {}
on_forget(_plans.clear)
_numbers: dict[tuple, int] = {}
"""Of kinds of layers: settings, and shapes, strides and alignment of parameters."""
_OTHERS = PLAIN_TENSORS | {Packing, type(None)}
"""Classes of seeds and lengths; the operators refuse others."""
_ALIGNED = 8
"""Numbers of half precision in 16 bytes, which kernels load at once."""


def may_run() -> bool:
    """Return whether layers may be computed as nodes now: nobody looks on, no search keeps what it made of weights."""
    return on_this_thread.kept is None and not (_has_any_global_hook() or looked_at())


class PreparedStack:
    """Layers that are no more than their classes, and the norm behind them."""

    def __init__(self, layers: Sequence[Any], norm: Any) -> None:
        self._layers, self._norm = [*layers], norm
        norms = [*map(norms_behind, layers, [*(each.norm1 for each in layers[1:]), norm])]
        last = len(layers) - 1
        self._settings = [_settings(*each, is_last=n == last) for n, each in enumerate(zip(layers, norms))]
        self._parameters = parameters = [_parameters(*each) for each in zip(layers, norms)]
        self.drops = any(p > 0.0 for each in self._settings for p in each.dropout_p)
        """Whether any dropout drops."""
        modules = chain.from_iterable(each.modules() for each in (*layers, norm) if each is not None)
        self._snapshot = Snapshot(dict.fromkeys(modules))
        given = [p for each in parameters for p in each if p is not None]
        self._dtype, self._device = given[0].dtype, given[0].device
        kinds = zip(self._settings, (tuple(map(_kind, each)) for each in parameters))
        self._kinds = [_numbers.setdefault(kind, len(_numbers)) for kind in kinds]
        self._weights = [[p for i, p in enumerate(each) if i % PER_SUBLAYER < 4] for each in parameters]
        sources = {id(p): p for p in chain.from_iterable(self._weights) if p is not None}
        self._sources, places = [*sources.values()], {key: place for place, key in enumerate(sources)}
        self._places = [[None if p is None else places[id(p)] for p in each] for each in self._weights]
        self._total = sum(p.numel() for p in self._sources)
        self._is_even = all(p.numel() % _ALIGNED == 0 for p in self._sources)

    def holds(self, layers: Sequence[Any], norm: Any) -> bool:
        """Return whether these are the layers and the norm, and all is as it was."""
        return norm is self._norm and self._layers == [*layers] and self._snapshot.unchanged()

    def run(
        self, x: Tensor, batch: Batch, dtype: torch.dtype, *, causal: tuple[bool, ...] | None = None,
        first_site: int = 0, checkpointed: bool = False,
    ) -> Tensor:  # fmt: skip
        """x (B, L, d) through all layers to the same.

        dtype: as dtype_of_products() tells; causal: of each attention, in place of the settings'.
        """
        x, memory = _laid_out(x), batch.memory
        batch = batch._replace(memory=None if memory is None else _laid_out(memory).to(dtype))
        kept = batch._replace(memory=None)  # which autograd keeps
        recorded = torch.is_grad_enabled()
        signature = causal, *_signature(x, batch, dtype, recorded)
        with without_autocast(x.device.type):
            weights = self._weights_in(dtype)
            y, pre_norm = x, self._settings[0].norm_first
            if pre_norm:
                y = normalise(x, self._layers[0].norm1)
            for number, (kind, parameters) in enumerate(zip(self._kinds, self._parameters)):
                key = kind, y.dtype, x.dtype, signature
                plan = _plans.get(key)
                if plan is None:
                    if len(_plans) >= MOST_PLANS:
                        _plans.clear()
                    settings = self._settings[number]
                    settings = settings if causal is None else settings._replace(causal=causal)
                    plan = _plans[key] = LayerPlan(settings, x, dtype, self._dtype)
                seed = LayerSeed(batch.seed, first_site + SITES_PER_LAYER * number)
                if not recorded:
                    y, x = plan.forward(y, x, parameters, weights[number], seed, batch, None)
                    continue
                given = plan, weights[number], seed, kept, y, x if pre_norm else None, batch.memory, *parameters
                if checkpointed:  # dropouts are drawn from the seed
                    found = checkpoint(NODE, *given, use_reentrant=False, preserve_rng_state=False)
                else:
                    found = NODE(*given)
                y, x = found if plan.hands_on else (found, found)
        return y

    def dtype_of_products(self, x: Tensor, batch: Batch) -> torch.dtype | None:
        """The dtype of the products; None for tensors that no plan is made for."""
        autocast = torch.is_autocast_enabled(self._device.type)
        dtype = torch.get_autocast_dtype(self._device.type) if autocast else self._dtype
        if autocast and self._dtype is not torch.float32:
            return None
        if not _OTHERS.issuperset(map(type, (batch.seed, batch.lengths, batch.memory_lengths))):
            return None
        for each in (x,) if batch.memory is None else (x, batch.memory):
            if not (type(each) in PLAIN_TENSORS and each.device == self._device and each.numel()):
                return None
            if not (each.dtype is dtype or (autocast and each.dtype is torch.float32)):
                return None
        for mask in batch.masks:
            if mask is not None and (type(mask) not in PLAIN_TENSORS or mask.requires_grad):
                return None
        return None if x.is_cuda and x.get_device() != torch.cuda.current_device() else dtype

    def _weights_in(self, dtype: torch.dtype) -> list[list[Any]]:
        """Weights and biases of each layer's products: parameters, or copies in another dtype, made in one launch."""
        if dtype is self._dtype:
            return self._weights
        sources = self._sources
        with torch.no_grad():
            if self._is_even:
                memory = sources[0].new_empty(self._total, dtype=dtype)
                copies = _unflatten_dense_tensors(memory, sources)
            else:
                copies = [torch.empty_like(p, dtype=dtype) for p in sources]
            torch._foreach_copy_(copies, sources)
        return [[None if place is None else copies[place] for place in each] for each in self._places]


def without_prepared(module: nn.Module) -> dict[str, Any]:
    """Its __getstate__: what was prepared of a module does not go with it."""
    return {name: value for name, value in vars(module).items() if name != "_prepared"}


def prepared_for(owner: Any, layers: list[Any], norm: Any = None) -> PreparedStack | None:
    """The layers of a module, or itself, and the norm behind them, prepared; None where one is more than its class."""
    held = owner.__dict__.get("_prepared")
    if held is None:  # before the layers are looked at: one may be the owner, of which this is an attribute
        owner._prepared = held = [None]
    if held[0] is None or not held[0].holds(layers, norm):
        held[0] = PreparedStack(layers, norm) if _is_plain(layers, norm) else None
    return held[0]


def _is_plain(layers: list[Any], norm: Any) -> bool:
    """Return whether all layers are no more than their classes, of one kind, and their parameters of one dtype and on
    one device."""
    if not layers or not all(plain_width(layer) and fused_activation(layer.activation) for layer in layers):
        return False
    orders = {(layer.norm_first, a.batch_first) for layer in layers for a in attentions_of(layer)}
    if len(orders) > 1 or not (norm is None or (layers[0].norm_first and untouched(norm, NORM))):
        return False
    modules = [*chain.from_iterable(each.modules() for each in (*layers, norm) if each is not None)]
    given = {(p.dtype, p.device) for each in modules for p in each._parameters.values() if p is not None}
    if len(given) != 1 or next(iter(given))[1].type not in ("cpu", "cuda"):
        return False
    return not any(each._buffers for each in modules)


def _settings(layer: Any, norms: list[Any], *, is_last: bool) -> Settings:
    attentions = attentions_of(layer)
    return Settings(
        layer.norm_first, fused_activation(layer.activation) or "", tuple([each.num_heads for each in attentions]),
        (layer.causal, False), tuple(map(probability, layer.dropouts())),
        tuple([None if norm is None else norm.eps for norm in norms]), is_last, attentions[0].batch_first,
    )  # fmt: skip


def _parameters(layer: Any, norms: list[Any]) -> list[Any]:
    """A layer's parameters, and those of the norms behind its sub-layers, in the order that its plan takes them."""
    products = [(a.in_proj_weight, a.in_proj_bias, a.out_proj.weight, a.out_proj.bias) for a in attentions_of(layer)]
    products.append((layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias))
    of_norms = [(None, None) if norm is None else (norm.weight, norm.bias) for norm in norms]
    return [*chain.from_iterable((*each, *norm) for each, norm in zip(products, of_norms, strict=True))]


def _kind(x: Tensor | None) -> tuple | None:
    """All of a tensor that a plan depends on."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)


def _laid_out(x: Tensor) -> Tensor:
    """x, contiguous and aligned."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _signature(x: Tensor, batch: Batch, dtype: torch.dtype, recorded: bool) -> tuple:
    """All that a plan depends on besides its layer, and the dtypes that it is given."""
    key: list[Any] = [x.shape, x.device, dtype, recorded, _kind(batch.seed), backends.current, choices.version]
    if batch.memory is not None:
        key.append(batch.memory.shape)
    for lengths in (batch.lengths, batch.memory_lengths):
        if isinstance(lengths, Packing):
            key += lengths.longest, lengths.batch, lengths.tokens, *_kind(lengths.starts)  # type: ignore[misc]
        else:
            key.append(_kind(lengths))
    key += map(_kind, batch.masks)
    if x.is_cuda and dtype is torch.float32:
        key.append(torch.backends.cuda.matmul.fp32_precision)
    return tuple(key)


class Stack(nn.Module):
    """Layers, one after the other, and for pre-norm the norm after the last of them."""

    stands_for = "stack"

    def __init__(
        self, layers: list[Any], norm: nn.LayerNorm | nn.RMSNorm | None = None, *, first_site: int = SITES_PER_LAYER
    ) -> None:
        """layers: of this module, or with their forward's signature; one may occur several times and is then shared.

        first_site: of the dropouts of the first layer; a model's own come before it.
        """
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)
        self.norm = norm
        self.first_site = first_site
        self.checkpoint_activations = False
        """Whether a layer keeps nothing but what it is given and is computed again in the backward pass."""

    __getstate__ = without_prepared

    @property
    def sites(self) -> int:
        """Return the first of the sites that come after."""
        return self.first_site + SITES_PER_LAYER * len(self.layers)

    def forward(self, x: Tensor, *inputs: Any, seed: Tensor | None = None, cache: DecoderCache | None = None) -> Tensor:
        """x (B, L, d) to the same; inputs: what the layers take besides. seed (1,) int64 of all dropouts, or None."""
        layers, norm, again = [*self.layers], self.norm, self.checkpoint_activations and torch.is_grad_enabled()
        decodes = bool(layers) and isinstance(layers[0], DecoderLayer)
        lengths = [*inputs[decodes:], None, None][:2]
        if cache is None and may_run() and (prepared := prepared_for(self, layers, norm)) is not None:
            memory = inputs[0] if decodes and inputs else None
            if len(inputs) <= 1 + 2 * decodes and decodes == (memory is not None):  # else the layers look at them
                batch = Batch(seed, lengths[0], memory, lengths[1])
                if (dtype := prepared.dtype_of_products(x, batch)) is not None:
                    return prepared.run(x, batch, dtype, first_site=self.first_site, checkpointed=again)
        if isinstance(cache, DecoderCache) and layers and lengths[0] is seed is None:
            y = cache.step(x, None, layers, norm, lengths[1], lambda: all(map(plain_width, layers)))
            if y is not None:
                return y
        given: list[dict[str, Any]] = [
            {"seed": LayerSeed(seed, self.first_site + SITES_PER_LAYER * number)} for number in range(len(layers))
        ]
        if cache is not None:
            given = [{**each, "cache": cache.layer(number)} for number, each in enumerate(given)]
        ours = [untouched(layer, LAYER) for layer in layers]
        if all(ours) and not again and layers and len({layer.norm_first for layer in layers}) == 1:
            sublayers = [part for layer, each in zip(layers, given) for part in layer.sublayers(*inputs, **each)]
            pre_norm = layers[0].norm_first
            x = through(x, sublayers, pre_norm, norm if pre_norm else None)
            return x if pre_norm or norm is None else normalise(x, norm)
        for layer, plain, each in zip(layers, ours, given):
            if again and cache is None:
                # our dropouts are drawn from the seed; those of another layer from torch's generator
                x = checkpoint(layer, x, *inputs, use_reentrant=False, preserve_rng_state=not plain, **each)
            else:
                x = layer(x, *inputs, **each)
        return x if norm is None else normalise(x, norm)
