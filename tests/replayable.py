"""Checks on a CPU that a CUDA graph could replay a run: no host read, new address or data-dependent shape.

A graph repeats the captured launches with the captured addresses and numbers. So all runs of a shape must make the same
calls: the same operators and kernels, numbers and grids, on tensors of the same layout that come from the same earlier
calls or have the same address. Operators that read values or have data-dependent shapes fail at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fasttfm.functional import backend
from fasttfm.kernels.jit import Launch
from fasttfm.system import graphs
from fasttfm.training import graphs as training
from ptx_check.chips import CHIPS
from ptx_check.cuda import Answers

_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Calls(TorchDispatchMode):
    """Records calls: operators, including those inside fasttfm's operators, and kernel launches."""

    sees_through_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple] = []
        self._places: dict[int, Any] = {}
        """Address -> the call that allocated it, or the address itself if it existed before."""
        self._kept: list[Tensor] = []
        """All tensors seen: freed memory could be reused at the same address."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not _READS.intersection(function.tags), f"{function} reads a value"
        if function.namespace != "profiler":  # profiler ranges
            self.note(str(function), args, kwargs)
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._place(tensor, f"of call {len(self.made)}")
        return result

    def note(self, name: str, *given: Any) -> None:
        """Record a call."""
        self.made.append((name, *[self._seen(value) for value in tree_leaves(given)]))

    def _seen(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        place = self._place(value, hex(value.untyped_storage().data_ptr()))
        return place, value.dtype, tuple(value.shape), value.stride(), value.storage_offset()

    def _place(self, tensor: Tensor, otherwise: str) -> str:
        self._kept.append(tensor)
        return self._places.setdefault(tensor.untyped_storage().data_ptr(), otherwise)


class Watched(graphs.Graphs):
    """Graphs that assert that every run equals a replay of the second one, which would be captured."""

    def __init__(self, device: torch.device, what: str = "", remedy: str = "") -> None:
        super().__init__(device, what, remedy)
        self.runs: dict[Any, list[Calls]] = {}
        """Recorded runs by key."""

    def __call__(self, run: Callable[..., None], key: Any, tensors: Any = (), *, times: int = 1) -> None:
        super().__call__(partial(self._watch, run, key), key, tensors, times=times)

    def _captured(self, run: Callable[..., None], buffers: Any) -> Any:
        return SimpleNamespace(replay=partial(run, *buffers))

    def _watch(self, run: Callable[..., None], key: Any, *buffers: Any) -> None:
        calls, runs = Calls(), self.runs.setdefault(key, [])

        def started(launch: Launch, *arguments: Any) -> None:
            calls.note(launch.kernel.__name__, launch.grid, sorted(launch.constants.items()), arguments)

        with mock.patch.object(Launch, "__call__", started), calls:
            run(*buffers)
        runs.append(calls)
        captured = runs[min(1, len(runs) - 1)].made
        for number, (then, now) in enumerate(zip_longest(captured, calls.made)):
            assert then == now, f"call {number} is {now}, where a replay would repeat {then}"


@contextmanager
def on_a_chip(route: str) -> Iterator[torch.device]:
    """Simulate a GPU with CPU tensors: training updates are watched, kernels are recorded and not launched."""
    scaler = partial(torch.amp.GradScaler, "cpu")
    with (
        mock.patch.object(training, "Graphs", Watched),
        mock.patch.object(torch.amp, "GradScaler", lambda device, enabled: scaler(enabled=enabled)),
        Answers(CHIPS["sm_90"]),
        backend(route),
    ):
        yield torch.device("cuda")
