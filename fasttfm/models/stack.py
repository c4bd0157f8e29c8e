"""Stacks of layers, one after the other, and layers that are prepared once.

A stack of layers that are no more than their classes computes their sub-layers one after the other; a wrapped, hooked,
sharded or derived layer is called and not opened. Plain layers are prepared: together they are one node of autograd,
whose plans all batches of a signature share. So weights are cast, and gradients of biases and norms summed and cast, by
one launch a stack, and where kernels compute, the keys and values of all layers over the memory are one product, as are
their gradients. Where ranks exchange gradients each layer is a node: an exchange begins while others are computed.
Whether anything has changed since, a hook, an exchanged module, a parameter's memory, is asked in a few calls a pass.
"""

from __future__ import annotations

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
from fasttfm.functional.operator import on_forget
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
from fasttfm.models.stack_weights import OfMemory, StackWeights, as_parameters

MOST_PLANS = 1024
"""Batches of ever new lengths have ever new signatures."""
_plans: dict[tuple, list[LayerPlan]] = {}
on_forget(_plans.clear)
_numbers: dict[tuple, int] = {}
"""Of kinds of layers: settings, and shapes, strides and alignment of parameters."""
_OTHERS = PLAIN_TENSORS | {Packing, type(None)}
"""Classes of seeds and lengths; the operators refuse others."""
_has_memory = torch._C._has_storage  # not of many gradients at once, as torch.vmap and is_grads_batched hand them on


def may_run() -> bool:
    """Return whether layers may be computed as nodes now: nobody looks on, no search keeps what it made of weights."""
    return on_this_thread.kept is None and not (_has_any_global_hook() or looked_at())


class PreparedStack:
    """Layers that are no more than their classes, and the norm behind them."""

    def __init__(self, layers: Sequence[Any], norm: Any) -> None:
        self._layers, self._norm = [*layers], norm
        norms = [*map(norms_behind, layers, [*(each.norm1 for each in layers[1:]), norm])]
        last = len(layers) - 1
        self._settings = [settings_of(*each, is_last=n == last) for n, each in enumerate(zip(layers, norms))]
        parameters = [parameters_of(*each) for each in zip(layers, norms)]
        self._parameters = [*chain.from_iterable(parameters)]
        self.drops = any(p > 0.0 for each in self._settings for p in each.dropout_p)
        """Whether any dropout drops."""
        modules = chain.from_iterable(each.modules() for each in (*layers, norm) if each is not None)
        self._snapshot = Snapshot(dict.fromkeys(modules))
        given = [p for each in parameters for p in each if p is not None]
        self._dtype, self._device = given[0].dtype, given[0].device
        kinds = zip(self._settings, (tuple(map(_kind, each)) for each in parameters))
        self._kinds = tuple([_numbers.setdefault(kind, len(_numbers)) for kind in kinds])
        decodes = len(attentions_of(layers[0])) == 2
        self._weights = StackWeights(
            [[p for i, p in enumerate(each) if i % PER_SUBLAYER < 4] for each in parameters], decodes=decodes
        )

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
        recorded, count, pre_norm = torch.is_grad_enabled(), len(self._layers), self._settings[0].norm_first
        step = 1 if count > 1 and recorded and _ranks_exchange() else count
        joined = bool(self._weights.over_memory) and recorded and step == count and not checkpointed  # it takes memory
        joined = joined and saved_hook(False) is None  # which may give parts back contiguous
        key = self._kinds, causal, joined, *_signature(x, batch, dtype, recorded)
        plans = _plans.get(key)
        if plans is None:
            if len(_plans) >= MOST_PLANS:
                _plans.clear()
            plans = _plans[key] = self._planned(x, dtype, causal)
        kept = batch if memory is None else batch._replace(memory=None)
        with without_autocast(x.device.type):
            weights, of_memory = self._weights.in_dtype(dtype, joined=joined and plans[0].adds)
            y = normalise(x, self._layers[0].norm1) if pre_norm else x
            if not recorded:
                layers = _Layers(plans, first_site, kept, checkpointed)
                return layers.forward(y, x, batch.memory, weights, self._parameters)[0]
            for first in range(0, count, step):
                some, stream, size = slice(first, first + step), x if pre_norm else None, plans[0].size
                layers = _Layers(plans[some], first_site + SITES_PER_LAYER * first, kept, checkpointed)
                own = self._parameters[first * size : (first + step) * size]
                found = NODE(layers, weights[some], of_memory, y, stream, batch.memory, *own)
                y, x = found if plans[first + step - 1].hands_on else (found, found)
        return y

    def _planned(self, x: Tensor, dtype: torch.dtype, causal: tuple[bool, ...] | None) -> list[LayerPlan]:
        """A plan for each layer; layers of a kind share one, but for the first, whose input may have another dtype."""
        made: dict[tuple, LayerPlan] = {}
        for number, (kind, settings) in enumerate(zip(self._kinds, self._settings)):
            if (kind, number == 0) not in made:
                settings = settings if causal is None else settings._replace(causal=causal)
                made[kind, number == 0] = LayerPlan(settings, x, dtype, self._dtype)
        return [made[kind, number == 0] for number, kind in enumerate(self._kinds)]

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


