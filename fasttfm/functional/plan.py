"""A plan for each signature: what a call decides once, and later calls of its kind only look up.

A signature is all that a plan may depend on: which arguments are given, their shapes, strides, dtypes, device and
alignment to 16 bytes, the numbers among them, and of the world around them the backend, what was tuned, whether
gradients are kept, and on a CPU a search's weights. What may not be planned goes by the dispatcher: classes of tensors
with a meaning of their own, and whatever torch.compile, a transform, a dispatch mode or the profiler looks on at.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fasttfm.cpu.linear import on_this_thread
from fasttfm.functional import backends
from fasttfm.functional.record import REAL, Layout, items
from fasttfm.kernels import choices

MOST_PLANS = 4096
"""Of an operator: batches of ever new lengths have ever new signatures."""
_LARGEST = (1 << 31) - 1

_grad_enabled = torch.is_grad_enabled


@dataclass(slots=True, eq=False)
class Plan:
    """Everything that was decided for calls of one signature."""

    compute: Callable[[Any], Any]
    """The outputs of a call."""
    route: str | None
    """Last field of a call, if it has one."""
    native: Callable[[Any], Any] | None
    """The outputs by operators of PyTorch, which differentiates them itself."""
    gpu: int | None
    """The one that must be current, where there are several."""
    given: Callable[[tuple], tuple] | None = None
    """Of what is saved, the tensors of the call: their memory may be another one when the backward pass comes."""
    backwards: dict[tuple, Callable[[Any], Any]] = field(default_factory=dict)
    """By the layouts of these and of the gradients, what computes a call of the backward operator."""


@contextlib.contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Inside, autocast is off for this type of device."""
    if not (torch.is_autocast_enabled(device)):
        yield
        return
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, True)


def without_views(compute: Callable[[Any], Any], internal: int = 0) -> Callable[[Any], Any]:
    """compute, with outputs that are not views, the last ones apart: what a Function gives as a view must not be
    changed in place."""

    def run(call: Any) -> Any:
        outputs = compute(call)
        if type(outputs) is tuple:
            for place in range(len(outputs) - internal):
                if outputs[place] is not None and outputs[place]._is_view():
                    outputs = (*outputs[:place], outputs[place].detach(), *outputs[place + 1 :])
            return outputs
        return outputs.detach() if outputs is not None and outputs._is_view() else outputs

    return run


def unshared(outputs: Any, first: Tensor) -> Any:
    """Outputs as the dispatcher takes them, each in memory of its own, where a direct call spares the copy, and (0,) of
    the dtype of first, the first tensor of the call, in the place of None."""
    if not isinstance(outputs, tuple):
        return outputs
    seen: set[int] = set()
    copies = []
    for output in outputs:
        output = first.new_empty(0) if output is None else output
        memory = output.untyped_storage()._cdata  # also of what is empty and has no address
        copies.append(output.clone() if memory in seen else output)
        seen.add(memory)
    return tuple(copies)


def empties(*like: Tensor | None) -> tuple[Tensor | None, ...]:
    """Empty tensors of the shapes and dtypes of these, for an operator's fake; None for None."""
    return tuple([None if x is None else x.new_empty(x.shape) for x in like])


def signature_of(
    layout: Layout, free: Sequence[str], *, checked: bool, products: bool
) -> Callable[[tuple], tuple[int, tuple] | None]:
    """A function of the fields, one after the other, to which of them want a gradient, a bit each, and all that a plan
    may depend on; None of what has no plan: classes that hide what their memory means, tensors without strides or
    memory, or of which memory holds the negative. checked: whether numbers may be of other classes than their type's.
    """
    known: dict[tuple[type, ...], list[int] | None] = {}
    """By the types of the fields, where the tensors are; None where a field is not of a class to be read as it is."""
    names = [each.name for each in layout.fields]
    counted = [names.index(name) for name in free]
    numbers_of = items([i for i in range(len(names)) if i not in layout.positions and i not in counted])

    def places_of(types: tuple[type, ...]) -> list[int] | None:
        asked = [t for t in zip(types, layout.types) if checked or t[1].dtypes is not None]
        if any(type_.plain is not None and kind not in type_.plain for kind, type_ in asked):
            return None
        return [i for i in layout.positions if types[i] is not type(None)]

    def signature(values: tuple) -> tuple[int, tuple] | None:
        types = tuple(map(type, values))
        try:
            places = known[types]
        except KeyError:
            places = known[types] = places_of(types)
        if places is None:
            return None
        for place in counted:
            if not 0 <= values[place] <= _LARGEST:
                return None
        grad = _grad_enabled()
        wanted = 0
        key = [types, numbers_of(values), grad, backends.current, choices.version, on_this_thread.kept is None,
               on_this_thread.batch_invariant]  # fmt: skip
        try:
            for place in places:
                x = values[place]
                if x.requires_grad:
                    wanted |= 1 << place
                shape, strides = x.shape, x.stride()
                key += shape, strides, x.dtype, x.device, x.data_ptr() % 16  # which raises where there is no memory
                if (not strides or strides[-1] != 1 or shape[-1] == 1) and x.dtype in REAL and x.is_neg():
                    return None  # else it is no view of conjugate numbers
        except RuntimeError:  # no strides, or no memory
            return None
        if products and (first := values[places[0]]).dtype is torch.float32 and not first.is_cpu:
            key.append(torch.backends.cuda.matmul.fp32_precision)
        return wanted if grad else 0, (wanted, *key)

    return signature
