"""Stacks of layers, and their execution as one autograd node.

A stack of plain layers (exact classes, no hooks) is prepared once and runs as a single autograd node, whose plans are
cached by input signature. One launch per stack casts the weights, one sums and one casts the gradients of biases and
norms; with kernels, one product computes the keys and values of all layers over the memory, and one their gradients. If
ranks exchange gradients, each layer is a node, so that the exchange overlaps with the backward pass. A few calls per
pass detect changes since preparation: hooks, replaced modules, reallocated parameters.

A layer that is wrapped, hooked, sharded or of a derived class is called as a module.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnF
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint

from fasttfm.cpu.linear import on_this_thread
from fasttfm.functional import backends
from fasttfm.functional.derivative import apply_of, as_saved, dense
from fasttfm.functional.onlookers import looked_at, saved_hook
from fasttfm.functional.operator import other_plans
from fasttfm.functional.plan import without_autocast
from fasttfm.functional.subclasses import PLAIN_TENSORS
from fasttfm.kernels import choices
from fasttfm.models.cache import DecoderCache
from fasttfm.models.layer_plan import PER_SUBLAYER, Batch, LayerPlan, Stash, parameters_of, settings_of
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
from fasttfm.models.residual import SITES_PER_LAYER, LayerSeed, normalise, through
from fasttfm.models.stack_weights import MemoryWeights, StackWeights, in_parameter_dtype

MOST_PLANS = 1024
"""Signatures in the cache, which is cleared beyond: lengths of batches may never repeat."""
_plans: dict[tuple, list[LayerPlan]] = {}
other_plans.append(_plans)
_numbers: dict[tuple, int] = {}
"""By settings of a layer, and shapes, strides and alignment of its parameters."""
_unused_numbers = itertools.count()  # not len(_numbers), which two threads may read at once
_OTHERS = PLAIN_TENSORS | {Packing, type(None)}
"""Allowed classes of seeds and lengths; the operators raise for others."""
_has_storage = torch._C._has_storage  # batched gradients of torch.vmap and is_grads_batched have none


def may_run() -> bool:
    """Return whether layers may run as nodes: no tracing, modes or global hooks, no search with cached weights."""
    return on_this_thread.kept is None and not (_has_any_global_hook() or looked_at())


class PreparedStack:
    """Plain layers and the norm behind them, ready to run as autograd nodes."""

    def __init__(self, layers: Sequence[Any], norm: Any) -> None:
        self._layers, self._norm = [*layers], norm
        norms = [*map(norms_behind, layers, [*(each.norm1 for each in layers[1:]), norm])]
        last = len(layers) - 1
        self._settings = [settings_of(*each, is_last=n == last) for n, each in enumerate(zip(layers, norms))]
        parameters = [parameters_of(*each) for each in zip(layers, norms)]
        self._parameters = [*chain.from_iterable(parameters)]
        self.drops = any(p > 0.0 for each in self._settings for p in each.dropout_p)
        """Whether any dropout probability is above 0."""
        self._snapshot = Snapshot(dict.fromkeys(_modules(layers, norm)))
        first = next(p for p in self._parameters if p is not None)
        self._dtype, self._device = first.dtype, first.device
        kinds = zip(self._settings, (tuple(map(_kind, each)) for each in parameters))
        self._kinds = tuple([_numbers.setdefault(kind, next(_unused_numbers)) for kind in kinds])
        products = [[p for i, p in enumerate(each) if i % PER_SUBLAYER < 4] for each in parameters]
        self._weights = StackWeights(products, is_decoder=len(attentions_of(layers[0])) == 2)

    def is_current(self, layers: Sequence[Any], norm: Any) -> bool:
        """Return whether layers and norm are these, and unchanged."""
        return norm is self._norm and self._layers == [*layers] and self._snapshot.unchanged()

    def run(
        self, x: Tensor, batch: Batch, dtype: torch.dtype, *, causal: tuple[bool, ...] | None = None,
        first_site: int = 0, checkpointed: bool = False,
    ) -> Tensor:  # fmt: skip
        """The output (B, L, d) of all layers for x (B, L, d).

        dtype: from dtype_of_products(); causal: overrides the settings, per attention.
        """
        x, memory = _aligned(x), batch.memory
        batch = batch._replace(memory=None if memory is None else _aligned(memory).to(dtype))
        needs_grad, count, pre_norm = torch.is_grad_enabled(), len(self._layers), self._settings[0].norm_first
        step = 1 if count > 1 and needs_grad and _ranks_exchange() else count
        joined = bool(self._weights.over_memory) and needs_grad and step == count and not checkpointed  # costs memory
        joined = joined and saved_hook(False) is None  # a hook may return slices contiguous
        key = self._kinds, causal, joined, *_signature(x, batch, dtype, needs_grad)
        plans = _plans.get(key)
        if plans is None:
            if len(_plans) >= MOST_PLANS:
                _plans.clear()
            plans = _plans[key] = self._planned(x, dtype, causal, seeded=batch.seed is not None)
        shared = batch if memory is None else batch._replace(memory=None)
        with without_autocast(x.device.type):
            weights, memory_weights = self._weights.in_dtype(dtype, joined=joined and plans[0].has_kernels)
            y = normalise(x, self._layers[0].norm1) if pre_norm else x
            if not needs_grad:
                layers = _Layers(plans, first_site, shared, checkpointed)
                return layers.forward(y, x, batch.memory, weights, self._parameters)[0]
            for first in range(0, count, step):
                part, stream, size = slice(first, first + step), x if pre_norm else None, plans[0].size
                layers = _Layers(plans[part], first_site + SITES_PER_LAYER * first, shared, checkpointed)
                parameters = self._parameters[first * size : (first + step) * size]
                outputs = NODE(layers, weights[part], memory_weights, y, stream, batch.memory, *parameters)
                y, x = outputs if plans[first + step - 1].returns_stream else (outputs, outputs)
        return y

    def _planned(
        self, x: Tensor, dtype: torch.dtype, causal: tuple[bool, ...] | None, *, seeded: bool
    ) -> list[LayerPlan]:
        """A plan per layer, shared by layers of a kind, except the first: its input may have another dtype."""
        plans: dict[tuple, LayerPlan] = {}
        for number, (kind, settings) in enumerate(zip(self._kinds, self._settings)):
            if (kind, number == 0) not in plans:
                settings = settings if causal is None else settings._replace(causal=causal)
                plans[kind, number == 0] = LayerPlan(settings, x, dtype, self._dtype, seeded=seeded)
        return [plans[kind, number == 0] for number, kind in enumerate(self._kinds)]

    def dtype_of_products(self, x: Tensor, batch: Batch) -> torch.dtype | None:
        """The dtype of matrix products, or None if the inputs cannot be planned."""
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


def _ranks_exchange() -> bool:
    """Return whether there are other ranks, which exchange gradients during the backward pass."""
    ranks = torch.distributed
    return ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1


def without_prepared(module: nn.Module) -> dict[str, Any]:
    """Return the state to pickle or copy: without what prepared_for() cached."""
    return {name: value for name, value in vars(module).items() if name != "_prepared"}


def prepared_for(owner: Any, layers: list[Any], norm: Any = None) -> PreparedStack | None:
    """The prepared layers and norm, cached on their owner; None unless all are plain."""
    cache = owner.__dict__.get("_prepared")
    if cache is None:  # set before the snapshot of the layers, one of which may be the owner
        owner._prepared = cache = [None]
    if cache[0] is None or not cache[0].is_current(layers, norm):
        cache[0] = PreparedStack(layers, norm) if _is_plain(layers, norm) else None
    return cache[0]


def _modules(layers: Sequence[Any], norm: Any) -> list[nn.Module]:
    return [*chain.from_iterable(each.modules() for each in (*layers, norm) if each is not None)]


def _is_plain(layers: list[Any], norm: Any) -> bool:
    """Return whether all layers are plain, alike in order and layout, and on one device in one dtype."""
    if not layers or not all(plain_width(layer) and fused_activation(layer.activation) for layer in layers):
        return False
    orders = {(layer.norm_first, a.batch_first) for layer in layers for a in attentions_of(layer)}
    if len(orders) > 1 or not (norm is None or (layers[0].norm_first and untouched(norm, NORM))):
        return False
    modules = _modules(layers, norm)
    kinds = {(p.dtype, p.device) for each in modules for p in each._parameters.values() if p is not None}
    if len(kinds) != 1 or next(iter(kinds))[1].type not in ("cpu", "cuda"):
        return False
    return not any(each._buffers for each in modules)


def _kind(x: Tensor | None) -> tuple | None:
    """Everything about a tensor that a plan depends on."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)


