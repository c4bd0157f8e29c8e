"""A plan for each signature: what a call decides once, and later calls of its kind only look up.

A signature is all that a plan may depend on: which arguments are given, their shapes, strides, dtypes, device and
alignment to 16 bytes, the numbers among them, and of the world around them the backend, what was tuned, whether
gradients are kept, and on a CPU a search's weights. The numbers, the first shape and the alignment find a plan; one
call of C, alike(), tells whether all tensors are as they were, under no other transform or autocast. What looks on
sees the call by way of the dispatcher, as do classes of tensors with a meaning of their own.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter, or_
from typing import Any

import torch
from torch import Tensor

from fasttfm.cpu.linear import on_this_thread
from fasttfm.functional import backends
from fasttfm.functional.onlookers import alike
from fasttfm.functional.record import Layout, items
from fasttfm.kernels import choices

MOST_PLANS = 4096
"""Of an operator: batches of ever new lengths have ever new signatures."""
MOST_ALIKE = 64
"""Plans that share a key; the newest are found first."""
_LARGEST = (1 << 31) - 1

_grad_enabled = torch.is_grad_enabled
_address, _nested = Tensor.data_ptr, attrgetter("is_nested")


class Plans(dict[Any, tuple]):
    """Plans by key, those of one key told apart by what they match; safe under threads, since a value is replaced."""

    def __missing__(self, key: Any) -> tuple:
        return ()

    def add(self, key: Any, plan: Any, most: int) -> None:
        """Keep a plan; at so many keys all are dropped."""
        if len(self) >= most:
            self.clear()
        self[key] = (plan, *self[key][: MOST_ALIKE - 1])


@dataclass(slots=True, eq=False)
class Plan:
    """Everything that was decided for calls of one signature."""

    compute: Any = None
    """The outputs of a call."""
    route: str | None = None
    """Last field of a call, if it has one."""
    native: Callable[[Any], Any] | None = None
    """The outputs by operators of PyTorch, which differentiates them itself, or by the dispatcher."""
    gpu: int | None = None
    """The one that must be current, where there are several."""
    wanted: bool = False
    """Whether a tensor wants a gradient."""
    matches: Any = None
    """Of the tensors of another call: whether the plan is for it, as alike() tells."""
    reader: Any = None
    """Of the types of the gradients: a function that reads the tensors among them and what is saved."""
    dense: list[bool] | None = None
    """Of what is saved, which tensors were contiguous."""
    backwards: Plans = field(default_factory=Plans)
    """What computes the backward pass, by which gradients there are and which are wanted."""


def holds(tensors: tuple, state: Callable[..., Any] | None) -> Callable[..., bool]:
    """alike(), while the state of such tensors is what it is now."""
    like = alike(tensors)
    if state is None:
        return like
    now = state(*tensors)
    return lambda *given: like(*given) and state(*given) == now


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


def finder(
    layout: Layout, plans: Plans, free: Sequence[str], *, checked: bool, products: bool
) -> Callable[..., tuple[Plan | None, tuple, tuple | None]]:
    """A function of the fields, one after the other, to their plan, the tensors that are given, and the key for a plan
    to be made; None for the key of what has no plan: classes that hide what their memory means, and tensors without
    memory. checked: whether numbers may be of other classes than their type's.
    """
    names = [each.name for each in layout.fields]
    counted = [names.index(name) for name in free]
    numbers_of = items([i for i in range(len(names)) if i not in layout.positions and i not in counted])

    @functools.cache
    def reader(types: tuple[type, ...]) -> Callable[[tuple], tuple] | None:
        """A function that reads the tensors of such fields; None where one is not of a class to be read as it is."""
        asked = [t for t in zip(types, layout.types) if checked or t[1].dtypes is not None]
        if any(type_.plain is not None and kind not in type_.plain for kind, type_ in asked):
            return None
        return items([i for i in layout.positions if types[i] is not type(None)])

    def find(values: tuple, way: str = "direct") -> tuple[Plan | None, tuple, tuple | None]:
        types = tuple(map(type, values))
        tensors_of = reader(types)
        if tensors_of is None:
            return None, (), None
        for place in counted:
            if not 0 <= values[place] <= _LARGEST:
                return None, (), None
        tensors = tensors_of(values)
        if any(map(_nested, tensors)):  # torch's guards end the process where a tensor has no strides
            return None, (), None
        try:
            first = tensors[0]
            rest = reduce(or_, map(_address, tensors)) % 16  # which raises where there is no memory
            key: tuple = (
                way, types, numbers_of(values), first.shape, rest and tuple([x.data_ptr() % 16 for x in tensors]),
                _grad_enabled(), backends.current, choices.version, on_this_thread.kept is None,
                on_this_thread.batch_invariant,
            )  # fmt: skip
            if products and first.dtype is torch.float32 and not first.is_cpu:
                key = (*key, torch.backends.cuda.matmul.fp32_precision)
            for plan in plans[key]:
                if plan.matches(*tensors):
                    return plan, tensors, key
        except RuntimeError:  # no memory, or no strides
            return None, (), None
        return None, tensors, key

    return find
