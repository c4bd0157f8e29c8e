"""Numbers on their way from the device to the host: copied without waiting, used when they have arrived."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_AHEAD = 4
"""Numbers that may be under way while the host goes on: else it would launch updates far ahead of the device, and a
signal would wait for all of them."""


class _Copy(NamedTuple):
    """A tensor as it was when it was sent."""

    numbers: Tensor
    """On the host."""
    use: Callable[[Any], None]
    arrived: Any
    """The event behind the copy; None where there was nothing to wait for."""


class Arrivals:
    """Uses numbers in the order in which they were sent."""

    def __init__(self) -> None:
        self._coming: deque[_Copy] = deque()

    def expect(self, tensor: Tensor, use: Callable[[Any], None]) -> None:
        """Send a tensor's numbers as they are now; use is called with its tolist() by take(), later on a GPU."""
        numbers = tensor.to("cpu", non_blocking=True, copy=True)  # of a GPU's into pinned memory
        arrived = torch.cuda.Event() if tensor.is_cuda else None
        if arrived is not None:
            arrived.record()
        self._coming.append(_Copy(numbers, use, arrived))

    def keep_up(self) -> None:
        """Wait for the device while too much is under way."""
        if len(self._coming) > _AHEAD and (arrived := self._coming[-1 - _AHEAD].arrived) is not None:
            arrived.synchronize()

    def take(self, wait: bool = False) -> None:
        """Use what has arrived; wait: for everything."""
        while self._coming:
            first = self._coming[0]
            if first.arrived is not None and not first.arrived.query():
                if not wait:
                    return
                first.arrived.synchronize()
            self._coming.popleft()
            first.use(first.numbers.tolist())
