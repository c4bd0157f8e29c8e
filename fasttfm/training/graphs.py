"""Updates from fixed addresses, which CUDA graphs hold: one launch for some hundred.

A batch is copied into buffers that stay where they are, one set a shape (there are a few dozen, fasttfm.data.shapes).
What runs on it reads nothing back to the host, and finds whatever differs from update to update, such as the learning
rate and dropout's seed, in device memory. The first time that a shape comes it runs as it is, which prepares libraries
and kernels; the second time it is captured, and replayed from then on. Only tests let a CPU do the same: it captures
nothing, and ends in the same bits as without buffers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import Batch, TokenBatches
from fasttfm.errors import UserError, is_out_of_memory
from fasttfm.models.plain import hooked
from fasttfm.training.protocols import TrainingBatches
from fasttfm.training.workers import Workers

DEVICES = {"cuda"}
"""Types of devices that train from fixed addresses."""
_TENSORS = [name for name, kind in get_type_hints(Batch).items() if kind is Tensor]


def why_uncaptured(module: nn.Module, batches: TrainingBatches, config: TrainingConfig, workers: Workers) -> str | None:
    """The reason, for a person, that updates cannot be captured; None where they can."""
    reasons = {
        "several workers exchange gradients": workers.size > 1,
        "packed batches are of ever new shapes": config.packed,
        "these batches are of ever new shapes": not isinstance(batches, TokenBatches),
        "a module has hooks": any(map(hooked, module.modules())),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@dataclass(slots=True)
class _Held:
    """Buffers of one shape, and their graph."""

    batch: Batch | None
    graph: torch.cuda.CUDAGraph | None = None

    def fill(self, batch: Batch) -> None:
        """Copy a batch of this shape in; nothing is waited for."""
        for name in _TENSORS:
            buffer, given = getattr(self.batch, name), getattr(batch, name)
            pinned = given.pin_memory() if buffer.is_cuda and not given.is_cuda else given
            buffer.copy_(pinned, non_blocking=True)


class Graphs:
    """Runs what is computed on batch after batch from the same addresses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[tuple[int, ...] | None, _Held] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """Where first runs and captures are: gradients must come by the stream that is captured."""
        self.pool: Any = None
        """The id of the memory that all graphs share, once there is one: no two of them run at once."""

    def __call__(self, run: Callable[[Any], None], batch: Batch | None) -> None:
        """Run on a batch, None without one; batches of one shape must come with one and the same function."""
        key = None if batch is None else batch.shape
        held = self._held.get(key)
        is_new = held is None
        if held is None:
            held = self._held[key] = _Held(None if batch is None else self._buffers(batch))
        if batch is not None:
            held.fill(batch)
        if self._stream is None:
            run(held.batch)
            return
        if is_new:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run(held.batch)
            torch.cuda.current_stream().wait_stream(self._stream)
            return
        if held.graph is None:
            held.graph = self._captured(run, held.batch)
        held.graph.replay()

    def _buffers(self, batch: Batch) -> Batch:
        tensors = {name: torch.empty_like(getattr(batch, name), device=self._device) for name in _TENSORS}
        # the counts of this batch are not those of the next one of its shape: whoever reads them would be wrong
        return replace(batch, **tensors, source_tokens=-1, target_tokens=-1)

    def _captured(self, run: Callable[[Any], None], batch: Batch | None) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self._stream):
                run(batch)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise UserError(f"an update cannot be captured as a CUDA graph ({error}): give --no-cuda-graph") from error
        self.pool = self.pool or graph.pool()
        return graph
