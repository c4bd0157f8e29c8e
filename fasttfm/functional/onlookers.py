"""Detects what must see a call at the dispatcher: torch.compile, torch.func, dispatch modes, the profiler.

alike() guards the plan of a call. The private names of torch read here have no public equivalent: TensorGuards,
torch.compile's guards, which check a whole call in C; the number of dispatch modes, and the modes; whether torch.func
transforms are active; whether the profiler records; the level of forward-mode AD; whether autocast is on for any
device; whether saved-tensor hooks, which may change strides, are set.
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
"""FLOPs of a call by operator packet; a multiply-add counts two."""


def alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a guard: do as many tensors look like these, to a plan and to the dispatcher?

    Compares class, dtype, device, shape, strides, requires_grad, repeated tensors, and the dispatch keys, which
    transforms, autocast for their device, inference mode and most dispatch modes change. Keeps no reference to them.
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
    first, unique = items([places[id(x)] for x in tensors]), items(sorted(places.values()))
    return lambda *args: all(map(is_, args, first(args))) and check(*unique(args))  # guards refuse repeated tensors


def looked_at() -> bool:
    """Return whether a call must go through the dispatcher."""
    return (
        compiling() or transformed() or _profiler._is_profiler_enabled or forward_ad._current_level >= 0
        or (modes() > 0 and not see_through())
    )  # fmt: skip


def see_through() -> bool:
    """Return whether every active dispatch mode wants direct calls, as a launch counter does.

    Also registers our FLOP formulas with torch.utils.flop_counter and with active counters, which copied its registry.
    It cannot be done earlier: importing flop_counter imports Triton, which importing fasttfm must not.
    """
    stack = _get_current_dispatch_mode_stack()
    if counter := sys.modules.get("torch.utils.flop_counter"):
        counter.flop_registry.update(formulas)
        for mode in stack:
            getattr(getattr(mode, "counter", None), "flop_registry", {}).update(formulas)
    return all(getattr(mode, "sees_through_operators", False) for mode in stack)
