"""CUDA graphs of repeated work: copies inputs into static buffers, one set per shape, and replays the launches.

The first run of a shape is eager, which initializes libraries and kernels; the second is captured, later runs replay
the graph. Captured work never reads back to the host; values that change between runs are in device memory. On a CPU,
as in tests, nothing is captured; results are bit-identical to runs without buffers.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttfm.errors import UserError, is_out_of_memory


@dataclass(slots=True)
class _Entry:
    """The static buffers of a shape, and their graph."""

    buffers: list[Tensor]
    graph: torch.cuda.CUDAGraph | None = None

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors of the same shapes into the buffers, without waiting."""
        for buffer, tensor in zip(self.buffers, tensors):
            pinned = tensor.pin_memory() if buffer.is_cuda and not tensor.is_cuda else tensor
            buffer.copy_(pinned, non_blocking=buffer.is_cuda)


class Graphs:
    """A cache of CUDA graphs by key."""

    def __init__(self, device: torch.device, what: str, remedy: str) -> None:
        """what: name of the captured work. remedy: advice if it cannot be captured. Both are for the error message."""
        self._device, self._what, self._remedy = device, what, remedy
        self._entries: dict[Hashable, _Entry] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """Stream of first runs and captures, so that gradients are produced on the captured stream."""
        self.pool: Any = None
        """Memory pool shared by all graphs, which never run concurrently; None before the first capture."""

    @property
    def captures(self) -> bool:
        """Whether runs are captured; never on a CPU."""
        return self._stream is not None

    def held_bytes(self) -> int:
        """Bytes reserved by the graphs' pool, which replays use without allocating."""
        segments = torch.cuda.memory_snapshot() if self.pool is not None else []
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == self.pool)

    def __call__(
        self, run: Callable[..., None], key: Hashable, tensors: Sequence[Tensor] = (), *, times: int = 1
    ) -> None:
        """Copy `tensors` into the buffers of `key` and run on them `times` times.

        Calls with the same key must have the same `run` and the same shapes.
        """
        entry = self._entries.get(key)
        is_new = entry is None
        if entry is None:
            entry = self._entries[key] = _Entry([torch.empty_like(each, device=self._device) for each in tensors])
        entry.fill(tensors)
        stream = self._stream
        if stream is None or not self.captures:
            for _ in range(times):
                run(*entry.buffers)
            return
        if is_new:
            current = torch.cuda.current_stream(self._device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                run(*entry.buffers)
            current.wait_stream(stream)
            times -= 1
        if entry.graph is None and times:
            entry.graph = self._captured(run, entry.buffers)
        for _ in range(times):
            entry.graph.replay()  # type: ignore[union-attr]

    def _captured(self, run: Callable[..., None], buffers: list[Tensor]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads may allocate and copy during the capture
            with torch.cuda.graph(graph, pool=self.pool, stream=self._stream, capture_error_mode="thread_local"):
                run(*buffers)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise UserError(f"{self._what} cannot be captured as a CUDA graph ({error}): {self._remedy}") from error
        self.pool = self.pool or graph.pool()
        return graph