def _aligned(x: Tensor) -> Tensor:
    """x, contiguous and aligned to 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _signature(x: Tensor, batch: Batch, dtype: torch.dtype, needs_grad: bool) -> tuple:
    """Everything that a plan depends on besides the layer."""
    key: list[Any] = [x.shape, x.dtype, x.device, dtype, needs_grad, _kind(batch.seed)]
    key += backends.current, choices.version
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


class _Layers:
    """Consecutive layers of a stack, for one batch."""

    def __init__(self, plans: Sequence[LayerPlan], site: int, batch: Batch, checkpointed: bool) -> None:
        """site: of the first dropout; batch: without the memory, which autograd saves; checkpointed: save the inputs of
        layers only, and recompute in the backward pass."""
        self.plans, self._site, self._batch, self._checkpointed = plans, site, batch, checkpointed
        self._size = plans[0].size

    def _seed(self, number: int) -> LayerSeed:
        return LayerSeed(self._batch.seed, self._site + SITES_PER_LAYER * number)

    def _own(self, number: int, parameters: Sequence[Any]) -> Sequence[Any]:
        return parameters[number * self._size : (number + 1) * self._size]

    def forward(
        self, y: Tensor, x: Tensor, memory: Tensor | None, weights: Sequence[Any], parameters: Sequence[Any],
        stash: Stash | None = None, lowest: int = 0, keys_values: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """y and x behind the layers; layers from the lowest on save for the backward pass in stash; keys_values: those
        of the memory, per layer."""
        batch = self._batch if memory is None else self._batch._replace(memory=memory)
        for number, plan in enumerate(self.plans):
            saves = None if number < lowest else stash
            if saves is not None and self._checkpointed:
                saves.push(y, x)
                saves = None
            own = None if keys_values is None else keys_values[number]
            args = self._own(number, parameters), weights[number], self._seed(number)
            y, x = plan.forward(y, x, *args, batch, saves, own)
        return y, x

    def backward(
        self, dy: Tensor, ds: Tensor | None, memory: Tensor | None, weights: Sequence[Any], parameters: Sequence[Any],
        needs_grad: Sequence[bool], stash: Stash, lowest: int, d_joint: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[Any]]:  # fmt: skip
        """Gradients of the lowest layer's y and x, of the memory and of all parameters."""
        d_memory: Tensor | None = None
        gradients: list[Any] = []
        for number in range(len(self.plans) - 1, lowest - 1, -1):
            plan, saved = self.plans[number], stash
            own_weights = weights[number * plan.products : (number + 1) * plan.products]
            if self._checkpointed:
                x, y, saved = stash.pop(), stash.pop(), Stash()
                args = self._own(number, parameters), own_weights, self._seed(number)
                plan.forward(y, x, *args, self._batch._replace(memory=memory), saved)
            d_own = None if d_joint is None else d_joint.select(-2, number)
            own_needs = self._own(number, needs_grad)
            dy, ds, d_memory_part, own = plan.backward(dy, ds, own_weights, own_needs, saved, memory, d_own)
            gradients = [*own, *gradients]
            if d_memory_part is not None:
                d_memory = d_memory_part if d_memory is None else d_memory.add_(d_memory_part)
            if number > lowest and not plan.settings.norm_first:
                dy, ds = dy if ds is None else ds + dy, None
        return dy, ds, d_memory, [*[None] * (lowest * self._size), *gradients]

    def by_operators(self, y: Tensor, x: Tensor, memory: Tensor | None, parameters: Sequence[Any]) -> tuple:
        """forward() in operators that autograd differentiates, any number of times."""
        batch = self._batch._replace(memory=memory)
        for number, plan in enumerate(self.plans):
            y, x = plan.by_operators(y, x, self._own(number, parameters), self._seed(number), batch)
        return y, x