def _ranks_exchange() -> bool:
    """Return whether there are other ranks, with which gradients are exchanged while others are still computed."""
    ranks = torch.distributed
    return ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1


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


class _Layers:
    """Neighbouring layers of a stack, computed for one batch."""

    def __init__(self, plans: Sequence[LayerPlan], site: int, batch: Batch, checkpointed: bool) -> None:
        """site: of the first dropout; batch: without the memory, which autograd keeps; checkpointed: layers keep their
        input alone, and are computed again in the backward pass."""
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
        """y and x behind the layers; stash: keeps what the backward pass of layers from the lowest on needs;
        keys_values: of each layer, over the memory."""
        batch = self._batch if memory is None else self._batch._replace(memory=memory)
        for number, plan in enumerate(self.plans):
            kept = None if number < lowest else stash
            if kept is not None and self._checkpointed:
                kept.push(y, x)
                kept = None
            own = None if keys_values is None else keys_values[number]
            parts = self._own(number, parameters), weights[number], self._seed(number)
            y, x = plan.forward(y, x, *parts, batch, kept, own)
        return y, x

    def backward(
        self, dy: Tensor, ds: Tensor | None, memory: Tensor | None, weights: Sequence[Any], parameters: Sequence[Any],
        wanted: Sequence[bool], stash: Stash, lowest: int, d_joint: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[Any]]:  # fmt: skip
        """Gradients of y and x as the lowest layer was given them, of the memory, and of all parameters."""
        d_memory: Tensor | None = None
        gradients: list[Any] = []
        for number in range(len(self.plans) - 1, lowest - 1, -1):
            plan, mine = self.plans[number], stash
            of_layer = weights[number * plan.products : (number + 1) * plan.products]
            if self._checkpointed:
                x, y, mine = stash.pop(), stash.pop(), Stash()
                parts = self._own(number, parameters), of_layer, self._seed(number)
                plan.forward(y, x, *parts, self._batch._replace(memory=memory), mine)
            d_own = None if d_joint is None else d_joint.select(-2, number - lowest)
            given = dy, ds, of_layer, self._own(number, wanted), mine, memory, d_own
            dy, ds, of_memory, found = plan.backward(*given)
            gradients = [*found, *gradients]
            if of_memory is not None:
                d_memory = of_memory if d_memory is None else d_memory.add_(of_memory)
            if number > lowest and not plan.settings.norm_first:
                dy, ds = dy if ds is None else ds + dy, None
        return dy, ds, d_memory, [*[None] * (lowest * self._size), *gradients]

    def by_operators(self, y: Tensor, x: Tensor, memory: Tensor | None, parameters: Sequence[Any]) -> tuple:
        """forward() in operators that autograd differentiates, a second time too."""
        for number, plan in enumerate(self.plans):
            own, batch = self._own(number, parameters), self._batch._replace(memory=memory)
            y, x = plan.by_operators(y, x, own, self._seed(number), batch)
        return y, x


def _forward(
    ctx: Any, layers: _Layers, weights: Sequence[Any], of_memory: OfMemory, y: Tensor, x: Tensor | None,
    memory: Tensor | None, *parameters: Any,
) -> Any:  # fmt: skip
    plans, stash, keys_values, wanted = layers.plans, Stash(), None, ctx.needs_input_grad[3:]
    if of_memory is not None:
        stash.push(of_memory[0])
        joint = nnF.linear(memory, *of_memory)  # type: ignore[arg-type]  # (B, S, layers * 2 d)
        keys_values = joint.view(*joint.shape[:-1], len(plans), -1).unbind(-2)
    lowest = 0  # layer with a gradient to compute: of its input, the memory or a parameter
    if True not in wanted[:3]:
        lowest = wanted[3:].index(True) // plans[0].size if True in wanted else len(plans)
    given = y, y if x is None else x, memory, weights, parameters
    outputs = layers.forward(*given, stash, lowest, keys_values)
    ctx.materialize_grads = False
    copies = [*chain.from_iterable(weights)] if plans[0].copies else ()
    ctx.to_save = tensors = (y, x, memory, *parameters, *copies, *stash.tensors)
    ctx.dense = dense(tensors) if saved_hook(False) else None
    ctx.given = layers, lowest, of_memory is not None, stash.records, len(parameters), len(copies)
    return outputs if plans[-1].hands_on else outputs[0]


