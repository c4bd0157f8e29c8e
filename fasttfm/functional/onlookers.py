"""Onlookers that must see operators: compilers, transforms, modes, profilers; and whether tensors are as others were.

Of torch's private names these are asked here, each because no public one tells: TensorGuards, torch.compile's own
guards, which answer in one call of C what a dozen calls for each tensor would; how many dispatch modes are on, and
which; whether torch.func maps or differentiates; whether the profiler records; at which level forward-mode derivatives
are; whether autocast is on for any device, in one question; whether hooks on saved tensors may give other strides back.
"""

import sys
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fasttfm.functional.record import items

compiling = torch.compiler.is_dynamo_compiling
modes = torch._C._len_torch_dispatch_stack
transformed = torch._C._are_functorch_transforms_active
any_autocast = torch._C._is_any_autocast_enabled
saved_hook = torch._C._autograd._top_saved_tensors_default_hooks

formulas: dict[Any, Callable[..., int]] = {}
"""By packet of torch.ops, of a call's arguments: floating-point operations, two for a multiplication and its sum."""


def alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that tells of as many tensors whether they are as these are now: of the same classes, dtypes, devices,
    shapes and strides, wanting gradients or not, the same ones given twice, and seen by the dispatcher as these are,
    which transforms, autocast for their device, inference mode and some dispatch modes change. It keeps none of them.
    """
    places = {id(x): place for place, x in reversed([*enumerate(tensors)])}
    once = [tensors[place] for place in sorted(places.values())]
    layouts: Any = {
        "dynamic_dims_sizes": [[*x.shape] for x in once],
        "dynamic_dims_strides": [[*x.stride()] for x in once],
    }
    check: Callable[..., bool] = TensorGuards(*once, **layouts).check
    if len(once) == len(tensors):
        return check
    first, chosen = items([places[id(x)] for x in tensors]), items(sorted(places.values()))
    return lambda *given: all(map(is_, given, first(given))) and check(*chosen(given))  # guards take no tensor twice


def looked_at() -> bool:
    """Return whether anything looks on that the dispatcher must ask."""
    return (
        compiling() or transformed() or _profiler._is_profiler_enabled or forward_ad._current_level >= 0
        or (modes() > 0 and not see_through())
    )  # fmt: skip


def see_through() -> bool:
    """Return whether all dispatch modes that are on, such as a count of launches, want calls as they are.

    Here torch.utils.flop_counter is told of our formulas, and its counters among the modes, which have copied what was
    known before: importing it imports Triton, which importing fasttfm must not.
    """
    stack = _get_current_dispatch_mode_stack()
    if counter := sys.modules.get("torch.utils.flop_counter"):
        counter.flop_registry.update(formulas)
        for mode in stack:
            getattr(getattr(mode, "counter", None), "flop_registry", {}).update(formulas)
    return all(getattr(mode, "sees_through_operators", False) for mode in stack)