def _forward(
    ctx: Any, layers: _Layers, weights: Sequence[Any], memory_weights: MemoryWeights, y: Tensor, x: Tensor | None,
    memory: Tensor | None, *parameters: Any,
) -> Any:  # fmt: skip
    plans, stash, keys_values, needs_grad = layers.plans, Stash(), None, ctx.needs_input_grad[3:]
    if memory_weights is not None:
        stash.push(memory_weights[0])
        joint = nnF.linear(memory, *memory_weights)  # type: ignore[arg-type]  # (B, S, layers * 2 d)
        keys_values = joint.view(*joint.shape[:-1], len(plans), -1).unbind(-2)
    lowest = 0  # the first layer with a gradient to compute: of its input, the memory or a parameter
    if True not in needs_grad[:3]:
        lowest = needs_grad[3:].index(True) // plans[0].size if True in needs_grad else len(plans)
    outputs = layers.forward(y, y if x is None else x, memory, weights, parameters, stash, lowest, keys_values)
    ctx.materialize_grads = False
    copies = [*chain.from_iterable(weights)] if plans[0].copies else ()
    ctx.to_save = tensors = (y, x, memory, *parameters, *copies, *stash.tensors)
    ctx.dense = dense(tensors) if saved_hook(False) else None
    ctx.state = layers, lowest, memory_weights is not None, stash.records, len(parameters), len(copies)
    return outputs if plans[-1].returns_stream else outputs[0]