def _backward(ctx: Any, dy: Tensor | None, ds: Tensor | None = None) -> tuple:
    y: Any
    memory: Any
    layers, lowest, joined, records, count, copied = ctx.given
    plans, needed = layers.plans, ctx.needs_input_grad
    if dy is None and ds is None:
        return (None,) * (6 + count)
    tensors = ctx.saved_tensors if ctx.dense is None else as_saved(ctx.saved_tensors, ctx.dense)
    y, x, memory = inputs = tensors[:3]
    parameters, kept = tensors[3 : 3 + count], tensors[3 + count :]
    weights = kept[:copied] or [p for i, p in enumerate(parameters) if i % PER_SUBLAYER < 4]
    with without_autocast(y.device.type):
        if torch.is_grad_enabled() or not all(each is None or _has_memory(each) for each in (dy, ds)):
            return None, None, None, *_differentiable(layers, (*inputs, *parameters), (dy, ds))
        dy = _as_planned(dy, like=ds)
        if plans[-1].hands_on:
            ds = _as_planned(ds, like=dy)
        d_joint = None  # of the keys and values of layers from the lowest on
        if joined:
            d_joint = memory.new_empty(*memory.shape[:-1], len(plans) - lowest, 2 * memory.shape[-1])
        with plans[0].one_launch():
            given = dy, ds, memory, weights, parameters, needed[6:], Stash(kept[copied:], records), lowest, d_joint
            d_y, d_x, d_memory, gradients = layers.backward(*given)
        if d_joint is not None:
            weight = kept[copied] if needed[5] else None
            d_memory = _of_keys_and_values(d_joint, weight, memory, gradients, plans[0].size)
        gradients = as_parameters(gradients, parameters)
    if x is None:
        d_y, d_x = d_y if d_x is None else d_x + d_y, None
    return None, None, None, d_y, d_x, d_memory, *gradients


def _of_keys_and_values(
    d_joint: Tensor, weight: Tensor | None, memory: Tensor, gradients: list[Any], size: int
) -> Tensor | None:
    """The gradient of the memory from d_joint (B, S, layers, 2 d), by one product with the weight (layers * 2 d, d), or
    None without it.

    The gradients of in_proj_weight and in_proj_bias, where those of their queries are, become pairs with those of the
    keys and values. size: parameters of a layer.
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
    if any(gradients[place] is not None and gradients[place][1] is None for place in pairs):  # summed by no kernel
        for place, part in zip(pairs, rows.sum(0, dtype=torch.float32).view(layers, -1).unbind(0)):
            if gradients[place] is not None:
                gradients[place] = gradients[place][0], part
    return None if weight is None else torch.mm(rows, weight).view(memory.shape)


def _as_planned(gradient: Tensor | None, like: Tensor | None) -> Tensor:
    """A gradient as its plan was made for: there, contiguous and aligned."""
    if gradient is None:
        return torch.zeros_like(like)  # type: ignore[arg-type]
    gradient = gradient.contiguous()
    return gradient.clone() if gradient.data_ptr() % 16 else gradient


def _differentiable(layers: _Layers, inputs: tuple, gradients: tuple) -> list[Any]:
    """The gradients of the inputs, which can be differentiated again, and of many gradients at once."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # each under a name of its own: y depends on the memory too, but not here
        inputs = tuple([each if each is None else each.view_as(each) for each in inputs])
        y, x, memory, *parameters = inputs
        outputs = layers.by_operators(y, y if x is None else x, memory, parameters)
    pairs = [(output, gradient) for output, gradient in zip(outputs, gradients) if gradient is not None]
    wanted = [each for each in inputs if each is not None and each.requires_grad]
    outputs, gradients = zip(*pairs)
    found = torch.autograd.grad(outputs, wanted, gradients, create_graph=again, allow_unused=True)
    by_input = {id(each): gradient for each, gradient in zip(wanted, found)}
    return [None if each is None else by_input.get(id(each)) for each in inputs]


NODE = apply_of("fasttfm_layers", {"forward": _forward, "backward": _backward})
"""NODE(layers, weights, of_memory, y, x, memory, *parameters): y and x behind the layers, or y alone where nobody reads
x. x is None where it is y."""


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
