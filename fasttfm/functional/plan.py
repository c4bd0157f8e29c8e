"""Plans: what a call decides once per signature, and later calls look up.

A signature is everything a plan may depend on: which arguments are given, their shapes, strides, dtypes, device and
16-byte alignment, the numbers among them, the backend, tuned choices, grad mode, and on a CPU a search's weights. The
numbers, the first shape and the alignment form the cache key; one call in C, alike(), compares all tensors, and rules
out transforms and autocast. Calls that the dispatcher must see, and tensor subclasses, have no plan.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fasttfm.cpu.linear import on_this_thread
from fasttfm.functional import backends
from fasttfm.functional.record import Layout, items
from fasttfm.kernels import choices

MOST_PLANS = 4096
"""Keys of an operator's cache: batches of ever new lengths have ever new signatures."""
MOST_ALIKE = 64
"""Plans per key; the newest are tried first."""
_LARGEST = (1 << 31) - 1

_grad_enabled = torch.is_grad_enabled
_address, _nested = Tensor.data_ptr, attrgetter("is_nested")


class Plans(dict[Any, tuple]):
    """Plans by key; those that share a key have guards. Thread-safe, since values are replaced as a whole."""

    def __missing__(self, key: Any) -> tuple:
        return ()

    def add(self, key: Any, plan: Any, most: int) -> None:
        """Cache a plan; drops all plans first if there are `most` keys."""
        if len(self) >= most:
            self.clear()
        self[key] = (plan, *self[key][: MOST_ALIKE - 1])


@dataclass(slots=True, eq=False)
class Plan:
    """All decisions for calls of one signature."""

    compute: Any = None
    """Computes the outputs of a call."""
    route: str | None = None
    """Replaces the last field of a call, if it is a route."""
    native: Callable[[Any], Any] | None = None
    """Computes a call by operators that autograd or the dispatcher sees, in place of compute."""
    gpu: int | None = None
    """Index of the GPU that must be current, if there are several."""
    needs_grad: bool = False
    """Whether a tensor of the call requires a gradient."""
    matches: Any = None
    """Guard on the tensors of a call: alike(), and the state that the operator names."""
    reader: Any = None
    """Returns the getter of a backward pass's tensors, by the types of the gradients."""
    dense: list[bool] | None = None
    """Which saved tensors were contiguous."""
    backwards: Plans = field(default_factory=Plans)
    """Steps of the backward pass, by which gradients are given and which are needed."""


@contextlib.contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Disable autocast for this device type."""
    if not torch.is_autocast_enabled(device):
        yield
        return
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, True)


def without_views(compute: Callable[[Any], Any], internal: int = 0) -> Callable[[Any], Any]:
    """Return compute with its outputs detached from their bases, except for the last internal ones.

    A view that a Function returns could not be changed in place.
    """

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
    """Outputs as the dispatcher needs them: no shared memory, and an empty tensor of first's dtype for None.

    Direct calls spare the copies.
    """
    if not isinstance(outputs, tuple):
        return outputs
    seen: set[int] = set()
    copies = []
    for output in outputs:
        output = first.new_empty(0) if output is None else output
        memory = output.untyped_storage()._cdata  # an empty tensor has no address
        copies.append(output.clone() if memory in seen else output)
        seen.add(memory)
    return tuple(copies)


def empties(*like: Tensor | None) -> tuple[Tensor | None, ...]:
    """Empty tensors of these shapes and dtypes, for an operator's fake; None for None."""
    return tuple([None if x is None else x.new_empty(x.shape) for x in like])


def finder(
    layout: Layout, plans: Plans, free: Sequence[str], *, checked: bool, products: bool
) -> Callable[..., tuple[Plan | None, tuple, tuple | None]]:
    """Return the look-up of an operator: from a call's flat fields to its plan, its tensors and the key of a new plan.

    The key is None if the call can have no plan: a tensor is a subclass, nested, or has no memory. free: int fields
    that no plan depends on. checked: numbers of other classes than the annotated one have no plan. products: the
    operator has matrix products, whose TF32 setting is part of the key.
    """
    names = [each.name for each in layout.fields]
    free_places = [names.index(name) for name in free]
    numbers_of = items([i for i in range(len(names)) if i not in layout.positions and i not in free_places])

    @functools.cache
    def reader(types: tuple[type, ...]) -> Callable[[tuple], tuple] | None:
        """Return the getter of the tensors in fields of these types; None if there can be no plan."""
        asked = [t for t in zip(types, layout.types) if checked or t[1].dtypes is not None]
        if any(type_.plain is not None and kind not in type_.plain for kind, type_ in asked):
            return None
        return items([i for i in layout.positions if types[i] is not type(None)])

    def find(values: tuple, way: str = "direct") -> tuple[Plan | None, tuple, tuple | None]:
        types = tuple(map(type, values))
        tensors_of = reader(types)
        if tensors_of is None:
            return None, (), None
        for place in free_places:
            if not 0 <= values[place] <= _LARGEST:
                return None, (), None
        tensors = tensors_of(values)
        if True in map(_nested, tensors):  # torch's guards crash on a tensor without strides
            return None, (), None
        try:
            first, bits = tensors[0], 0
            for address in map(_address, tensors):
                bits |= address
            key: tuple = (
                way, types, numbers_of(values), first.shape, bits % 16 and tuple([x.data_ptr() % 16 for x in tensors]),
                _grad_enabled(), backends.current, choices.version, on_this_thread.kept is None,
                on_this_thread.batch_invariant,
            )  # fmt: skip
            if products and first.dtype is torch.float32 and not first.is_cpu:
                key = (*key, torch.backends.cuda.matmul.fp32_precision)
            for plan in plans[key]:
                if plan.matches(*tensors):
                    return plan, tensors, key
        except RuntimeError:  # a tensor has no memory, or no strides
            return None, (), None
        return None, tensors, key

    return find
