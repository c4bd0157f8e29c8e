"""Counts the GPU launches of PyTorch code: Triton kernels and ATen operators.

    with LaunchLog() as log:
        training_step()
    print(log.table())

Without a GPU, kernels run in Triton's interpreter, and ATen operators count as the launches that they would make:

    an operator that computes or moves elements         1 (cuBLAS and reductions along a large axis may take a second
                                                        one to add partial sums)
    views and allocations                               0
    an operator on lists of tensors (fused optimizer)   by the number of tensors, see _TENSORS_PER_LAUNCH
    a sort                                              the passes of a radix sort
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fasttfm.kernels.launch import interpreted

_NO_LAUNCH = {
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "set_",
    "_local_scalar_dense",  # .item(): synchronizes and copies, without a kernel
}
_PRODUCTS = {"_addmm_activation", "addmm", "addmm_", "baddbmm", "bmm", "mm"}
_TENSORS_PER_LAUNCH = (110, 64, 48, 36, 30)
"""Tensors per launch of an operator on 1 to 5 lists (ATen/native/cuda/MultiTensorApply), for devices and builds with
4 KB of kernel arguments; others take seven times as many."""

_SMALL_SORT = 4096
"""Elements that one program sorts (ATen/native/cuda/Sort.cpp)."""


class LaunchLog:
    """Context manager that counts launches by name; long_sorts: count every sort as one of many elements."""

    def __init__(self, *, long_sorts: bool = False) -> None:
        self.long_sorts = long_sorts
        self.triton: Counter[str] = Counter()
        """Triton kernels, as file.kernel."""
        self.products: Counter[str] = Counter()
        """Matrix products by ATen."""
        self.others: Counter[str] = Counter()
        """Other ATen operators that launch."""
        self._open = contextlib.ExitStack()

    def __enter__(self) -> LaunchLog:
        self._open.enter_context(_interpreted_launches(self) if interpreted() else _device_launches(self))
        self._open.enter_context(_Operators(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    @property
    def total(self) -> int:
        return self.triton.total() + self.products.total() + self.others.total()

    def table(self) -> str:
        """One line per kind and name, with its count."""
        lines = []
        for kind, counts in (("triton", self.triton), ("product", self.products), ("aten", self.others)):
            lines.append(f"{kind:8} {counts.total():5}")
            lines += [f"         {count:5}  {name}" for name, count in counts.most_common()]
        return "\n".join([*lines, f"total    {self.total:5}"])


class _Operators(TorchDispatchMode):
    sees_through_operators = True
    """This mode needs no dispatch of fasttfm's operators: it sees the launches inside of direct calls."""

    def __init__(self, log: LaunchLog) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "fasttfm":
            # Not a launch itself: run its kernel with this mode enabled again, to count what that launches.
            device = next(a.device.type for a in args if isinstance(a, torch.Tensor))
            with self:
                return func.redispatch(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper())), *args)
        with self:  # composite operators, such as linear
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and not func.is_view and name not in _NO_LAUNCH:
            counts = self._log.products if name in _PRODUCTS else self._log.others
            counts[name] += self._sort_launches(args[0]) if name == "sort" else _launches(args)
        return func(*args, **kwargs)

    def _sort_launches(self, x: torch.Tensor) -> int:
        """Launches of a sort of one row: indices, two copies and the sort; or, if large, indices, histogram, prefix sum
        and one pass per byte (cub::DeviceRadixSort, without the clearing of counters)."""
        return 3 + x.element_size() if self._log.long_sorts or x.numel() > _SMALL_SORT else 4


def _launches(args: tuple) -> int:
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
    if len(lists) == 5:  # the step numbers of a fused optimizer do not count as tensors
        lists = lists[:4]
    if len(lists) == 0 or len(lists) > len(_TENSORS_PER_LAUNCH):
        return 1
    return -(-len(lists[0]) // _TENSORS_PER_LAUNCH[len(lists) - 1])


@contextlib.contextmanager
def _interpreted_launches(log: LaunchLog) -> Iterator[None]:
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        log.triton[_name(self.fn)] += 1
        with _disable_current_modes():  # the interpreter's own tensor operations are not launches
            return run(self, *args, **kwargs)

    with mock.patch.object(interpreter.GridExecutor, "__call__", counted):
        yield


@contextlib.contextmanager
def _device_launches(log: LaunchLog) -> Iterator[None]:
    try:
        from triton import knobs
    except ImportError:  # no Triton, no launches
        yield
        return

    def count(metadata: Any) -> None:
        log.triton[metadata.get()["name"]] += 1

    knobs.runtime.launch_enter_hook.add(count)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(count)


def _name(function: Any) -> str:
    return f"{function.__module__.removeprefix('fasttfm.kernels.')}.{function.__name__}"
