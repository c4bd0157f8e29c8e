"""CUDA graphs of updates, with one set of input buffers per batch shape (a few dozen, see data/shapes.py)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_type_hints

from torch import Tensor, nn

from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import Batch, TokenBatches
from fasttfm.models.plain import hooked
from fasttfm.system.graphs import Graphs
from fasttfm.training.protocols import TrainingBatches
from fasttfm.training.workers import Workers

DEVICES = {"cuda"}
"""Device types that capture updates."""
_TENSORS = [name for name, kind in get_type_hints(Batch).items() if kind is Tensor]


def why_uncaptured(module: nn.Module, batches: TrainingBatches, config: TrainingConfig, workers: Workers) -> str | None:
    """The reason why updates cannot be captured, or None."""
    reasons = {
        "several workers exchange gradients": workers.size > 1,
        "packed batches are of ever new shapes": config.packed,
        "these batches are of ever new shapes": not isinstance(batches, TokenBatches),
        "a module has hooks": any(map(hooked, module.modules())),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def run_on_batch(graphs: Graphs, run: Callable[[Any], None], batch: Batch | None) -> None:
    """Call run(batch), captured by batch shape; run must be the same function for each shape. None: without batch."""
    if batch is None:
        graphs(lambda: run(None), None)
        return

    def on_buffers(*buffers: Tensor) -> None:
        # invalid counts: those of the captured batch would be wrong in replays
        run(replace(batch, **dict(zip(_TENSORS, buffers)), source_tokens=-1, target_tokens=-1))

    graphs(on_buffers, batch.shape, [getattr(batch, name) for name in _TENSORS])
