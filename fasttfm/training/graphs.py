"""Forward and backward passes from fixed addresses, so that a CUDA graph can hold them: a launch for some hundred.

A batch is copied into buffers that stay where they are, one set a shape (there are a few dozen, fasttfm.data.shapes);
gradients are added into buffers that stay as well. What runs between reads nothing back to the host, and draws its
dropout from a seed in device memory. On a GPU the pass of each shape is captured when it first comes, and replayed from
then on; on a CPU the very same passes run as they are, and end in the same bits as without buffers. The optimizer's few
launches are not part of a graph: it changes the learning rate at each update.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

import torch
from torch import Tensor

from fasttfm.data.batches import Batch

Pass = Callable[[Batch, Tensor], None]
"""Adds the gradients of a batch, divided by a 0-d tensor, to those of the parameters, and its losses to a sum."""
_WARM_UP = 2
"""Passes before one is captured: libraries and Triton prepare themselves in the first."""


@dataclass(slots=True)
class _Fixed:
    """Buffers of one shape, and their graph."""

    batch: Batch
    divisor: Tensor
    graph: torch.cuda.CUDAGraph | None = None

    def fill(self, batch: Batch, divisor: int) -> None:
        """Copy a batch of this shape in; nothing is waited for."""
        for name in _TENSORS:
            getattr(self.batch, name).copy_(getattr(batch, name), non_blocking=True)
        self.divisor.fill_(divisor)


_TENSORS = [name for name, kind in get_type_hints(Batch).items() if kind is Tensor]


class GraphedPasses:
    """Runs a pass on batch after batch from the same addresses."""

    def __init__(self, run: Pass, parameters: list[Tensor], sums: Tensor) -> None:
        """run: what is computed; parameters: whose gradients it adds to; sums: what it adds losses to."""
        self._run, self._parameters, self._sums = run, parameters, sums
        self._fixed: dict[tuple[int, ...], _Fixed] = {}
        self.pool: Any = None
        """The id of the memory that all graphs share, once there is one: no two of them run at once."""
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

    def __call__(self, batch: Batch, divisor: int) -> None:
        """Add the gradients and losses of a batch."""
        fixed = self._fixed.get(batch.shape)
        if fixed is None:
            fixed = self._fixed[batch.shape] = self._buffers(batch)
            if batch.source.is_cuda:
                fixed.fill(batch, divisor)
                fixed.graph = self._capture(fixed)
        fixed.fill(batch, divisor)
        if fixed.graph is None:
            self._run(fixed.batch, fixed.divisor)
        else:
            fixed.graph.replay()

    @staticmethod
    def _buffers(batch: Batch) -> _Fixed:
        tensors = {name: torch.empty_like(getattr(batch, name)) for name in _TENSORS}
        # the counts of this batch are not those of the next one of its shape: whoever reads them would be wrong
        counts = {"source_tokens": -1, "target_tokens": -1}
        divisor = torch.empty((), dtype=torch.float32, device=batch.source.device)
        return _Fixed(replace(batch, **tensors, **counts), divisor)  # type: ignore[arg-type]

    def _capture(self, fixed: _Fixed) -> torch.cuda.CUDAGraph:
        """The graph of a pass; gradients, losses and random numbers are afterwards as they were before."""
        kept = [self._sums.clone(), *(p.grad.clone() for p in self._parameters if p.grad is not None)]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.random.fork_rng([fixed.batch.source.device]):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    self._run(fixed.batch, fixed.divisor)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self.pool):
                self._run(fixed.batch, fixed.divisor)
        self.pool = self.pool or graph.pool()
        with torch.no_grad():
            for buffer, value in zip([self._sums, *(p.grad for p in self._parameters)], kept, strict=True):
                if buffer is not None:
                    buffer.copy_(value)
        return graph