def _backward(ctx: Any, dy: Tensor | None, ds: Tensor | None = None) -> tuple:
    y: Any
    memory: Any
    layers, lowest, joined, records, count, copied = ctx.state
    plans, needs_grad = layers.plans, ctx.needs_input_grad
    if dy is None and ds is None:
        return (None,) * (6 + count)
    tensors = ctx.saved_tensors if ctx.dense is None else as_saved(ctx.saved_tensors, ctx.dense)
    y, x, memory = inputs = tensors[:3]
    parameters, kept = tensors[3 : 3 + count], tensors[3 + count :]
    weights = kept[:copied] or [p for i, p in enumerate(parameters) if i % PER_SUBLAYER < 4]
    with without_autocast(y.device.type):
        if torch.is_grad_enabled() or not all(each is None or _has_storage(each) for each in (dy, ds)):
            return None, None, None, *_differentiable(layers, (*inputs, *parameters), (dy, ds))
        dy = _aligned(dy) if dy is not None else torch.zeros_like(ds)  # type: ignore[arg-type]
        if plans[-1].returns_stream:
            ds = _aligned(ds) if ds is not None else torch.zeros_like(dy)
        d_joint = None  # of the keys and values over the memory; of all layers, as plans hold its strides
        if joined:
            d_joint = memory.new_empty(*memory.shape[:-1], len(plans), 2 * memory.shape[-1])
        with plans[0].merged_sums():
            args = dy, ds, memory, weights, parameters, needs_grad[6:], Stash(kept[copied:], records), lowest, d_joint
            d_y, d_x, d_memory, gradients = layers.backward(*args)
        if d_joint is not None:
            weight = kept[copied] if needs_grad[5] else None
            d_memory = _through_keys_and_values(d_joint[..., lowest:, :], weight, memory, gradients, plans[0].size)
        gradients = in_parameter_dtype(gradients, parameters)
    if x is None:
        d_y, d_x = d_y if d_x is None else d_x + d_y, None
    return None, None, None, d_y, d_x, d_memory, *gradients


def _through_keys_and_values(
    d_joint: Tensor, weight: Tensor | None, memory: Tensor, gradients: list[Any], size: int
) -> Tensor | None:
    """The gradient of the memory from d_joint (B, S, layers, 2 d) by one product with weight (layers * 2 d, d); None
    without weight.

    In gradients, those of cross-attention's in_proj_weight and in_proj_bias, which hold the rows of queries, become
    pairs with the rows of keys and values. size: parameters per layer.
    """
    width, rows = memory.shape[-1], d_joint.flatten(0, -3).flatten(1)
    layers = d_joint.shape[-2]
    places = range(len(gradients) - layers * size + PER_SUBLAYER, len(gradients), size)
    if any(gradients[place] is not None for place in places):
        d_weight = torch.mm(rows.t(), memory.view(-1, width)).view(layers, -1, width).unbind(0)
        for place, part in zip(places, d_weight):
            if gradients[place] is not None:
                gradients[place] = gradients[place], part
    pairs = [place + 1 for place in places]
    if any(gradients[place] is not None and gradients[place][1] is None for place in pairs):  # no kernel summed them
        for place, part in zip(pairs, rows.sum(0, dtype=torch.float32).view(layers, -1).unbind(0)):
            if gradients[place] is not None:
                gradients[place] = gradients[place][0], part
    return None if weight is None else torch.mm(rows, weight).view(memory.shape)


