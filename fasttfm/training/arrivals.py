"""Asynchronous copies of numbers from the device to the host, with callbacks on arrival."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_AHEAD = 4
"""Maximum copies in flight: otherwise the host launches updates far ahead of the device, and signals wait for all."""


class _Copy(NamedTuple):
    """A copy in flight."""

    numbers: Tensor
    """On the host."""
    use: Callable[[Any], None]
    arrived: Any
    """CUDA event recorded after the copy, or None."""


class Arrivals:
    """Queue of copies, whose callbacks run in order."""

    def __init__(self) -> None:
        self._coming: deque[_Copy] = deque()

    def expect(self, tensor: Tensor, use: Callable[[Any], None]) -> None:
        """Start a copy of tensor; once it has arrived, take() calls use with its tolist()."""
        numbers = tensor.to("cpu", non_blocking=True, copy=True)  # from a GPU, to pinned memory
        arrived = torch.cuda.Event() if tensor.is_cuda else None
        if arrived is not None:
            arrived.record()
        self._coming.append(_Copy(numbers, use, arrived))

    def keep_up(self) -> None:
        """Wait while too many copies are in flight."""
        if len(self._coming) > _AHEAD and (arrived := self._coming[-1 - _AHEAD].arrived) is not None:
            arrived.synchronize()

    def take(self, wait: bool = False) -> None:
        """Run the callbacks of copies that have arrived; wait: of all."""
        while self._coming:
            first = self._coming[0]
            if first.arrived is not None and not first.arrived.query():
                if not wait:
                    return
                first.arrived.synchronize()
            self._coming.popleft()
            first.use(first.numbers.tolist())
