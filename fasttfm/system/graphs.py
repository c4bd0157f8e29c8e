"""CUDA graphs of repeated work: inputs are copied into fixed buffers, one set a shape, and the launches replayed.

The first run of a shape is eager, which prepares libraries and kernels; the second is captured, later ones replay it.
Captured work reads nothing back to the host and finds what changes between runs in device memory. On a CPU, in tests,
nothing is captured; results are bit-identical to runs without buffers.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttfm.errors import UserError, is_out_of_memory


@dataclass(slots=True)
class _Held:
    """Buffers of one shape, and their graph."""

    buffers: list[Tensor]
    graph: torch.cuda.CUDAGraph | None = None

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors of these shapes in; nothing is waited for."""
        for buffer, given in zip(self.buffers, tensors):
            pinned = given.pin_memory() if buffer.is_cuda and not given.is_cuda else given
            buffer.copy_(pinned, non_blocking=buffer.is_cuda)


class Graphs:
    """Runs what is computed again and again from the same addresses."""

    def __init__(self, device: torch.device, what: str, remedy: str) -> None:
        """what runs, and what a user does where it cannot be captured."""
        self._device, self._what, self._remedy = device, what, remedy
        self._held: dict[Hashable, _Held] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """Stream of first runs and captures: gradients must come by the captured stream."""
        self.pool: Any = None
        """The id of the memory that all graphs share, once there is one: no two of them run at once."""

    @property
    def captures(self) -> bool:
        """True where runs are captured; on a CPU none is."""
        return self._stream is not None

    def held_bytes(self) -> int:
        """Memory that runs use and none allocates: what the graphs' pool has reserved."""
        segments = torch.cuda.memory_snapshot() if self.pool is not None else []
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == self.pool)

    def __call__(
        self, run: Callable[..., None], key: Hashable, tensors: Sequence[Tensor] = (), *, times: int = 1
    ) -> None:
        """Run so many times on tensors, as they lie in buffers; those of one key must be of the same shapes, and run
        the same."""
        held = self._held.get(key)
        is_new = held is None
        if held is None:
            held = self._held[key] = _Held([torch.empty_like(each, device=self._device) for each in tensors])
        held.fill(tensors)
        stream = self._stream
        if stream is None or not self.captures:
            for _ in range(times):
                run(*held.buffers)
            return
        if is_new:
            current = torch.cuda.current_stream(self._device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                run(*held.buffers)
            current.wait_stream(stream)
            times -= 1
        if held.graph is None and times:
            held.graph = self._captured(run, held.buffers)
        for _ in range(times):
            held.graph.replay()  # type: ignore[union-attr]

    def _captured(self, run: Callable[..., None], buffers: list[Tensor]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may allocate and copy meanwhile
            with torch.cuda.graph(graph, pool=self.pool, stream=self._stream, capture_error_mode="thread_local"):
                run(*buffers)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise UserError(f"{self._what} cannot be captured as a CUDA graph ({error}): {self._remedy}") from error
        self.pool = self.pool or graph.pool()
        return graph