def _differentiable(layers: _Layers, inputs: tuple, gradients: tuple) -> list[Any]:
    """Gradients of the inputs by operators: for second derivatives and for batched gradients."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, because y may itself be computed from the memory
        inputs = tuple([each if each is None else each.view_as(each) for each in inputs])
        y, x, memory, *parameters = inputs
        outputs = layers.by_operators(y, y if x is None else x, memory, parameters)
    outputs, gradients = zip(*[pair for pair in zip(outputs, gradients) if pair[1] is not None])
    sources = [each for each in inputs if each is not None and each.requires_grad]
    results = torch.autograd.grad(outputs, sources, gradients, create_graph=create_graph, allow_unused=True)
    by_input = {id(each): gradient for each, gradient in zip(sources, results)}
    return [None if each is None else by_input.get(id(each)) for each in inputs]


NODE = apply_of("fasttfm_layers", _forward, _backward)
"""NODE(layers, weights, memory_weights, y, x, memory, *parameters): y and x behind the layers, or y alone if x is not
used. The input x is None if it is y."""


class Stack(nn.Module):
    """Layers one after the other; pre-norm, then a norm."""

    stands_for = "stack"

    def __init__(
        self, layers: list[Any], norm: nn.LayerNorm | nn.RMSNorm | None = None, *, first_site: int = SITES_PER_LAYER
    ) -> None:
        """layers: EncoderLayer, DecoderLayer, or modules with their forward's signature; a repeated layer is shared.

        first_site: of the first layer's dropouts; lower sites are for the dropouts of the model itself.
        """
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)
        self.norm = norm
        self.first_site = first_site
        self.checkpoint_activations = False
        """Whether layers save their inputs only, and are recomputed in the backward pass."""

    __getstate__ = without_prepared

    @property
    def sites(self) -> int:
        """The first dropout site behind this stack."""
        return self.first_site + SITES_PER_LAYER * len(self.layers)

    def forward(self, x: Tensor, *inputs: Any, seed: Tensor | None = None, cache: DecoderCache | None = None) -> Tensor:
        """The output (B, L, d) for x (B, L, d); inputs: further arguments of the layers. seed (1,) int64: of all
        dropouts; None: no dropout."""
        layers, norm = [*self.layers], self.norm
        checkpointed = self.checkpoint_activations and torch.is_grad_enabled()
        is_decoder = bool(layers) and isinstance(layers[0], DecoderLayer)
        lengths, memory_lengths = [*inputs[is_decoder:], None, None][:2]
        if cache is None and may_run() and (prepared := prepared_for(self, layers, norm)) is not None:
            memory = inputs[0] if is_decoder and inputs else None
            if len(inputs) <= 1 + 2 * is_decoder and is_decoder == (memory is not None):  # else the layers decide
                batch = Batch(seed, lengths, memory, memory_lengths)
                if (dtype := prepared.dtype_of_products(x, batch)) is not None:
                    return prepared.run(x, batch, dtype, first_site=self.first_site, checkpointed=checkpointed)
        if isinstance(cache, DecoderCache) and layers and lengths is seed is None:
            y = cache.step(x, None, layers, norm, memory_lengths, lambda: all(map(plain_width, layers)))
            if y is not None:
                return y
        seeds = [LayerSeed(seed, self.first_site + SITES_PER_LAYER * number) for number in range(len(layers))]
        options: list[dict[str, Any]] = [
            {"seed": each} if cache is None else {"seed": each, "cache": cache.layer(number)}
            for number, each in enumerate(seeds)
        ]
        ours = [untouched(layer, LAYER) for layer in layers]
        if all(ours) and not checkpointed and len({layer.norm_first for layer in layers}) == 1:
            sublayers = [part for layer, each in zip(layers, options) for part in layer.sublayers(*inputs, **each)]
            pre_norm = layers[0].norm_first
            x = through(x, sublayers, pre_norm, norm if pre_norm else None)
            return x if pre_norm or norm is None else normalise(x, norm)
        for layer, is_ours, each in zip(layers, ours, options):
            if checkpointed and cache is None:
                # dropouts of plain layers depend on the seed alone; others, such as LoRA's, draw from torch's generator
                draws = not (is_ours and plain_width(layer))
                x = checkpoint(layer, x, *inputs, use_reentrant=False, preserve_rng_state=draws, **each)
            else:
                x = layer(x, *inputs, **each)
        return x if norm is None else normalise(x, norm)
