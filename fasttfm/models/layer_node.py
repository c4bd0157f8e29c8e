"""A layer as one node of autograd: what its plan keeps of the forward pass, the backward pass takes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.derivative import apply_of, as_saved, dense
from fasttfm.functional.onlookers import saved_hook
from fasttfm.functional.plan import without_autocast
from fasttfm.models.dropout import LayerSeed
from fasttfm.models.layer_plan import PER_SUBLAYER, Batch, LayerPlan, Stash

_has_memory = torch._C._has_storage  # not of many gradients at once, as torch.vmap and is_grads_batched hand them on


def _forward(
    ctx: Any, plan: LayerPlan, weights: Sequence[Any], seed: LayerSeed, batch: Batch, y: Tensor, x: Tensor | None,
    memory: Tensor | None, *parameters: Any,
) -> Any:  # fmt: skip
    stash, seen = Stash(), batch if memory is None else batch._replace(memory=memory)
    outputs = plan.forward(y, y if x is None else x, parameters, weights, seed, seen, stash)
    ctx.materialize_grads = False
    copies = weights if plan.copies else ()
    ctx.to_save = tensors = (y, x, memory, *parameters, *copies, *stash.tensors)
    ctx.dense = dense(tensors) if saved_hook(False) else None
    ctx.given = plan, seed, batch, stash.records, len(parameters), len(copies)
    return outputs if plan.hands_on else outputs[0]


def _backward(ctx: Any, dy: Tensor | None, ds: Tensor | None = None) -> tuple:
    y: Any
    plan, seed, batch, records, count, copied = ctx.given
    if dy is None and ds is None:
        return (None,) * (7 + count)
    tensors = ctx.saved_tensors if ctx.dense is None else as_saved(ctx.saved_tensors, ctx.dense)
    y, x, memory = given = tensors[:3]
    first = 3 + count
    parameters, weights, kept = tensors[3:first], tensors[first : first + copied], tensors[first + copied :]
    weights = weights or [p for i, p in enumerate(parameters) if i % PER_SUBLAYER < 4]
    with without_autocast(y.device.type):
        if torch.is_grad_enabled() or not all(each is None or _has_memory(each) for each in (dy, ds)):
            return None, None, None, None, *_differentiable(plan, seed, batch, (*given, *parameters), (dy, ds))
        dy = _as_planned(dy, like=ds)
        if plan.hands_on:
            ds = _as_planned(ds, like=dy)
        stash = Stash(kept, records)
        with plan.one_launch():
            d_y, d_x, d_memory, gradients = plan.backward(dy, ds, weights, ctx.needs_input_grad[7:], stash, memory)
        gradients = _as_parameters(gradients, parameters)
    if x is None:
        d_y, d_x = d_y if d_x is None else d_x + d_y, None
    return None, None, None, None, d_y, d_x, d_memory, *gradients


def _as_parameters(gradients: list[Any], parameters: Sequence[Any]) -> list[Any]:
    """Gradients in the dtype of their parameters, and pairs as one, in one launch, where autograd takes one each."""
    places = [
        place
        for place, (gradient, parameter) in enumerate(zip(gradients, parameters))
        if type(gradient) is tuple or (gradient is not None and gradient.dtype is not parameter.dtype)
    ]
    if places:
        found = [gradients[place] for place in places]
        whole = [*map(torch.empty_like, [parameters[place] for place in places])]
        targets, sources = whole, found
        if any(type(gradient) is tuple for gradient in found):
            sources = [part for each in found for part in (each if type(each) is tuple else (each,))]
            targets = [
                part
                for each, into in zip(found, whole)
                for part in (into.split([*map(len, each)]) if type(each) is tuple else (into,))
            ]
        torch._foreach_copy_(targets, sources)
        for place, gradient in zip(places, whole):
            gradients[place] = gradient
    return gradients


def _as_planned(gradient: Tensor | None, like: Tensor | None) -> Tensor:
    """A gradient as its plan was made for: there, contiguous and aligned."""
    if gradient is None:
        return torch.zeros_like(like)  # type: ignore[arg-type]
    gradient = gradient.contiguous()
    return gradient.clone() if gradient.data_ptr() % 16 else gradient


def _differentiable(plan: LayerPlan, seed: LayerSeed, batch: Batch, inputs: tuple, gradients: tuple) -> list[Any]:
    """The gradients of the inputs, which can be differentiated again, and of many gradients at once."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # each under a name of its own: y depends on the memory too, but not here
        inputs = tuple([each if each is None else each.view_as(each) for each in inputs])
        y, x, memory, *parameters = inputs
        outputs = plan.by_operators(y, y if x is None else x, parameters, seed, batch._replace(memory=memory))
    pairs = [(output, gradient) for output, gradient in zip(outputs, gradients) if gradient is not None]
    wanted = [each for each in inputs if each is not None and each.requires_grad]
    outputs, gradients = zip(*pairs)
    found = torch.autograd.grad(outputs, wanted, gradients, create_graph=again, allow_unused=True)
    by_input = {id(each): gradient for each, gradient in zip(wanted, found)}
    return [None if each is None else by_input.get(id(each)) for each in inputs]


NODE = apply_of("fasttfm_layer", {"forward": _forward, "backward": _backward})
"""NODE(plan, weights, seed, batch, y, x, memory, *parameters): y and x behind a layer, or y alone where nobody reads x.
x is None where it is y."""
